"""Planned drops: pages that only the next turn of a conversation needs are dropped once that turn has started.

A plan marks pages and does not hold them. A page that several plans mark is dropped with the last plan, and only if it has no user.
Pages of full attention and sinks are never marked, since every longer match needs them.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import AlreadyDroppedError, LogicError
from kv_cache_manager_v2.request.call import Call
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.request.snapshot import existing_parent
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.reuse.match import is_reusable
from kv_cache_manager_v2.storage.page import Page


class PlannedDropHandle:
    """The pages that only a match of exactly one committed length needs. `drop()` drops them.

    A handle that is garbage collected is applied by the next call.
    """

    def __init__(self, shared: ManagerState, pages: list[Page]) -> None:
        """Internal. `KVCache.plan_committed_block_drop` makes handles."""
        self._shared = shared
        self._pages = pages
        self._dropped = False
        for page in pages:
            page.plans += 1

    def __del__(self) -> None:
        if not getattr(self, "_dropped", True):  # absent if the constructor raised
            self._shared.finalized_plans.append(self._pages)  # applied by the next public call: a finaliser must not do the work

    def __reduce__(self) -> str:
        raise LogicError("a planned drop cannot be copied or pickled: it can be applied only once")

    def drop(self) -> None:
        """Apply the plan: drop each page that no other plan marks and that has no user.

        Raises AlreadyDroppedError the second time.
        """
        if self._dropped:
            raise AlreadyDroppedError("this planned drop has already been dropped")
        with self._shared.lock, Call(self._shared, "drop()"):
            self._dropped = True
            pages = self._pages
            self._pages = []
            self._shared.withdraw_plan(pages)


def plan(request: Request) -> PlannedDropHandle | None:
    """Plan to drop the pages that only a match of exactly the committed length needs; None if there can be no such match.

    O(blocks). Raises LogicError before `stop_committing()`.
    """
    if request.commit_allowed:
        raise LogicError("plan_committed_block_drop(): the committed length may still change; call stop_committing() first")
    blocks = _committed_path(request)
    if not blocks or not is_reusable(request.shared.tree, blocks, request.committed):
        return None
    return PlannedDropHandle(request.shared, _planned_pages(request.shared, blocks, request.committed))


def _committed_path(request: Request) -> list[Block]:
    """The tree's blocks of all committed tokens; empty if one of them has left the tree."""
    tree = request.shared.tree
    parent = existing_parent(request)
    if parent is None or not parent.attached:
        return []
    if request.tail_length() == 0:
        return request.path
    last = tree.find(parent, request.tail.getvalue())
    return [] if last is None else [*request.path, last]


def _planned_pages(shared: ManagerState, blocks: list[Block], num_tokens: int) -> list[Page]:
    """The window pages that are not stale at `num_tokens`, without sinks, and the snapshot at `num_tokens`."""
    pages: list[Page] = []
    for life_cycle in shared.life_cycles:
        if not life_cycle.is_attention:
            _add(pages, blocks[-1], life_cycle.index)
        elif life_cycle.window_size is not None:
            _start, end = life_cycle.stale(num_tokens)
            for ordinal in range(max(end, life_cycle.num_sink_blocks), len(blocks)):
                _add(pages, blocks[ordinal], life_cycle.index)
    return pages


def _add(pages: list[Page], block: Block, index: int) -> None:
    page = block.page(index)
    if page is not None:
        pages.append(page)
