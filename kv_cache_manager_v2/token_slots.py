"""Token slots for the steps of a batch: one array for all requests, as attention kernels and gathers take it.

A token slot is page index * tokens_per_block + position in the block, an index into a buffer seen as (pages * tokens_per_block,
...). It does not depend on the smaller blocks that a buffer may have.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

from librt.strings import BytesWriter, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from kv_cache_manager_v2.arguments import IntBuffer, Integers, at_least, instance_or_none, items_of, page_index_mode_or_none, whole
from kv_cache_manager_v2.batch_calls import requests_of
from kv_cache_manager_v2.buffers import require_length, writable_integers
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import DEFAULT_BEAM_INDEX, PageIndexMode
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layout.page_index import PageIndexConverter, check_mode
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.request.token_slots import TokenSlotPlan, native_array


class TokenSlots(NamedTuple):
    """The token slots of a batch. Those of caches[i] are slots[offsets[i]] .. slots[offsets[i + 1] - 1]."""

    slots: IntBuffer  # the buffer that was passed, or an array
    offsets: IntBuffer  # prefix sums, one more than there are caches
    total: int  # token slots of all caches


def slots_to_write(
    caches: Sequence[KVCache],
    layer_group_id: SupportsIndex,
    begins: Integers | None = None,
    ends: Integers | None = None,
    converter: PageIndexConverter | None = None,
    index_mode: PageIndexMode | SupportsIndex | None = None,
    out: IntBuffer | None = None,
    offsets: IntBuffer | None = None,
) -> TokenSlots:
    """Where the tokens at positions begins[i] .. ends[i] - 1 of each cache lie, of beam 0. By default from history to capacity.

    `converter` is that of a buffer; without it, slots count base page indices. `out` and `offsets` are int32 or int64 memory of the
    caller's (arrays, numpy arrays, torch tensors in host memory), of which the first entries are written. O(tokens); long runs are
    written at the speed of memory, with numpy installed. Raises LogicError unless all caches are ACTIVE, ConfigError for positions
    beyond the capacity, for buffers that are too short, and where slots do not fit int32. Nothing is written then.
    """
    return _slots("slots_to_write()", caches, layer_group_id, begins, ends, converter, index_mode, out, offsets)


def slots_to_read(
    caches: Sequence[KVCache],
    layer_group_id: SupportsIndex,
    begins: Integers | None = None,
    ends: Integers | None = None,
    converter: PageIndexConverter | None = None,
    index_mode: PageIndexMode | SupportsIndex | None = None,
    out: IntBuffer | None = None,
    offsets: IntBuffer | None = None,
) -> TokenSlots:
    """As `slots_to_write`, for all tokens that the queries at positions begins[i] .. ends[i] - 1 read, in ascending order.

    These are the sinks, and the positions from the first one in the window of the query at begins[i] on; without a window, all.
    Nothing is read for a cache without queries. A layer with fewer sinks than others of its group masks the rest.
    """
    return _slots("slots_to_read()", caches, layer_group_id, begins, ends, converter, index_mode, out, offsets)


def _slots(
    call: str,
    caches: object,
    layer_group_id: object,
    begins: object,
    ends: object,
    converter: object,
    index_mode: object,
    out: object,
    offsets: object,
) -> TokenSlots:
    requests = requests_of(caches)
    group = whole(layer_group_id, "layer_group_id")
    first = None if begins is None else _positions(begins, "begins", len(requests))
    last = None if ends is None else _positions(ends, "ends", len(requests))
    convert = instance_or_none(converter, PageIndexConverter, "converter")
    mode = page_index_mode_or_none(index_mode, "index_mode")
    if convert is not None:
        check_mode(mode, False, convert.scratch_enabled)
    target = None if out is None else writable_integers(out, "out")
    sums = None if offsets is None else writable_integers(offsets, "offsets")
    if sums is not None:
        require_length(sums, "offsets", len(requests) + 1)
    reads = call == "slots_to_read()"
    plan: TokenSlotPlan | None = None
    ended = BytesWriter()  # prefix sums, as words of the caller's width
    wide = sums is not None and sums.format == "q"
    if wide:
        write_i64_le(ended, 0)
    else:
        write_i32_le(ended, 0)
    fits = True
    for position in range(len(requests)):
        request = requests[position]
        begin = request.history if first is None else first[position]
        end = request.capacity if last is None else last[position]
        table = _table(call, request, position, group, begin, end)
        if plan is None:
            plan = TokenSlotPlan(request.tokens_per_block, convert, mode)
            fits = plan.fits_int32(request, table.pool_group)
        if reads and begin < end:
            life_cycle = table.life_cycle
            oldest = life_cycle.first_read(begin)
            plan.add(table, 0, min(request.shared.layout.sink_tokens[group], oldest))
            plan.add(table, oldest, end)
        else:
            plan.add(table, begin, end)
        if wide:
            write_i64_le(ended, i64(plan.total))
        else:
            write_i32_le(ended, i32(plan.total))
    total = 0 if plan is None else plan.total
    if not fits and target is not None and target.format == "i":
        raise ConfigError("out is int32, in which the token slots of this pool group do not fit; pass an int64 buffer")
    if target is None:
        made = array("i" if fits else "q", [0]) * total
        out, target = made, memoryview(made)
    require_length(target, "out", total)
    prefix = native_array(ended, "q" if wide else "i")
    if sums is None:
        offsets = prefix
    else:
        sums[: len(prefix)] = memoryview(prefix)
    if plan is not None:
        plan.write(target)
    return TokenSlots(out, offsets, total)  # type: ignore[arg-type]  # both are buffers: `writable_integers` has seen them


def _positions(values: object, name: str, count: int) -> list[int]:
    items = items_of(values, name, "integers")
    if len(items) != count:
        raise ConfigError(f"{name} has {len(items)} positions for {count} caches; pass one for each")
    positions: list[int] = []
    for number in range(count):
        item = items[number]
        positions.append(item if type(item) is int and item >= 0 else at_least(item, f"{name}[{number}]", 0))
    return positions


def _table(call: str, request: Request, position: int, group: int, begin: int, end: int) -> BlockTable:
    """The table of beam 0. Raises ConfigError or LogicError, with the position of the cache, if these slots cannot be had."""
    if request.status != ACTIVE:
        raise LogicError(f"{call} needs caches that are ACTIVE; caches[{position}] is not: resume it first")
    table = request.table(group, DEFAULT_BEAM_INDEX)
    if table is None:
        groups = ", ".join([str(index) for index in request.shared.attention])
        raise ConfigError(f"layer group {group} has no page per block; layer_group_id must be one of {groups}")
    if not begin <= end <= request.capacity:
        raise ConfigError(
            f"begins[{position}] is {begin} and ends[{position}] is {end}; they must be ascending, and at most the capacity, "
            f"{request.capacity}: resize the cache first"
        )
    return table
