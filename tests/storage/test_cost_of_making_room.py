"""The cost of making room depends on the pages that move or are dropped, not on those that must stay, wherever they are in the
order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.storage.cell import MOST_JUST_HELD
from tests.support.inside import calls_of
from tests.support.storage_rig import StorageRig

pytestmark = pytest.mark.skipif(COMPILED, reason="calls are counted with the interpreter's profiler")


def held_in_front(rig: StorageRig, count: int) -> None:
    """Pages held by suspended requests, older than any other."""
    for _ in range(count):
        rig.held()


def held_later(rig: StorageRig, count: int) -> None:
    """Cached pages that were matched, and are held by requests that have not run."""
    for page in [rig.cached() for _ in range(count)]:
        rig.hierarchy.hold(page)


def in_flight(rig: StorageRig, count: int) -> None:
    """Pages on their way from a disk that does not answer."""
    pages = [rig.held() for _ in range(count)]
    assert rig.hierarchy.acquire([count + 8], []) is None
    rig.driver.synchronize()
    rig.hierarchy.settle()
    rig.driver.hang("read_file", times=None)
    assert rig.hierarchy.acquire([0], pages) is None


def cost(stay: Callable[[StorageRig, int], None], count: int, directory: Path) -> int:
    """Calls to make room for one page beside so many that must stay, where no level below takes any, the second time."""
    rig = StorageRig([[count + 8], [count if stay is in_flight else 0]], "gd", ((64,),), path=str(directory))
    stay(rig, count)
    cached = [rig.cached() for _ in range(8)]
    assert rig.counts(0)[0] == 0
    assert rig.hierarchy.acquire([1], []) is None
    found = calls_of(lambda: rig.hierarchy.acquire([2], []))
    assert [page.alive() and page.level == 0 for page in cached] == [False] * 2 + [True] * 6
    return found


@pytest.mark.parametrize("stay", [held_in_front, held_later, in_flight])
def test_pages_that_must_stay_cost_nothing(stay: Callable[[StorageRig, int], None], tmp_path: Path) -> None:
    assert cost(stay, 400, tmp_path) == cost(stay, 20, tmp_path)


def test_what_was_just_held_costs_a_bounded_sum_once(tmp_path: Path) -> None:
    """Pages of a match that has not been resumed are passed over one by one at first, but never more than the bound."""
    found: list[int] = []
    for count in (4 * MOST_JUST_HELD, 8 * MOST_JUST_HELD):
        rig = StorageRig([[count + 8], [0]], "gd", ((64,),), path=str(tmp_path))
        held_later(rig, count)
        for _ in range(8):
            rig.cached()
        found.append(calls_of(lambda rig=rig: rig.hierarchy.acquire([1], [])))  # type: ignore[misc]
        rig.check()
    assert abs(found[1] - found[0]) < MOST_JUST_HELD
