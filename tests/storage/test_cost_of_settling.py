"""A call costs the file transfers that have changed since the last one, not those in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_cache_manager_v2.build import COMPILED
from tests.storage.conftest import NewRig
from tests.support.drivers import RefusingDevice, refusing_device
from tests.support.inside import calls_of
from tests.support.storage_rig import FakeBlock, StorageRig, settle_all

ENDING = 8


def costs(count: int, directory: Path) -> list[tuple[int, int]]:
    """The cost of settling beside this many hanging reads, in driver calls and Python calls.

    First nothing has changed; then some have ended; then their streams have passed them.
    """
    rig = StorageRig([[count], [count]], "gd", ((64,),), path=str(directory), transfer_timeout=1e9, wrap=refusing_device)
    device: RefusingDevice = rig.device
    pages = [rig.held(i) for i in range(count)]
    assert rig.hierarchy.acquire([count], []) is None
    settle_all(rig)
    kept = rig.driver.hang("read_file", times=count - ENDING)
    assert rig.hierarchy.acquire([0], pages[ENDING:]) is None
    ending = rig.driver.hang("read_file", times=ENDING)
    assert rig.hierarchy.acquire([0], pages[:ENDING]) is None
    rig.hierarchy.settle()  # looks at each new gate once
    device.counting = True
    found: list[tuple[int, int]] = []
    for ends in (False, True, False):
        if ends:
            ending.open()
        before = device.calls
        calls = calls_of(rig.hierarchy.settle)
        found.append((device.calls - before, 0 if COMPILED else calls))
    device.counting = False
    assert rig.hierarchy.transfers_in_flight == count - ENDING
    assert [page.transfers for page in pages] == [0] * ENDING + [1] * (count - ENDING)
    rig.check()
    kept.open()
    settle_all(rig)
    for i in (0, ENDING, count - 1):
        rig.expect(pages[i], i)
    rig.close()
    return found


def test_transfers_that_have_not_changed_cost_nothing(tmp_path: Path) -> None:
    first = costs(100, tmp_path)
    assert first[0][0] == 1, "a call beside transfers of which none has changed asks for more than the oldest"
    for count in (1_000, 10_000):
        assert costs(count, tmp_path) == first


def test_a_driver_that_watches_no_gates_is_asked_for_each(new_rig: NewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended is found, in any order; a late read spoils what was staged behind it; nothing is left."""
    rig = new_rig([[8], [8]], "gd", ((64,),), transfer_timeout=100, wrap=refusing_device)
    monkeypatch.setattr(rig.device, "watch_gates", lambda gates, changed: False)
    blocks = [FakeBlock(f"{i}") for i in range(8)]
    pages = [rig.cached(i, owner=blocks[i]) for i in range(8)]
    assert rig.hierarchy.acquire([8], []) is None
    settle_all(rig)
    assert [page.transfers for page in pages] == [0] * 8
    gates = [rig.driver.hang("read_file", nth) for nth in (1, 3)]
    for page in pages:
        rig.hierarchy.hold(page)
    assert rig.hierarchy.acquire([0], pages) is None
    rig.hierarchy.settle()
    assert [page.transfers for page in pages] == [1, 0, 1, 0, 0, 0, 0, 0]
    gates[1].open()
    for _ in range(100):
        rig.hierarchy.settle()
    assert [page.lost for page in pages] == [True] + [False] * 7
    gates[0].open()
    settle_all(rig)
    assert rig.hierarchy.transfers_in_flight == 0
    for i, page in enumerate(pages):
        if i > 0:
            rig.expect(page, i)
        rig.hierarchy.release(page)
