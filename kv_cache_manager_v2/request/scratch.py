"""Scratch slots: what a long prefill step lends to blocks that no later step reads.

Rule: a block that will be out of its window when the step ends needs its keys and values only while one layer executes, so the
blocks of the scratch range share a few slots, layer after layer. A scratch block has no page and reads BAD. Its page indices come
from the converter, which is told the range and the slots (`ScratchDesc`). What lies in scratch is never offered for reuse.
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
    """The scratch range of each table at these lengths; an empty list while scratch is off."""
    if not request.scratch:
        return []
    return [table.life_cycle.scratch(history, capacity, request.shared.max_rewind) for table in request.tables]


def slots(request: Request, table: BlockTable, span: tuple[int, int]) -> int:
    """Slots that the blocks of a scratch range share."""
    start, end = span
    return request.shared.layout.scratch_slots(table.index, end - start) if end > start else 0


def missing(request: Request, of_tables: list[tuple[int, int]]) -> list[int]:
    """Slots, by pool group, that the tables' scratch ranges need beyond those that they have."""
    need = [0] * request.shared.layout.num_pool_groups
    for number, span in enumerate(of_tables):
        table = request.tables[number]
        need[table.pool_group] += max(0, slots(request, table, span) - len(table.scratch))
    return need


def reserve(request: Request, of_tables: list[tuple[int, int]], reservation: Reservation) -> None:
    """Reserve the slots that are missing."""
    for number, span in enumerate(of_tables):
        table = request.tables[number]
        for _slot in range(slots(request, table, span) - len(table.scratch)):
            reservation.reserve(table.index, table.pool_group, PRIORITY_DEFAULT)


def install(request: Request, of_tables: list[tuple[int, int]], reservation: Reservation) -> None:
    """Give each table the reserved slots, and its range."""
    for number, span in enumerate(of_tables):
        table = request.tables[number]
        while len(table.scratch) < slots(request, table, span):
            table.scratch.append(reservation.next(table.index, PRIORITY_DEFAULT))
        table.scratch_span = span


def trim(request: Request, of_tables: list[tuple[int, int]], point: Point, reused: Sequence[Page] = ()) -> None:
    """Unlock the slots that the ranges no longer need, but those that are used again; `point` is the end of the request's work on
    them."""
    for number, span in enumerate(of_tables):
        table = request.tables[number]
        if reused:
            table.scratch = [page for page in table.scratch if page not in reused]
        table.trim_scratch(slots(request, table, span), point)
        table.scratch_span = span


def check_capacity_change(request: Request, history: int) -> None:
    """Raise LogicError if blocks that lie in scratch now would have to become pages: their bytes are gone."""
    least = max(0, request.capacity - request.shared.max_rewind)
    if request.holds_scratch() and not least <= history:
        raise LogicError(
            f"with scratch reuse the capacity can change only once the history has reached {least} (capacity {request.capacity} "
            f"less max_rewind_len {request.shared.max_rewind}); it is {history}: advance it first, or in the same step"
        )


def describe(table: BlockTable) -> ScratchDesc | None:
    """What the page-index converter needs, until the lengths change; None if no block lies in scratch."""
    start, end = table.scratch_span
    if start >= end:
        return None
    return ScratchDesc(HalfOpenRange(start, end), [page.slot for page in table.scratch])


def switch(request: Request, on: bool) -> None:
    """Turn scratch reuse on or off for one request; only at lengths that need none. Raises ConfigError, nothing changed."""
    shared = request.shared
    if on == request.scratch:
        return
    if on and not shared.scratch:
        raise ConfigError("enable_swa_scratch_reuse: the manager was configured without swa_scratch_reuse")
    for table in request.tables:
        start, end = table.life_cycle.scratch(request.history, request.capacity, shared.max_rewind)
        if end > start:
            raise ConfigError(
                f"enable_swa_scratch_reuse={on}: scratch blocks are needed at history {request.history}, capacity "
                f"{request.capacity}; advance the history first"
            )
    request.scratch = on
    request.set_history(request.history)
