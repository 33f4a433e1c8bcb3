"""The eviction class of a request's cached blocks, which its policy decides when the request ends.

Rule: the class of a block is at least that of its children. So a block takes the class of the ended request only if no other block
continues it than the next one of the request. A block with other children keeps a higher class that it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kv_cache_manager_v2.arguments import whole
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.eviction.policy import RequestEnd
from kv_cache_manager_v2.request.manager_state import ManagerState
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.reuse.block import Block, as_block

_log: Final = logging.getLogger(__name__)


def class_of(request: Request, expect: str | None) -> int:
    """Ask the policy for the class of the request's blocks; -1 if it is not asked. Called before anything changes.

    `expect`: what the engine says about the conversation.
    """
    shared = request.shared
    policy = shared.eviction_policy
    if expect is None and not policy.listens:
        return -1
    blocks = [block.tokens for block in request.path]
    reused = sum(request.cached_tokens_by_level)
    end = RequestEnd(request.committed, reused, request.scope.data, blocks, expect, _capacity(shared))
    ask: Callable[[RequestEnd], object] = policy.class_of
    shared.calling_out = True
    try:
        worth = whole(ask(end), "the answer of class_of()")
        if not 0 <= worth < policy.order.classes:
            raise ConfigError(f"class_of() returned {worth}; this policy has classes 0..{policy.order.classes - 1}")
        return worth
    except Exception as error:
        _log.error("an eviction policy raised an exception in class_of(); blocks take its usual class", exc_info=error)
        return policy.order.usual
    finally:
        shared.calling_out = False


def _capacity(shared: ManagerState) -> int:
    """Blocks that fit all levels together, in the pool group that has room for the most: others keep windows only."""
    hierarchy = shared.hierarchy
    most = 0
    for group, tables in enumerate(shared.tables_in_group):
        if tables > 0:
            slots = sum([hierarchy.total(level, group) for level in range(hierarchy.num_levels)])
            most = max(most, slots // tables)
    return most


def set_class(request: Request, worth: int) -> None:
    """Give the cached blocks of a request that ends a class, from the last block to the first. O(blocks x life cycles)."""
    order = request.shared.eviction_policy.order
    if order.uniform:
        if worth == order.usual:
            return
        order.uniform = False
    blocks = request.path
    last = _partial_block(request)
    if last is not None:
        blocks = [*blocks, last]
    next_block: Block | None = None
    for number in range(len(blocks) - 1, -1, -1):
        block = blocks[number]
        worth = _set_block(block, worth, block.children is None or block.children is next_block)
        next_block = block


def _partial_block(request: Request) -> Block | None:
    """The partly filled last block, if it is in the tree."""
    ordinal = len(request.path)
    for table in request.main_tables:
        page = table.pages[ordinal] if ordinal < len(table.pages) else None
        if page is not None and page.owner is not None:
            return as_block(page.owner)
    return None


def _set_block(block: Block, worth: int, only_user: bool) -> int:
    """Give the pages of a block a class, or a higher one that they have if other blocks continue it. Returns the highest class."""
    highest = worth
    page = block.first
    while page is not None:
        wanted = worth if only_user or page.worth < worth else int(page.worth)
        if page.worth != wanted:
            page.cell.set_worth(page, wanted)
        highest = max(highest, wanted)
        page = page.next_in_block
    return highest
