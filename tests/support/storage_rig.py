"""A hierarchy of a few slots with everything around it, and blocks that only remember what they were told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kv_cache_manager_v2.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
)
from kv_cache_manager_v2.device.timeline import Timeline
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.eviction.order import EvictionOrder
from kv_cache_manager_v2.ids import CacheTier, DataRole, LayerId, Point
from kv_cache_manager_v2.layout.pools import StorageLayout, build_layout
from kv_cache_manager_v2.layout.sizing import LevelSizing
from kv_cache_manager_v2.listener import CachedBlock
from kv_cache_manager_v2.statistics import MovementCounters
from kv_cache_manager_v2.storage.cell import Cell
from kv_cache_manager_v2.storage.hierarchy import Hierarchy
from kv_cache_manager_v2.storage.page import Page, PageOwner
from kv_cache_manager_v2.storage.resize import LevelResize, ResizeResult
from kv_cache_manager_v2.storage.resizing import LevelsResize, QuotaResize
from kv_cache_manager_v2.storage.tiers import HostTier
from tests.support.inside import page_bytes

GRAIN = {CacheTier.GPU_MEM: 2 << 20, CacheTier.HOST_MEM: 4096, CacheTier.DISK: 2 << 20}


class FakeBlock(PageOwner):
    """Lists pages, and runs `on_gone` when it is told that one is gone."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.gone: list[Page] = []
        self.moves: list[tuple[int, int]] = []
        self.on_gone: Callable[[Page], None] | None = None
        self.final = True

    def block_key(self) -> bytes:
        return self.name.encode()

    def parent_block(self) -> CachedBlock | None:
        return None

    def token_list(self) -> list[int | bytes]:
        return []

    def is_final(self, page: Page) -> bool:
        return self.final

    def page_gone(self, page: Page) -> None:
        self.gone.append(page)
        if self.on_gone is not None:
            self.on_gone(page)

    def page_relocated(self, page: Page, source: int, destination: int) -> None:
        self.moves.append((source, destination))


def make_cell(level: int = 0, slots: int = 0, keeps_held: bool = False) -> Cell:
    """A cell without memory."""
    driver = EmulatedDriver()
    cell = Cell(Timeline(driver), level, 0, HostTier(driver), keeps_held, EvictionOrder())
    cell.allocator.expand(slots)
    return cell


def make_layout(
    slot_sizes: Sequence[Sequence[int]], tiers: Sequence[CacheTierConfig]
) -> tuple[StorageLayout, KVCacheManagerConfig]:
    """One pool group per entry: its life cycle has a window of its own, and a buffer of each size."""
    layers = []
    for group, sizes in enumerate(slot_sizes):
        buffers = [BufferConfig(DataRole(f"buffer{i}"), size) for i, size in enumerate(sizes)]
        layers.append(AttentionLayerConfig(LayerId(group), buffers, sliding_window_size=None if group == 0 else 8 * group))
    config = KVCacheManagerConfig(tokens_per_block=4, cache_tiers=list(tiers), layers=layers)
    return build_layout(config), config


