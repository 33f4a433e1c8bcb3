"""Questions about what is behind the public calls, under short names.

Rule: every question that a test asks about the inside is asked of `introspection`, which is the same on both builds.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeAlias

from kv_cache_manager_v2 import EmulatedDriver, KVCacheManager, ReuseScope, introspection
from kv_cache_manager_v2.introspection import MatchDepths as Depths
from kv_cache_manager_v2.introspection import SlotCounts as Counts
from kv_cache_manager_v2.introspection import all_slot_counts as all_counts
from kv_cache_manager_v2.introspection import live_pages, num_roots, num_tree_blocks, page_of, state_page
from kv_cache_manager_v2.introspection import path_coverage as coverage
from kv_cache_manager_v2.introspection import path_levels as pages_by_level
from kv_cache_manager_v2.introspection import slot_counts as counts
from kv_cache_manager_v2.introspection import tree_path as tree_blocks
from kv_cache_manager_v2.reuse.block import Block
from kv_cache_manager_v2.storage.page import Page

__all__ = [
    "Counts",
    "Depths",
    "all_counts",
    "bytecodes_of",
    "calls_of",
    "counts",
    "coverage",
    "depths",
    "drop",
    "flip",
    "heads_before_tails",
    "live_pages",
    "narrow",
    "num_roots",
    "num_tree_blocks",
    "page_bytes",
    "page_of",
    "pages_by_level",
    "state_page",
    "tree_blocks",
]


def heads_before_tails(manager: KVCacheManager) -> list[tuple[int, int]]:
    """(level, block ordinal) of pages that are evicted before a page of the next block, which cannot match without them."""
    tree, found = manager.shared.tree, []
    for cell in manager.shared.hierarchy.all_cells():
        later = {id(page): place for place, page in enumerate(cell.order()) if page.holds == 0 and page.transfers == 0}
        for block in tree.all_blocks():
            parent = block.parent
            assert parent is not None
            page = block.first
            while page is not None:
                head = parent.page(page.life_cycle)
                if head is not None and head.priority >= page.priority and id(head) in later and id(page) in later:
                    ends = tree.path_mask(parent.ordinal) & 1 << page.life_cycle
                    if ends and later[id(head)] < later[id(page)]:
                        found.append((cell.level, parent.ordinal))
                page = page.next_in_block
    return found


Tracer: TypeAlias = Callable[[FrameType, str, Any], Any]


def depths(manager: KVCacheManager, tokens: Sequence[int | bytes], scope: ReuseScope | None = None) -> Depths:
    """How far a prompt matches."""
    return introspection.reuse_match_depths(manager, scope, list(tokens))


def drop(manager: KVCacheManager, page: Page | None) -> None:
    """Lose a page, as if it had been evicted."""
    assert page is not None
    with manager.shared.lock:
        manager.shared.tree.drop_page(page)


def narrow(manager: KVCacheManager, block: Block, page: Page | None) -> None:
    """Let a page cover one token less of its block."""
    assert page is not None
    with manager.shared.lock:
        page.coverage -= 1
        manager.shared.tree.hide(block)  # hide and show recount what the pages of the block are good for
        manager.shared.tree.show(block)


def calls_of(work: Callable[[], object]) -> int:
    """Python calls that the work makes, without those of a collection of garbage in between."""
    count = 0
    collects = gc.isenabled()

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return count


def bytecodes_of(work: Callable[[], object]) -> int:
    """Bytecodes that the work executes: as `calls_of`, and sees loops without calls too."""
    count = 0
    collects = gc.isenabled()

    def note(frame: FrameType, event: str, _argument: object) -> Tracer:
        nonlocal count
        if event == "opcode":
            count += 1
        else:
            frame.f_trace_opcodes = True
        return note

    gc.disable()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(None)
        if collects:
            gc.enable()
    return count


def page_bytes(driver: EmulatedDriver, page: Page, pool: int, offset: int, nbytes: int) -> bytes:
    """Part of a page as it is now, on whatever level it lies."""
    arena = page.cell.arenas[pool]
    address = arena.address(page.slot) + offset
    return os.pread(arena.fd, nbytes, address) if arena.fd >= 0 else driver.read_bytes(address, nbytes)


def flip(fd: int, bit: int) -> None:
    """Flip one bit of a file."""
    os.pwrite(fd, bytes([os.pread(fd, 1, bit // 8)[0] ^ (1 << bit % 8)]), bit // 8)
