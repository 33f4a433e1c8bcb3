from typing import Final, NamedTuple

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.ids import CacheTier, LayerGroupId, PoolGroupId
from kv_cache_manager_v2.layout.pools import StorageLayout

FLOOR_OF_ONE_REQUEST: Final[str]
FLOOR_OF_CONSTRAINTS: Final[str]
IN_GRAINS: Final[str]
UNITS: Final[tuple[str, ...]]
COLUMNS: Final[tuple[str, ...]]

class SizingRow(NamedTuple):
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
    level: int
    tier: CacheTier
    asked: int
    quota: int
    minimum: int
    granularity: int
    used: int
    rows: tuple[SizingRow, ...]
    @property
    def raised(self) -> bool: ...

class SizingTable:
    levels: list[SizingLevel]
    group_names: list[str]

    def __init__(self, levels: list[SizingLevel], group_names: list[str]) -> None: ...
    @property
    def rows(self) -> list[SizingRow]: ...

def explain_sizing(config: KVCacheManagerConfig) -> SizingTable: ...
def human_bytes(count: int) -> str: ...
def draw_layout(layout: StorageLayout) -> str: ...
