"""Tables that explain how a configuration's memory is divided. They show results and reasons of `sizing` and `pools`."""

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
    """One level: its quota and the bytes that its slots use."""

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
        """Whether the configured quota was below the minimum."""

class SizingTable:
    """How the quota of each level is divided into slots. `str()` returns a readable table."""

    levels: list[SizingLevel]
    group_names: list[str]

    def __init__(self, levels: list[SizingLevel], group_names: list[str]) -> None: ...
    def __reduce__(self) -> tuple[object, ...]: ...
    @property
    def rows(self) -> list[SizingRow]:
        """The rows of all levels, level by level."""

def explain_sizing(config: KVCacheManagerConfig) -> SizingTable:
    """How the quota of each level is divided into slots of pool groups, and why. Allocates no cache memory.

    A quota below its minimum is raised, as a manager would raise it. Raises ConfigError for an invalid configuration.
    """

def name_group(layout: StorageLayout, index: int) -> str:
    """A layer group in a few words: "window 1024, 2 layers"."""

def human_bytes(count: int) -> str:
    """A size as text, in the largest unit in which it is at least 1."""

def draw_layout(layout: StorageLayout) -> str:
    """The position of each buffer in a slot, as text: by pool group and pool, one line for each layer group."""
