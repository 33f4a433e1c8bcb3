"""A recount of every statistic beside a manager, from what can be seen from outside between two calls.

Rule: nothing here asks the ledger how it counts. Requests are counted from their lengths by the rules of the life cycles, written
down once more; movement from where each page lies before and after a call; peaks from the slots after each call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_cache_manager_v2 import (
    KVCache,
    KVCacheIterationStatsDelta,
    KVCacheManager,
    KVCacheStatsDelta,
    LifeCycleId,
    PoolGroupPeakBlockStats,
    introspection,
)
from kv_cache_manager_v2.storage.page import Page

MISSED, GENERATED = "missed", "generated"


@dataclass
class Kind:
    """A life cycle of attention, as the rules describe it."""

    window: int | None
    sinks: int  # blocks

    def live(self, ordinal: int, history: int, size: int) -> bool:
        """Whether a block is needed at this history."""
        if self.window is None or ordinal < self.sinks:
            return True
        return ordinal >= (history + 1 - self.window) // size


@dataclass
class Pending:
    """What a request has counted and not committed: by (life cycle, beam), what each block was taken as."""

    taken: dict[tuple[int, int], dict[int, str]] = field(default_factory=dict)
    narrowed: list[tuple[int, str]] = field(default_factory=list)  # (life cycle, what) of pages of beams that are gone
    copied: list[int] = field(default_factory=list)  # life cycle of each private copy
    missed_copies: int = 0
    full: list[tuple[int, int]] = field(default_factory=list)  # (life cycle, level) of each reused block
    partial: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # reused, by level

    def counted(self, life_cycle: int) -> tuple[int, int]:
        """(missed, generated) blocks of a life cycle."""
        kinds = [what for (index, _beam), of_lane in self.taken.items() if index == life_cycle for what in of_lane.values()]
        kinds += [what for index, what in self.narrowed if index == life_cycle]
        return kinds.count(MISSED), kinds.count(GENERATED)

    def empty(self) -> bool:
        return not (any(self.taken.values()) or self.narrowed or self.copied or any(self.tokens))


class Counted:
    """One open request and its recount."""

    def __init__(self, cache: KVCache, expected: int | None) -> None:
        self.cache = cache
        self.expected = expected
        self.generating = False
        self.pending = Pending()
        self.started = False
        self.forked = False


class Recount:
    """The books of a manager, kept a second time."""

    def __init__(self, manager: KVCacheManager, kinds: list[Kind]) -> None:
        self.manager = manager
        self.kinds = kinds
        self.size = manager.tokens_per_block
        self.levels = len(manager.cache_tier_list)
        self.committed = KVCacheStatsDelta()
        self.iteration = [KVCacheIterationStatsDelta() for _kind in kinds]
        self.tokens_by_level = [0] * self.levels
        self.by_level = [([0] * self.levels, [0] * self.levels) for _kind in kinds]
        self.moved = [[[0] * self.levels for _s in range(self.levels)] for _kind in kinds]
        self.dropped = [[0] * self.levels for _kind in kinds]
        self.suspended = 0
        self.resumed = 0
        self.peaks: list[list[int]] = []  # available, unavailable, evictable, of each level and pool group
        self.reset_peaks()
        self._before: dict[int, tuple[Page, int, bool]] = {}
        self._read = self._movement()

    # --- requests

    def created(self, cache: KVCache, expected: int | None) -> Counted:
        """Take note of what a new cache holds."""
        counted = Counted(cache, expected)
        full = cache.num_committed_tokens // self.size
        pending = counted.pending
        pending.tokens = [0] * self.levels
        coldest = [0] * cache.num_blocks
        for index, kind in enumerate(self.kinds):
            for ordinal, page in enumerate(introspection.request_pages(cache, index)):
                assert (page is not None) == kind.live(ordinal, cache.num_committed_tokens, self.size)
                if page is not None:
                    (pending.full if ordinal < full else pending.partial).append((index, page.level))
                    coldest[ordinal] = max(coldest[ordinal], page.level)
        for ordinal in range(full):
            if not any(kind.live(ordinal, cache.num_committed_tokens, self.size) for kind in self.kinds):
                cached = [cache.state.path[ordinal].page(index) for index in range(len(self.kinds))]
                coldest[ordinal] = max([page.level for page in cached if page is not None], default=0)
        for ordinal, level in enumerate(coldest):
            pending.tokens[level] += min(self.size, cache.num_committed_tokens - ordinal * self.size)
        assert pending.tokens == cache.cached_tokens_by_level
        return counted

    def grew(self, counted: Counted, old_blocks: int, old_history: int) -> None:
        """A resize has succeeded."""
        cache = counted.cache
        if cache.num_blocks > old_blocks and counted.expected is not None and old_history >= counted.expected:
            counted.generating = True
        what = GENERATED if counted.generating else MISSED
        for index, kind in enumerate(self.kinds):
            for beam in range(cache.beam_width):
                lane = counted.pending.taken.setdefault((index, beam), {})
                for ordinal in range(old_blocks, cache.num_blocks):
                    if kind.live(ordinal, cache.history_length, self.size):
                        lane[ordinal] = what
                for ordinal in range(cache.num_blocks, old_blocks):
                    lane.pop(ordinal, None)

    def resumed_first(self, counted: Counted, linked: list[bool | None]) -> None:
        """The first resume: the partly matched last block was copied; `linked` says by life cycle whether it was the tree's."""
        counted.started = True
        for index, of_tree in enumerate(linked):
            if of_tree is not None:
                counted.pending.copied.append(index)
                counted.pending.missed_copies += 0 if of_tree or counted.forked else 1
                self.moved[index][0][0] += 1

    def widened(self, counted: Counted, old_width: int) -> None:
        """Further beams: a copy of the block in which the history ends, a page of each block behind it."""
        cache = counted.cache
        if counted.expected is not None and cache.history_length >= counted.expected:
            counted.generating = True
        first, inside = divmod(cache.history_length, self.size)
        for index in range(len(self.kinds)):
            for beam in range(old_width, cache.beam_width):
                lane = counted.pending.taken.setdefault((index, beam), {})
                for ordinal in range(first, cache.num_blocks):
                    if ordinal == first and inside:
                        counted.pending.copied.append(index)
                        self.moved[index][0][0] += 1
                    else:
                        lane[ordinal] = GENERATED if counted.generating else MISSED

    def narrowed(self, counted: Counted) -> None:
        """Beams that are gone: what they took stays counted."""
        for key in [key for key in counted.pending.taken if key[1] >= counted.cache.beam_width]:
            counted.pending.narrowed += [(key[0], what) for what in counted.pending.taken.pop(key).values()]

    def commit(self, counted: Counted) -> KVCacheStatsDelta:
        """The request's delta, added to the sums."""
        pending = counted.pending
        delta = KVCacheStatsDelta()
        for index, iteration in enumerate(self.iteration):
            missed, generated = pending.counted(index)
            copied = pending.copied.count(index)
            full = [level for of, level in pending.full if of == index]
            partial = [level for of, level in pending.partial if of == index]
            iteration.iter_alloc_total_blocks += missed + generated + copied
            iteration.iter_alloc_new_blocks += missed + generated + copied
            iteration.iter_missed_blocks += missed
            iteration.iter_gen_alloc_blocks += generated
            iteration.iter_full_reused_blocks += len(full)
            iteration.iter_partial_reused_blocks += len(partial)
            iteration.iter_reused_blocks += len(full) + len(partial)
            for level in full:
                self.by_level[index][0][level] += 1
            for level in partial:
                self.by_level[index][1][level] += 1
            delta.add(KVCacheStatsDelta(missed + generated + copied, missed + generated + copied, len(full) + len(partial), missed))
        assert pending.missed_copies == 0, "the histories drawn here never take a matched block out of the tree"
        for level, tokens in enumerate(pending.tokens):
            self.tokens_by_level[level] += tokens
        self.committed.add(delta)
        counted.pending = Pending()
        return delta

    # --- pages

    def before(self, caches: list[KVCache]) -> None:
        """Note where every page lies, before a call."""
        self._before = {}
        for page in self._pages(caches):
            self._before[id(page)] = (page, page.level, page.owner is not None)

    def after(self, makes_room: bool) -> None:
        """Count what moved and what was dropped, which only calls that make room do: at a commit a cached page may be replaced by a
        wider one, or take over the slot of an identical one."""
        for page, level, cached in self._before.values():
            if not makes_room:
                continue
            if page.level != level:
                self.moved[page.life_cycle][level][page.level] += 1
            if cached and not page.alive():  # one that is not cached, as the source of a fork's last copy, may just end
                self.dropped[page.life_cycle][level] += 1

    def _pages(self, caches: list[KVCache]) -> list[Page]:
        pages = [page for block in introspection.all_tree_blocks(self.manager) for page in block.pages]
        for cache in caches:
            for index in range(len(self.kinds)):
                for beam in range(cache.beam_width):
                    pages += introspection.request_pages(cache, index, beam)
        return [page for page in pages if page is not None]

    def check_movement(self) -> None:
        movement = self.manager.movement
        assert movement.moved == self.moved
        assert movement.dropped == self.dropped

    # --- peaks

    def _slots(self) -> list[list[int]]:
        return [
            [counts.free + counts.evictable, counts.unavailable, counts.evictable]
            for counts in introspection.all_slot_counts(self.manager)
        ]

    def update_peaks(self) -> None:
        self.peaks = [[max(pair) for pair in zip(*both, strict=True)] for both in zip(self.peaks, self._slots(), strict=True)]

    def reset_peaks(self) -> None:
        self.peaks = self._slots()

    # --- readings

    def _movement(self) -> tuple[list[list[list[int]]], list[list[int]]]:
        return [[list(row) for row in table] for table in self.moved], [list(row) for row in self.dropped]

    def check_readings(self) -> None:
        """Read all that resets, and compare."""
        manager = self.manager
        self._fold_movement()
        expected = {LifeCycleId(index): delta for index, delta in enumerate(self.iteration) if not delta.empty}
        assert manager.get_and_reset_iteration_stats() == expected
        assert manager.get_and_reset_iteration_stats() == {}
        self.iteration = [KVCacheIterationStatsDelta() for _kind in self.kinds]
        assert manager.get_and_reset_iteration_cached_tokens_by_level() == self.tokens_by_level
        self.tokens_by_level = [0] * self.levels
        tables = manager.get_and_reset_iteration_reused_blocks_by_level()
        for index, (full, partial) in enumerate(self.by_level):
            table = tables.get(LifeCycleId(index))
            assert (full, partial) == ((table.full, table.partial) if table else ([0] * self.levels, [0] * self.levels))
        self.by_level = [([0] * self.levels, [0] * self.levels) for _kind in self.kinds]
        assert manager.get_and_reset_iteration_suspend_resume_stats() == (self.suspended, self.resumed)
        self.suspended = self.resumed = 0
        peaks = [peak for groups in manager.get_and_reset_iteration_peak_block_stats_by_level() for peak in groups]
        assert peaks == [PoolGroupPeakBlockStats(*cell) for cell in self.peaks]
        self.reset_peaks()

    def check_committed(self) -> None:
        onboarded = sum(table[source][0] for table in self.moved for source in range(1, self.levels))
        total = self.committed.copy()
        total.alloc_total_blocks += onboarded
        total.alloc_new_blocks += onboarded
        assert self.manager.get_committed_stats() == total

    def _fold_movement(self) -> None:
        moved_before, dropped_before = self._read
        for index, delta in enumerate(self.iteration):
            (group,) = {self.manager.get_life_cycle_pool_group_indices()[index]}
            slot_bytes = sum(self.manager.get_storage_statistics()[group].slot_sizes)
            moved = [
                [now - then for now, then in zip(*rows, strict=True)]
                for rows in zip(self.moved[index], moved_before[index], strict=True)
            ]
            dropped = [now - then for now, then in zip(self.dropped[index], dropped_before[index], strict=True)]
            onboarded = sum(row[0] for row in moved[1:])
            delta.iter_alloc_total_blocks += onboarded
            delta.iter_alloc_new_blocks += onboarded
            delta.iter_onboard_blocks += onboarded
            delta.iter_onboard_bytes += onboarded * slot_bytes
            delta.iter_offload_blocks += sum(moved[0][1:])
            delta.iter_offload_bytes += sum(moved[0][1:]) * slot_bytes
            delta.iter_intra_device_copy_blocks += moved[0][0]
            delta.iter_intra_device_copy_bytes += moved[0][0] * slot_bytes
            delta.iter_gpu_dropped_blocks += dropped[0]
            delta.iter_host_dropped_blocks += dropped[1]
            delta.iter_host_dropped_bytes += dropped[1] * slot_bytes
        self._read = self._movement()
