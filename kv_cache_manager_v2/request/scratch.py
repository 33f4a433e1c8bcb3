"""Scratch slots: shared by the blocks of a long prefill step that no later step reads.

A block that leaves its window within the step needs its keys and values only while one layer executes. So all blocks of the scratch
range share a few slots, layer after layer. A scratch block has no page, and its index is BAD_PAGE_INDEX. Its page indices come from
the converter, which gets the range and the slots (`ScratchDesc`). Scratch blocks are never cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import PRIORITY_DEFAULT, Point
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange
from kv_cache_manager_v2.layout.page_index import ScratchDesc
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.request.reservation import Reservation
from kv_cache_manager_v2.storage.page import Page


def spans(request: Request, history: int, capacity: int) -> list[tuple[int, int]]:
    """The scratch range of each table at these lengths; an empty list if scratch reuse is off."""
    if not request.scratch:
        return []
    return [table.life_cycle.scratch(history, capacity, request.shared.max_rewind) for table in request.tables]


def slots(request: Request, table: BlockTable, span: tuple[int, int]) -> int:
    """How many slots the blocks of a scratch range share."""
    start, end = span
    return request.shared.layout.scratch_slots(table.index, end - start) if end > start else 0


def missing(request: Request, of_tables: list[tuple[int, int]]) -> list[int]:
    """How many more slots, by pool group, the scratch ranges need than the tables have."""
    need = [0] * request.shared.layout.num_pool_groups
    for number, span in enumerate(of_tables):
        table = request.tables[number]
        need[table.pool_group] += max(0, slots(request, table, span) - len(table.scratch))
    return need


def reserve(request: Request, of_tables: list[tuple[int, int]], reservation: Reservation) -> None:
    """Reserve the missing slots."""
    for number, span in enumerate(of_tables):
        table = request.tables[number]
        for _slot in range(slots(request, table, span) - len(table.scratch)):
            reservation.reserve(table.index, table.pool_group, PRIORITY_DEFAULT)


def install(request: Request, of_tables: list[tuple[int, int]], reservation: Reservation) -> None:
    """Set the scratch range and the reserved slots of each table."""
    for number, span in enumerate(of_tables):
        table = request.tables[number]
        while len(table.scratch) < slots(request, table, span):
            table.scratch.append(reservation.next(table.index, PRIORITY_DEFAULT))
        table.scratch_span = span


def trim(request: Request, of_tables: list[tuple[int, int]], point: Point, reused: Sequence[Page] = ()) -> None:
    """Unlock the slots that the ranges no longer need, except those in `reused`.

    `point` is the end of the request's work on them.
    """
    for number, span in enumerate(of_tables):
        table = request.tables[number]
        if reused:
            table.scratch = [page for page in table.scratch if page not in reused]
        table.trim_scratch(slots(request, table, span), point)
        table.scratch_span = span


def check_capacity_change(request: Request, history: int) -> None:
    """Raise LogicError if scratch blocks of the present step would need pages, or if the next step would read one.

    Their bytes do not exist any more.
    """
    if not request.scratch:
        return
    least = max(0, request.capacity - request.shared.max_rewind)
    if request.holds_scratch() and not least <= history:
        raise LogicError(
            f"with scratch reuse the capacity can change only once the history has reached {least} (capacity {request.capacity} "
            f"less max_rewind_len {request.shared.max_rewind}); it is {history}; advance it first, or in the same call"
        )
    if history < least:
        _check_reads(request, history, "resize()", "a step")


def check_fork(request: Request) -> None:
    """Raise LogicError if a fork at the request's history would read a block that was written to scratch."""
    if request.scratch:
        _check_reads(request, request.history, "fork()", "a fork")


def _check_reads(request: Request, history: int, call: str, reader: str) -> None:
    """Raise LogicError if a query at this history reads a block that was written to scratch: its bytes are gone.

    O(blocks in windows and sinks).
    """
    blocks = -(-history // request.tokens_per_block)
    for table in request.main_tables:
        start, end = table.life_cycle.stale(history)
        if table.life_cycle.window_size is None:
            continue
        for ordinal in [*range(min(start, blocks)), *range(end, min(blocks, len(table.pages)))]:
            if table.pages[ordinal] is None:
                least = max(0, request.capacity - request.shared.max_rewind)
                raise LogicError(
                    f"{call}: block {ordinal} of layer group {table.index} was written to scratch, and {reader} at history "
                    f"{history} would read it: advance the history to {least} or beyond first (capacity {request.capacity} "
                    f"less max_rewind_len {request.shared.max_rewind})"
                )


def describe(table: BlockTable) -> ScratchDesc | None:
    """The input of the page-index converter, valid until the lengths change; None if there are no scratch blocks."""
    start, end = table.scratch_span
    if start >= end:
        return None
    return ScratchDesc(HalfOpenRange(start, end), [page.slot for page in table.scratch])


def switch(request: Request, on: bool) -> None:
    """Turn scratch reuse on or off for one request. Raises ConfigError, with nothing changed, while scratch blocks are needed."""
    shared = request.shared
    if on == request.scratch:
        return
    if on and not shared.scratch:
        raise ConfigError("enable_swa_scratch_reuse: the manager was configured without it; set swa_scratch_reuse in its config")
    if not on and request.history < request.capacity - shared.max_rewind:
        _check_reads(request, request.history, "enable_swa_scratch_reuse=False", "a step")
    for table in request.tables:
        start, end = table.life_cycle.scratch(request.history, request.capacity, shared.max_rewind)
        if end > start:
            raise ConfigError(
                f"enable_swa_scratch_reuse={on}: scratch blocks are needed at history {request.history}, capacity "
                f"{request.capacity}; advance the history first"
            )
    request.scratch = on
    request.set_history(request.history)
