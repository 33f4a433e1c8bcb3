"""Pages in the engine's memory: the manager only tracks which slots are in use, and asks the engine for copies.

Like config.py this file is never compiled, so that subclasses of users work on both builds.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

from kv_cache_manager_v2.config import CacheTierConfig, KVCacheManagerConfig
from kv_cache_manager_v2.ids import CacheTier, Stream

class Transfer(ABC):
    """Copies of pages that the engine's workers own, queued on a stream in its order. An exception means that nothing is copied.

    A page is named by its base page index within a pool group, a pool by its number in the group. `get_page_index_converter` and
    the order of buffers in the configuration say where a buffer lies in a page of a pool.
    """

    @abstractmethod
    def copy_pages(self, stream: Stream, pool_group: int, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Queue copies of whole pages, in every pool of the group, from sources[i] to destinations[i]."""

    @abstractmethod
    def to_memory(
        self,
        stream: Stream,
        pool_group: int,
        pool: int,
        pages: Sequence[int],
        offset: int,
        num_bytes: int,
        addresses: Sequence[int],
    ) -> None:
        """Queue copies of bytes offset .. offset + num_bytes - 1 of each page in one pool to addresses[i] in host memory."""

    @abstractmethod
    def from_memory(
        self,
        stream: Stream,
        pool_group: int,
        pool: int,
        pages: Sequence[int],
        offset: int,
        num_bytes: int,
        addresses: Sequence[int],
    ) -> None:
        """As `to_memory`, in the other direction."""

@dataclass(init=False)
class ExternalGpuTierConfig(CacheTierConfig):
    """Level 0 with exactly `num_slots` pages in memory of the engine. The manager allocates nothing for them.

    All layer groups must have one page size. Without a `transfer` nothing is ever copied: there are no colder tiers, no matches
    inside blocks and no snapshots; a fork inside a block and a further beam raise LogicError. `resize(0, slots * bytes of a
    page)` of the manager follows memory that the engine has made larger or smaller.
    """

    quota: int = field(init=False)
    num_slots: int
    transfer: Transfer | None

    def __init__(self, num_slots: SupportsIndex, transfer: Transfer | None = None) -> None: ...
    def validate(self) -> None: ...
    def __deepcopy__(self, memo: object) -> ExternalGpuTierConfig:
        """A copy that shares the transfer, since the engine owns it."""

    @property
    def tier(self) -> CacheTier: ...
    @property
    def exact_size(self) -> bool: ...
    def granularity(self) -> int: ...
    def bytes_for(self, slot_bytes: Sequence[int]) -> int:
        """Raises ConfigError for several page sizes: each would need slots of its own."""

    def check_use(self, config: KVCacheManagerConfig) -> None:
        """Raise ConfigError if the configuration needs copies, and there is no transfer."""
