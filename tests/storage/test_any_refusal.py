"""The device refuses any of its calls, with any exception, once, twice or until it is healed. Each page keeps its bytes, no slot is
lost, and the call succeeds when tried again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kv_cache_manager_v2.errors import CuError
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.storage.page import Page
from tests.support.drivers import Strange, refusing_device
from tests.support.storage_rig import FakeBlock, StorageRig, resize_level

ALWAYS = 1 << 30
IDENTIFYING = partial(refusing_device, identifies=True)


REFUSALS: list[tuple[Callable[[], BaseException], int]] = [
    (lambda: CuError("refused", 999, "any"), 1),
    (lambda: CuError("refused", 999, "any"), 2),
    (lambda: CuError("refused", 999, "any"), ALWAYS),
    (lambda: KeyboardInterrupt(), 1),
    (lambda: MemoryError(), 2),
    (lambda: Strange(), ALWAYS),
]
SLOTS = 3


class Scene:
    """Tiers full of held pages but for one cached page on the GPU; values by page."""

    def __init__(self, tiers: str, path: str) -> None:
        self.rig = StorageRig([[SLOTS]] * len(tiers), tiers, ((5000, 40),), path=path, wrap=IDENTIFYING)
        self.values: dict[int, int] = {}
        self.pages: list[Page] = []
        for value in range(SLOTS * len(tiers) - 1):
            self.add(self.rig.held(value), value)
        cached = self.rig.cached(100)
        self.rig.hierarchy.hold(cached)
        self.add(cached, 100)
        self.settle()
        self.cold = [page for page in self.pages if page.level == len(tiers) - 1]

    def add(self, page: Page, value: int) -> None:
        self.pages.append(page)
        self.values[id(page)] = value

    def settle(self) -> None:
        for _ in range(3):
            self.rig.driver.synchronize()
            self.rig.hierarchy.settle()

    def free_one(self) -> None:
        """The lowest slot of the last level is free."""
        lowest = min(self.cold, key=lambda page: page.slot)
        self.rig.hierarchy.release(lowest)
        self.pages.remove(lowest)
        self.cold.remove(lowest)


def exchange(scene: Scene) -> None:
    assert scene.rig.hierarchy.acquire([0], scene.cold[:2]) is None


def make_room(scene: Scene) -> None:
    assert scene.rig.hierarchy.acquire([1], []) is None


def onload(scene: Scene) -> None:
    level = scene.cold[0].level - 1
    assert scene.rig.hierarchy.prefetch(scene.cold[:1], level) is None


def copy(scene: Scene) -> None:
    source = next(page for page in scene.pages if page.level == 0)
    made = scene.rig.hierarchy.try_copy(source, 35, scene.rig.stream)
    if made is not None:
        scene.rig.hierarchy.hold(made)
        scene.add(made, scene.values[id(source)])


def resize_last(scene: Scene, slots: int) -> None:
    hierarchy = scene.rig.hierarchy
    level = hierarchy.num_levels - 1
    old = hierarchy.sizings[level]
    sizing = LevelSizing(old.tier, old.asked, old.quota, old.granularity)
    sizing.slots = [slots]
    assert resize_level(hierarchy, level, sizing)


def shrink(scene: Scene) -> None:
    resize_last(scene, SLOTS - 1)


def grow(scene: Scene) -> None:
    resize_last(scene, 4 * SLOTS)


CALLS: dict[str, tuple[Callable[[Scene], None], bool]] = {  # and whether a slot is freed first
    "exchange": (exchange, False),
    "make room": (make_room, True),
    "onload": (onload, True),
    "copy": (copy, True),
    "shrink": (shrink, True),
    "grow": (grow, False),
}


def refused(name: str, tiers: str, path: str, refusal: tuple[Callable[[], BaseException], int], skip: int) -> bool:
    """Refuse the device call after `skip` others; False: the call makes fewer."""
    call, frees = CALLS[name]
    scene = Scene(tiers, path)
    rig = scene.rig
    if frees:
        scene.free_one()
    error = refusal[0]()
    made = rig.device.calls
    rig.device.refuse(error, skip, refusal[1])
    raised: BaseException | None = None
    try:
        call(scene)
    except BaseException as caught:
        raised = caught
    struck = bool(rig.device.calls > made + skip)
    rig.device.refuse(None)
    rig.hierarchy.check_invariants(rig.pages)
    assert raised is None or raised is error or isinstance(raised, type(error) | CuError | MemoryError), repr(raised)
    scene.settle()
    rig.check()
    smaller = rig.hierarchy.total(len(tiers) - 1, 0) < SLOTS - 1  # of host memory that was refused to the end
    assert not smaller or (refusal[1] == ALWAYS and tiers == "gh")
    for page in scene.pages:
        assert page.lost == (smaller and page.level > 0), f"{name}, call {skip}: a page was lost"
        if not page.lost:
            rig.expect(page, scene.values[id(page)])
    if raised is not None:
        call(scene)
        scene.settle()
        for page in scene.pages:
            if not page.lost:
                rig.expect(page, scene.values[id(page)])
    for page in scene.pages:
        rig.hierarchy.release(page)
    for cell in rig.hierarchy.all_cells():
        for page in cell.pages():
            rig.hierarchy.unlist(page)
    scene.settle()
    rig.check()
    for cell in rig.hierarchy.all_cells():
        assert cell.free == cell.total, f"{name}, call {skip}: a slot of {cell} is lost"
    rig.close()
    return struck


@pytest.mark.parametrize("refusal", REFUSALS, ids=["once", "twice", "always", "interrupt", "memory twice", "strange always"])
@pytest.mark.parametrize("tiers", ["gh", "gd", "ghd"])
@pytest.mark.parametrize("name", list(CALLS))
def test_no_page_and_no_slot_is_lost(
    name: str, tiers: str, refusal: tuple[Callable[[], BaseException], int], tmp_path: Path
) -> None:
    skip = 0
    while refused(name, tiers, str(tmp_path), refusal, skip):
        skip += 1
    assert skip > 0 or (name, tiers[-1]) == ("grow", "d"), "the device was never asked"


@pytest.mark.parametrize("refusal", REFUSALS, ids=["once", "twice", "always", "interrupt", "memory twice", "strange always"])
def test_closing_can_be_tried_again_until_everything_is_free(
    refusal: tuple[Callable[[], BaseException], int], tmp_path: Path
) -> None:
    """Any call may be refused; at the end the device has no allocation left."""
    skip = 0
    struck = True
    while struck:
        rig = StorageRig([[3], [3], [3]], "ghd", path=str(tmp_path), wrap=IDENTIFYING)
        for value in range(9):
            rig.held(value)
        rig.driver.synchronize()
        made = rig.device.calls
        rig.device.refuse(refusal[0](), skip, refusal[1])
        for _attempt in range(4):
            try:
                rig.hierarchy.close()
                break
            except (CuError, KeyboardInterrupt, MemoryError, Strange):
                if refusal[1] == ALWAYS:
                    struck = bool(rig.device.calls > made + skip)
                    rig.device.refuse(None)
        struck = bool(rig.device.calls > made + skip)
        rig.device.refuse(None)
        rig.close()
        skip += 1
    assert skip > 5


def test_owners_that_an_interrupted_call_has_not_notified_are_notified_by_the_next_one() -> None:
    """Ctrl-C comes while the owner of the first of two dropped pages is notified."""

    def interrupt(page: Page) -> None:
        raise KeyboardInterrupt

    rig = StorageRig([[2]], "g")
    owners = [FakeBlock("first"), FakeBlock("second")]
    pages = [rig.cached(number, owner=owner) for number, owner in enumerate(owners)]
    owners[0].on_gone = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.hierarchy.acquire([2], [])
    assert owners[1].gone == []
    assert rig.hierarchy.transfers_in_flight > 0
    rig.hierarchy.settle()
    assert [owner.gone for owner in owners] == [[page] for page in pages]
    assert rig.hierarchy.transfers_in_flight == 0
    rig.close()
