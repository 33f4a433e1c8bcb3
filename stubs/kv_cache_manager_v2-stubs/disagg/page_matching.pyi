from collections.abc import Sequence
from typing import NamedTuple

from kv_cache_manager_v2.disagg.page_table import KVCachePageTable

class Segment(NamedTuple):
    source_base: int
    source_stride: int
    destination_base: int
    destination_stride: int
    nbytes: int

class ByteMove(NamedTuple):
    source: int
    destination: int
    nbytes: int

class GroupPairing(NamedTuple):
    source_group: int
    destination_group: int
    segments: tuple[Segment, ...]

class TransferPlan:
    source: KVCachePageTable
    destination: KVCachePageTable
    pairings: list[GroupPairing]
    filled: dict[tuple[int, str], int]

    def __init__(self, source: KVCachePageTable, destination: KVCachePageTable, pairings: list[GroupPairing]) -> None: ...
    def moves(self, source_slots: Sequence[Sequence[int]], destination_slots: Sequence[Sequence[int]]) -> list[ByteMove]: ...

def match_page_tables(source: KVCachePageTable, destination: KVCachePageTable) -> TransferPlan: ...
def missing_buffers(destination: KVCachePageTable, plans: Sequence[TransferPlan]) -> list[tuple[int, str]]: ...
