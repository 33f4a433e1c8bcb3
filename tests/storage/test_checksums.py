"""Damaged bytes on disk lose their page, and no other."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kv_cache_manager_v2.config import DiskCacheTierConfig
from kv_cache_manager_v2.device.arenas import DiskArena
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.ids import CacheTier
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.tiers import make_tier
from tests.storage.conftest import NewRig
from tests.support.inside import flip
from tests.support.storage_rig import StorageRig, resize_level, settle_all

PAGES = 250  # on disk at once


def move_to(rig: StorageRig, pages: list[Page], level: int) -> None:
    """Move pages of one level down to another, level by level."""
    for below in range(pages[0].level + 1, level + 1):
        rig.hierarchy.mover.move(pages, rig.hierarchy.cells[0][below])
    settle_all(rig)


def damage(page: Page, rng: random.Random) -> None:
    """Flip a random bit of a page's bytes in the file."""
    arena = rng.choice(page.cell.arenas)
    flip(arena.fd, 8 * arena.address(page.slot) + rng.randrange(8 * arena.slot_bytes))


@pytest.mark.parametrize(
    ("tiers", "schedule", "sizes", "rounds"),
    [
        ("gd", "eager", (96, 1), 20),
        ("gd", "random", (64,), 10),
        ("ghd", "eager", (64,), 20),
        ("ghd", "random", (96, 5), 10),
        ("gdd", "eager", (64,), 20),
    ],
)
def test_no_flipped_bit_is_served(new_rig: NewRig, tiers: str, schedule: str, sizes: tuple[int, ...], rounds: int) -> None:
    """10,000 in all, in 125 random pages of 250 at a time. Each loses its page, which is counted; the others have their bytes."""
    rig = new_rig([[PAGES]] * len(tiers), tiers, (sizes,), schedule, 1)
    rng = random.Random(f"{tiers} {schedule}")
    target = len(tiers) - 2
    for number in range(rounds):
        pages = [rig.held(i % 200) for i in range(PAGES)]
        move_to(rig, pages, target + 1)
        damaged = rng.sample(pages, PAGES // 2)
        for page in damaged:
            damage(page, rng)
        assert rig.hierarchy.prefetch(pages, target) is None
        settle_all(rig)
        assert {page.level for page in pages} == {target}
        assert [page for page in pages if page.lost] == [page for page in pages if page in damaged]
        assert rig.counters.lost == [(number + 1) * len(damaged)]
        for i, page in enumerate(pages):
            if not page.lost:
                rig.expect(page, i % 200)
            rig.hierarchy.release(page)
        rig.pages = []


@pytest.mark.parametrize("tiers", ["gd", "ghd", "gdd"])
def test_a_flipped_bit_in_any_part_of_a_large_page_loses_it(new_rig: NewRig, tiers: str) -> None:
    """Its parts pass through staging one by one, or from host memory at once, and each has a checksum."""
    rig = new_rig([[4]] * len(tiers), tiers, (((5 << 19) + 5, 40),))
    for part in range(3):
        page, other = rig.held(1), rig.held(2)
        move_to(rig, [page, other], len(tiers) - 1)
        arena = page.cell.arenas[0]
        os.pwrite(arena.fd, b"damage", arena.address(page.slot) + (part << 20))
        assert rig.hierarchy.acquire([0], [page, other]) is None
        settle_all(rig)
        assert [page.lost, other.lost] == [True, False]
        rig.expect(other, 2)
        assert "are damaged" in rig.hierarchy.in_flight.last_error
        rig.hierarchy.release(page)
        rig.hierarchy.release(other)


def test_damage_is_carried_along_from_disk_to_disk(new_rig: NewRig) -> None:
    """What was damaged before it moved to a colder disk is lost there, although its new checksum fits its bytes."""
    rig = new_rig([[2], [2], [2]], "gdd")
    page, other = rig.held(1), rig.held(2)
    move_to(rig, [page, other], 1)
    damage(page, random.Random(0))
    move_to(rig, [page, other], 2)
    assert [page.lost, other.lost] == [True, False]
    rig.expect(other, 2)
    rig.hierarchy.release(page)


def test_checksums_follow_pages_that_a_resize_compacts(new_rig: NewRig) -> None:
    """A page that moves within its tier can be read in its new slot, and damage there is found."""
    rig = new_rig([[4], [8]], "gd")
    pages = [rig.held(i) for i in range(8)]
    assert rig.hierarchy.acquire([4], []) is None
    settle_all(rig)
    assert [page.level for page in pages] == [1] * 8
    for page in pages[:4]:
        rig.hierarchy.release(page)
    sizing = LevelSizing(CacheTier.DISK, 64 << 20, 64 << 20, 2 << 20)
    sizing.slots = [5]
    result = resize_level(rig.hierarchy, 1, sizing)
    assert result.ok
    assert result.compacted > 0
    damaged = max(pages[4:], key=lambda page: int(page.slot))
    damage(damaged, random.Random(0))
    assert rig.hierarchy.acquire([0], pages[4:]) is None
    settle_all(rig)
    for i, page in enumerate(pages[4:], start=4):
        assert page.lost == (page is damaged)
        if not page.lost:
            rig.expect(page, i)


@pytest.mark.parametrize("checksum", ["xxh3", None])
def test_a_disk_tier_has_the_checksums_that_are_configured(checksum: str | None, tmp_path: Path) -> None:
    config = DiskCacheTierConfig(1 << 20, str(tmp_path), checksum=checksum)
    driver = EmulatedDriver()
    tier = make_tier(driver, LevelSizing(CacheTier.DISK, 1 << 20, 1 << 20, 2 << 20), config)
    arena = tier.make_arena(96)
    assert isinstance(arena, DiskArena)
    assert (arena.checksums is not None) == (checksum is not None)
    arena.close()
    driver.close()
