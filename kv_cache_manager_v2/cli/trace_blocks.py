"""How many tokens an id of a trace stands for: given, or found from the lengths of the prompts and their numbers of ids.

A trace either has an id for the partly filled last block of a prompt, or leaves it out. So a prompt of L tokens with n ids allows
the sizes b with ceil(L / b) = n in the first case, and those with floor(L / b) = n in the second.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2.cli.trace_lines import TraceRecord

USUAL_SIZE: Final = 512  # of Mooncake's traces; taken if it is possible
UNBOUNDED: Final = 1 << 62
REMEDY: Final = "--trace-block-size gives the number of tokens that an id stands for"


class BlockSizes:
    """The sizes that all records so far allow."""

    def __init__(self, given: int | None) -> None:
        self._given = given
        self._with_partial = (1, UNBOUNDED)  # sizes if the partly filled last block has an id, both ends included
        self._without = (1, UNBOUNDED)  # sizes if it has none

    def narrow(self, record: TraceRecord) -> str | None:
        """Take a record into account. If it contradicts the size or the records before it, return why, and leave it out."""
        length, count = record.input_length, len(record.block_ids)
        if self._given is not None:
            most = -(-length // self._given)
            if length // self._given <= count <= most:
                return None
            return (
                f"hash_ids has {count} entries, but input_length {length} makes {most} blocks of {self._given} tokens "
                "(is --trace-block-size right?)"
            )
        with_partial = _overlap(self._with_partial, _sizes_with_partial(length, count))
        without = _overlap(self._without, _sizes_without(length, count))
        if with_partial[0] > with_partial[1] and without[0] > without[1]:
            return (
                f"hash_ids has {count} entries for input_length {length}, which fits no number of tokens per id that the lines "
                f"before it allow; {REMEDY}"
            )
        self._with_partial, self._without = with_partial, without
        return None

    def size(self) -> int | str:
        """The size, or why it cannot be known. Of several sizes, 512 or else the only power of two is taken."""
        if self._given is not None:
            return self._given
        ranges = [(lo, hi) for lo, hi in (self._with_partial, self._without) if lo <= hi]
        if any(lo <= USUAL_SIZE <= hi for lo, hi in ranges):
            return USUAL_SIZE
        single = {lo for lo, hi in ranges if lo == hi}
        if len(single) == len(ranges) == 1:
            return single.pop()
        powers = {1 << bit for bit in range(48) if any(lo <= 1 << bit <= hi for lo, hi in ranges)}
        if len(powers) == 1:
            return powers.pop()
        lows, highs = [lo for lo, _hi in ranges], [hi for _lo, hi in ranges]
        return f"an id may stand for {min(lows)} to {max(highs)} tokens: {REMEDY}"


def _overlap(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    return max(left[0], right[0]), min(left[1], right[1])


def _sizes_with_partial(length: int, count: int) -> tuple[int, int]:
    """Sizes b with ceil(length / b) = count."""
    if count == 0:
        return 1, 0  # none: a prompt has at least one token
    return -(-length // count), UNBOUNDED if count == 1 else -(-length // (count - 1)) - 1


def _sizes_without(length: int, count: int) -> tuple[int, int]:
    """Sizes b with floor(length / b) = count."""
    return length // (count + 1) + 1, UNBOUNDED if count == 0 else length // count
