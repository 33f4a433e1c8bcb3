"""Which bytes of one rank's pages are which bytes of another's, for ranks that divide the model differently.

Rule: buffers are matched by the layer of the whole model and by role, bytes by the heads that both ranks have. All is decided when
two ranks meet; for a request only slot ids are filled in. Blocks that are out of a window have no page on either side and are
skipped.

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
    """Bytes that lie together on both sides, for every block: at base + stride * slot."""

    source_base: int
    source_stride: int
    destination_base: int
    destination_stride: int
    nbytes: int

class ByteMove(NamedTuple):
    """One copy."""

    source: int
    destination: int
    nbytes: int

class GroupPairing(NamedTuple):
    """What two layer groups have in common."""

    source_group: int
    destination_group: int
    segments: tuple[Segment, ...]

class TransferPlan:
    """All that one rank has for another."""

    source: KVCachePageTable
    destination: KVCachePageTable
    pairings: list[GroupPairing]
    filled: dict[tuple[int, str], int]

    def __init__(self, source: KVCachePageTable, destination: KVCachePageTable, pairings: list[GroupPairing]) -> None: ...
    def __reduce__(self) -> tuple[object, ...]: ...
    def moves(self, source_slots: Sequence[Integers], destination_slots: Sequence[Integers]) -> list[ByteMove]:
        """The copies for one request, given its slots on both sides, by layer group and block ordinal (`request_slots`).

        A block is moved where the destination has a page. Raises ConfigError (a ValueError), before anything is moved, if the
        source has none there, or for a slot beyond a pool's end. O(blocks x segments).
        """

def match_page_tables(source: KVCachePageTable, destination: KVCachePageTable) -> TransferPlan:
    """Find what the source rank has for the destination rank; nothing in common gives an empty plan.

    Raises ConfigError (a ValueError) where both have a buffer and its bytes cannot be matched: other block lengths, sizes a
    head, heads that do not divide evenly, or a split of what cannot be split.
    """

def missing_buffers(destination: KVCachePageTable, plans: Sequence[TransferPlan]) -> list[tuple[int, str]]:
    """(global layer, role) of the buffers that the plans of all source ranks together do not fill wholly."""
