"""Matches the bytes of one rank's pages with those of another, for ranks that divide the model differently.

Buffers are matched by role and by their layer in the whole model, bytes by the heads that both ranks have. This is done once for
two ranks; a request only adds its slot ids. Blocks outside a window have no page on either side and are skipped.

    source rank, heads 0..3 of layers 0..3          destination rank, heads 2..3 of layers 2..3
    slot: | 0k | 0v | 1k | 1v | 2k | 2v | 3k | 3v |   slot: | 2k | 2v | 3k | 3v |
                              `--: two of four heads of each token (NHD), or the second half of the buffer (HND)
"""

from collections.abc import Sequence
from typing import NamedTuple

from kv_cache_manager_v2.arguments import Integers
from kv_cache_manager_v2.disagg.page_table import (
    KVCachePageTable,
)

class Segment(NamedTuple):
    """Bytes that are contiguous on both sides. Those of a block are at base + stride * slot."""

    source_base: int
    source_stride: int
    destination_base: int
    destination_stride: int
    nbytes: int

class ByteMove(NamedTuple):
    """One copy of contiguous bytes."""

    source: int
    destination: int
    nbytes: int

class GroupPairing(NamedTuple):
    """The bytes that two layer groups have in common."""

    source_group: int
    destination_group: int
    segments: tuple[Segment, ...]

class TransferPlan:
    """The bytes that one rank can copy to another."""

    source: KVCachePageTable
    destination: KVCachePageTable
    pairings: list[GroupPairing]
    filled: dict[tuple[int, str], int]

    def __init__(self, source: KVCachePageTable, destination: KVCachePageTable, pairings: list[GroupPairing]) -> None: ...
    def __reduce__(self) -> tuple[object, ...]: ...
    def moves(self, source_slots: Sequence[Integers], destination_slots: Sequence[Integers]) -> list[ByteMove]:
        """The copies for one request, given its slots on both sides by layer group and block ordinal (see `request_slots`).

        A block is copied if the destination has a page for it. O(blocks x segments). Raises ConfigError (a ValueError) if the
        source has no page for such a block, or for a slot beyond the end of a pool.
        """

def match_page_tables(source: KVCachePageTable, destination: KVCachePageTable) -> TransferPlan:
    """Find the bytes that the source rank can copy to the destination rank. The plan is empty if they have none in common.

    Raises ConfigError (a ValueError) if both ranks have a buffer whose bytes cannot be matched. Reasons are different block lengths
    or sizes per head, heads that do not divide evenly, and a buffer that cannot be split.
    """

def missing_buffers(destination: KVCachePageTable, plans: Sequence[TransferPlan]) -> list[tuple[int, str]]:
    """(global layer, role) of each buffer that the plans of all source ranks together do not fill completely."""