class StorageRig:
    """A hierarchy on an emulated device. slots[level][group] gives its size; `tiers` is a letter per level: g, h, d."""

    def __init__(
        self,
        slots: Sequence[Sequence[int]],
        tiers: str = "gh",
        slot_sizes: Sequence[Sequence[int]] = ((96,),),
        schedule: str = "eager",
        seed: int = 0,
        path: str = "/tmp",
        transfer_timeout: float | None = None,
        wrap: Callable[[EmulatedDriver], Any] | None = None,
        exclusive: bool = True,
    ) -> None:
        """`wrap`: what the hierarchy drives instead of the emulated device itself. `exclusive`: no tier keeps clean copies."""
        made: dict[str, Callable[[], CacheTierConfig]] = {
            "g": lambda: GpuCacheTierConfig(64 << 20),
            "h": lambda: HostCacheTierConfig(64 << 20, exclusive),
            "d": lambda: DiskCacheTierConfig(64 << 20, path, exclusive=exclusive),
        }
        self.tier_configs = [made[letter]() for letter in tiers]
        self.driver = EmulatedDriver(schedule, seed, transfer_timeout)
        self.device: Any = self.driver if wrap is None else wrap(self.driver)
        self.timeline = Timeline(self.device)
        self.layout, self.config = make_layout(slot_sizes, self.tier_configs)
        self.sizings = []
        for config, counts in zip(self.tier_configs, slots, strict=True):
            sizing = LevelSizing(config.tier, config.quota, config.quota, GRAIN[config.tier])
            sizing.slots = list(counts)
            self.sizings.append(sizing)
        self.counters = MovementCounters(self.layout.num_life_cycles, len(self.sizings))
        self.hierarchy = Hierarchy(
            self.device, self.timeline, self.layout, self.sizings, self.tier_configs, self.counters, EvictionOrder()
        )
        self.stream = self.driver.create_stream()
        self.pages: list[Page] = []  # all pages ever made

    def close(self) -> None:
        self.hierarchy.close()
        self.timeline.close()
        self.driver.destroy_stream(self.stream)
        self.driver.close()

    def check(self) -> None:
        self.hierarchy.check_invariants(self.pages)
        self.timeline.check_invariants()

    # --- bytes

    def stamp(self, page: Page, value: int) -> None:
        """Queue a write of a pattern that names the value, pool and position, as an engine would."""
        hierarchy = self.hierarchy
        assert page.level == 0
        self.timeline.wait(self.stream, page.ready)
        for pool, size in enumerate(self.layout.slot_sizes[page.pool_group]):
            address = hierarchy.slot_address(0, page.pool_group, pool, page.slot)
            data = pattern(value, pool, size)

            def write(address: int = address, data: bytes = data) -> None:
                self.driver.write_bytes(address, data)

            self.driver.launch(self.stream, write)
        page.ready = self.timeline.record(self.stream)

    def expect(self, page: Page, value: int) -> None:
        """The bytes of a page, on any level, after all work."""
        self.driver.synchronize()
        for pool, size in enumerate(self.layout.slot_sizes[page.pool_group]):
            assert self.read(page, pool) == pattern(value, pool, size), f"page of value {value}, pool {pool}, level {page.level}"

    def read(self, page: Page, pool: int) -> bytes:
        return page_bytes(self.driver, page, pool, 0, self.layout.slot_sizes[page.pool_group][pool])

    # --- pages

    def new(self, value: int | None = None, life_cycle: int = 0, priority: int = 35) -> Page:
        """A locked page; room is made for it if need be."""
        need = [0] * self.layout.num_pool_groups
        need[self.layout.pool_group_of[life_cycle]] = 1
        assert self.hierarchy.acquire(need, []) is None
        page = self.hierarchy.new_page(life_cycle, priority)
        self.pages.append(page)
        if value is not None:
            self.stamp(page, value)
        return page

    def cached(self, value: int | None = None, life_cycle: int = 0, priority: int = 35, owner: FakeBlock | None = None) -> Page:
        """A page of a block that no request uses: droppable, and queued."""
        page = self.new(value, life_cycle, priority)
        self.hierarchy.adopt(page, owner if owner is not None else FakeBlock(f"{value}"), 4)
        self.hierarchy.unlock(page, page.ready)
        return page

    def held(self, value: int | None = None, life_cycle: int = 0, priority: int = 35) -> Page:
        """A private page of a suspended request."""
        page = self.new(value, life_cycle, priority)
        self.hierarchy.hold_locked(page, page.ready)
        return page

    def order(self, level: int, group: int = 0) -> list[Page]:
        """The order of eviction of a level."""
        return self.hierarchy.cells[group][level].order()

    def counts(self, level: int, group: int = 0) -> tuple[int, int, int]:
        """free, evictable, unavailable"""
        hierarchy = self.hierarchy
        return hierarchy.free(level, group), hierarchy.evictable(level, group), hierarchy.unavailable(level, group)


def pattern(value: int, pool: int, size: int) -> bytes:
    """`size` bytes that differ with every argument."""
    unit = (value * 31 + pool + 1).to_bytes(8, "little") + bytes([value & 255, pool, size & 255])
    return (unit * (size // len(unit) + 1))[:size]


def settle_all(rig: StorageRig) -> None:
    """Run all queued work, and let the hierarchy see that it is done."""
    rig.driver.synchronize()
    rig.hierarchy.settle()


def resize_level(hierarchy: Hierarchy, level: int, sizing: LevelSizing) -> ResizeResult:
    """Resize a level, waiting between attempts."""
    change = LevelResize(hierarchy, level, sizing)
    while not change.attempt():
        wait_between(hierarchy, change.pending)
    return change.result


def resize_levels(hierarchy: Hierarchy, sizings: Sequence[LevelSizing]) -> list[ResizeResult]:
    """Resize all levels, waiting between attempts."""
    change = LevelsResize(hierarchy, sizings)
    results = change.attempt()
    while results is None:
        wait_between(hierarchy, change.pending)
        results = change.attempt()
    return results


def resize_quota(hierarchy: Hierarchy, level: int, quota: int, best_efforts: bool, available: int) -> ResizeResult:
    """Change a level's quota, waiting between attempts."""
    change = QuotaResize(hierarchy, level, quota, None, best_efforts, available)
    result = change.attempt()
    while result is None:
        wait_between(hierarchy, change.pending)
        result = change.attempt()
    return result


def wait_between(hierarchy: Hierarchy, points: list[Point]) -> None:
    """Wait between two attempts of a resize, and process the file transfers that have ended, as each call of a manager does."""
    assert points
    for point in points:
        hierarchy.timeline.synchronize(point)
    hierarchy.settle()
