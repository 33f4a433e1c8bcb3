from array import array
from collections.abc import Iterable, Sequence

from kv_cache_manager_v2.ids import PageIndexMode
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange
from kv_cache_manager_v2.layout.pools import BufferPlace, StorageLayout

class ScratchDesc:
    range: HalfOpenRange
    slot_ids: list[int]

    def __init__(self, range: HalfOpenRange, slot_ids: Sequence[int]) -> None: ...
    def __bool__(self) -> bool: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class PageIndexConverter:
    scale: int
    layer_offset: int
    expansion: int
    layer_util: int
    layer_first: int
    scratch_enabled: bool

    def __init__(self, place: BufferPlace, scratch_enabled: bool = False) -> None: ...
    def __call__(
        self, base_indices: Iterable[int], mode: PageIndexMode | None = None, scratch: ScratchDesc | None = None
    ) -> array[int]: ...

def page_index_upper_bound(layout: StorageLayout, place: BufferPlace, num_slots: int) -> int: ...
def buffer_base(place: BufferPlace, pool_base: int, mode: PageIndexMode) -> int: ...
def resolve_mode(layout: StorageLayout, mode: PageIndexMode | None) -> PageIndexMode: ...
