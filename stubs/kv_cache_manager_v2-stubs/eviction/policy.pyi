"""Eviction policies: a policy gives the cached blocks of a request a class when the request ends."""

from typing import Final, SupportsIndex

from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.eviction.order import EvictionOrder

MORE: Final = "more"
END: Final = "end"
EXPECTATIONS: Final[tuple[str, ...]]

class RequestEnd:
    """What is known of a request that ends."""

    num_tokens: int
    num_reused: int
    scope: bytes
    blocks: list[bytes]
    expect: str | None
    capacity: int

    def __init__(
        self, num_tokens: int, num_reused: int, scope: bytes, blocks: list[bytes], expect: str | None, capacity: int
    ) -> None: ...
    @property
    def num_blocks(self) -> int:
        """Full committed blocks."""

class EvictionPolicy:
    """Decides which of two evictable pages of equal priority is evicted first. This one is least recently used.

    A policy has a few classes. It gives every request that ends a class, which its cached blocks take. A block that other blocks
    continue, too, keeps a higher class. Within a class the page that became evictable first is evicted first. Between classes, each
    page's age counts as `credits[class]` pages younger. See `order` and docs/eviction_policies.md.

    One object belongs to one manager. Its methods are called with the manager locked, and must not call the manager or its caches.
    """

    order: EvictionOrder
    listens: bool

    def __init__(self, credits: Integers = (0,), usual: SupportsIndex = 0) -> None:
        """`credits`: of each class, in pages, from 0 to 2**48; they must not decrease. `usual`: class of all other pages."""

    def class_of(self, end: RequestEnd) -> int:
        """The class of a request's cached blocks. Called once for each request, when it is closed.

        If it raises an Exception, or returns no class, the error is logged and the blocks take the usual class.
        """
