"""Why the memory of a configuration is divided as it is, as tables to read.

Rule: nothing is decided here. What is shown is what `sizing` and `pools` computed, with the reasons that they noted.
"""

from typing import Final, NamedTuple

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.ids import CacheTier, LayerGroupId, PoolGroupId
from kv_cache_manager_v2.layout.pools import StorageLayout

FLOOR_OF_ONE_REQUEST: Final = "floor: one request"
FLOOR_OF_CONSTRAINTS: Final = "floor: constraints"
IN_GRAINS: Final = ", and what its grains and the remainder hold"
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
COLUMNS: Final = ("pool group", "layer groups", "bytes/slot", "floor", "share asked", "slots", "bytes", "share", "decided by")

class SizingRow(NamedTuple):
    """One pool group on one level."""

    level: int
    pool_group: PoolGroupId
    layer_groups: tuple[LayerGroupId, ...]
    slot_bytes: int
    floor: int
    share_asked: float
    slots: int
    slots_bytes: int
    share: float
    decided_by: str

class SizingLevel(NamedTuple):
    """One level: from the quota asked for to what its slots use."""

    level: int
    tier: CacheTier
    asked: int
    quota: int
    minimum: int
    granularity: int
    used: int
    rows: tuple[SizingRow, ...]

    @property
    def raised(self) -> bool:
        """Whether the quota asked for was below the minimum."""

class SizingTable:
    """How each quota became slots; `str` prints it."""

    levels: list[SizingLevel]
    group_names: list[str]

    def __init__(self, levels: list[SizingLevel], group_names: list[str]) -> None: ...
    def __reduce__(self) -> tuple[object, ...]: ...
    @property
    def rows(self) -> list[SizingRow]:
        """Of all levels, level by level."""

def explain_sizing(config: KVCacheManagerConfig) -> SizingTable:
    """How the quota of each tier of a configuration becomes slots, by pool group, and what bounds it. Takes no memory.

    A quota below its minimum is shown raised, as a manager would raise it. Raises ConfigError for an invalid configuration.
    """

def human_bytes(count: int) -> str:
    """In the largest unit of which there is at least one."""

def draw_layout(layout: StorageLayout) -> str:
    """Where each buffer lies: by pool group and pool, one line for each layer group that shares the slots."""
