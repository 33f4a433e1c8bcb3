"""A recount of every statistic beside a manager, from lengths and from what can be seen between two calls.

Rule: nothing here asks the manager how it counts. Requests are counted by the rules of their life cycles, movement from the level
of each page before and after a call, peaks from the slots after each call. An injected fault may end a call half-way: from then on
requests' figures are taken as they are, and sums are compared all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_cache_manager_v2 import CacheTier, KVCache, KVCacheIterationStatsDelta, KVCacheManager, KVCacheStatsDelta
from kv_cache_manager_v2.introspection import all_slot_counts, request_pages
from kv_cache_manager_v2.storage.page import Page

MISSED, GENERATED = "missed", "generated"
MAKES_ROOM = ("resume", "resize", "beam width", "prefetch", "clear")  # a commit may also replace pages, and take over slots
OF_REQUESTS = (
    "iter_alloc_total_blocks",
    "iter_alloc_new_blocks",
    "iter_reused_blocks",
    "iter_full_reused_blocks",
    "iter_partial_reused_blocks",
    "iter_missed_blocks",
    "iter_gen_alloc_blocks",
)


class LifeCycleRule(Protocol):
    """A life cycle, as a model describes it."""

    @property
    def recurrent(self) -> bool: ...

    def stale(self, size: int, history: int) -> range: ...


class Lengths(Protocol):
    """A request, as a model describes it."""

    history: int

    @property
    def blocks(self) -> int: ...

    @property
    def width(self) -> int: ...

    def has_page(self, number: int, block: int) -> bool: ...


class Account:
    """What a request has counted since it last committed or discarded it."""

    def __init__(self, expected: int | None, levels: int, generating: bool = False) -> None:
        self.expected = expected  # prompt length: from this history on, growth is generation
        self.generating = generating
        self.taken: dict[tuple[int, int, int], str] = {}  # (life cycle, beam, block): what it was taken as
        self.kept: list[tuple[int, str]] = []  # (life cycle, what) of pages of beams that are gone
        self.copied: list[int] = []  # life cycle of each private copy ...
        self.copies_missed: list[int] = []  # ... of those whose source is in the tree no more
        self.full: list[tuple[int, int]] = []  # (life cycle, level) of each reused block
        self.partial: list[tuple[int, int]] = []
        self.tokens = [0] * levels  # reused
        self.looked_up = False  # whether a snapshot was looked for

    def iteration(self, of: int) -> KVCacheIterationStatsDelta:
        """The counts of one life cycle."""
        kinds = [what for (index, _beam, _block), what in self.taken.items() if index == of]
        kinds += [what for index, what in self.kept if index == of]
        full = sum(1 for index, _level in self.full if index == of)
        partial = sum(1 for index, _level in self.partial if index == of)
        taken = len(kinds) + self.copied.count(of)
        return KVCacheIterationStatsDelta(
            iter_alloc_total_blocks=taken,
            iter_alloc_new_blocks=taken,
            iter_reused_blocks=full + partial,
            iter_full_reused_blocks=full,
            iter_partial_reused_blocks=partial,
            iter_missed_blocks=kinds.count(MISSED) + self.copies_missed.count(of),
            iter_gen_alloc_blocks=kinds.count(GENERATED),
        )

    def dirty(self, attention: Sequence[int]) -> bool:
        return any(self.tokens) or self.looked_up or not all(self.iteration(of).empty for of in attention)


class Recount:
    """The statistics of a manager, counted a second time."""

    def __init__(self, manager: KVCacheManager, kinds: Sequence[LifeCycleRule], size: int) -> None:
        self.manager = manager
        self.kinds = kinds
        self.size = size
        self.attention = [number for number, kind in enumerate(kinds) if not kind.recurrent]
        self.levels = len(manager.cache_tier_list)
        self.accounts: dict[int, Account] = {}  # by request
        self.committed = KVCacheStatsDelta()
        self.iteration = [KVCacheIterationStatsDelta() for _kind in kinds]  # committed since the last reading
        self.by_level = [([0] * self.levels, [0] * self.levels) for _kind in kinds]  # (full, partial) since the last reading
        self.tokens = [0] * self.levels  # reused, of requests that committed
        self.read = [KVCacheIterationStatsDelta() for _kind in kinds]  # sums of all readings
        self.read_tokens = [0] * self.levels
        self.suspended = self.resumed = 0
        self.read_suspended = self.read_resumed = 0
        self.settled = 0  # deltas compared, so that a test sees that there were any
        self.moves_seen = 0  # pages that were seen to move or to be dropped
        self.copies = [0 for _kind in kinds]  # on the GPU, made by the call
        self.pages: list[tuple[Page, int, bool]] | None = None  # cached before the call: (page, level, whether it was in use)
        self.private: list[tuple[Page, int]] = []  # the other pages
        self.spare: list[Page] = []  # those of them that replace a block's page if it is dropped
        self.moved, self.dropped, self.returned = self._movement()  # the manager's, before the call
        self.copied: dict[int, list[int]] = {}  # by page: the levels that had clean copies of it before the call
        self.peaks: list[list[int]] = []  # available, unavailable, evictable, of each level and pool group
        self._reset_peaks()

    # --- requests

    def created(self, number: int, cache: KVCache, prompt: int | None) -> None:
        """A request that reused its committed tokens; `prompt`: its expected length."""
        account = self.accounts[number] = Account(prompt, self.levels)
        found = cache.num_committed_tokens
        full = found // self.size
        coldest = [0] * cache.num_blocks
        for of in self.attention:
            stale = self.kinds[of].stale(self.size, found)
            for block, page in enumerate(request_pages(cache, of)):
                assert (page is not None) == (block not in stale)
                if page is not None:
                    (account.full if block < full else account.partial).append((of, page.level))
                    coldest[block] = max(coldest[block], page.level)
        for block in range(full):
            if all(block in kind.stale(self.size, found) for kind in self.kinds if not kind.recurrent):
                cached = [cache.state.path[block].page(of) for of in self.attention]
                coldest[block] = max([page.level for page in cached if page is not None], default=0)
        account.tokens = list(cache.cached_tokens_by_level)
        if len(self.attention) == len(self.kinds):
            tokens = [0] * self.levels
            for block, level in enumerate(coldest):
                tokens[level] += min(self.size, found - block * self.size)
            assert account.tokens == tokens
        else:
            account.looked_up = bool(prompt)

    def forked(self, number: int, twin: int) -> None:
        self.accounts[twin] = Account(self.accounts[number].expected, self.levels)

    def resized(self, number: int, model: Lengths, old_blocks: int, old_history: int) -> None:
        """A resize went through: blocks came or went. Called after the model."""
        account = self.accounts[number]
        if model.blocks > old_blocks and account.expected is not None and old_history >= account.expected:
            account.generating = True
        what = GENERATED if account.generating else MISSED
        for of in self.attention:
            for beam in range(model.width):
                for block in range(old_blocks, model.blocks):
                    if model.has_page(of, block):
                        account.taken[of, beam, block] = what
                for block in range(model.blocks, old_blocks):
                    account.taken.pop((of, beam, block), None)

    def tails(self, cache: KVCache, model: Lengths) -> list[Page | None]:
        """Before a first resume: the last page of each life cycle, which is copied if the history ends inside it."""
        if model.history % self.size == 0:
            return []
        return [request_pages(cache, of)[-1] for of in self.attention]

    def resumed_first(self, number: int, cache: KVCache, forked: bool, tails: list[Page | None], model: Lengths) -> None:
        account = self.accounts[number]
        for of, source, own in zip(self.attention, tails, self.tails(cache, model), strict=False):
            if source is not None and own is not source:
                self._copied(account, of)
                if source.owner is None and not forked:
                    account.copies_missed.append(of)

    def widened(self, number: int, model: Lengths, old_width: int) -> None:
        """Called after the model: copies of the block in which the history ends, and pages of those behind it."""
        account = self.accounts[number]
        if account.expected is not None and model.history >= account.expected:
            account.generating = True
        first, inside = divmod(model.history, self.size)
        for of in self.attention:
            for beam in range(old_width, model.width):
                for block in range(first, model.blocks):
                    if not model.has_page(of, block):
                        continue
                    if block == first and inside:
                        self._copied(account, of)
                    else:
                        account.taken[of, beam, block] = GENERATED if account.generating else MISSED

    def _copied(self, account: Account, of: int) -> None:
        account.copied.append(of)
        self.copies[of] += 1

    def narrowed(self, number: int, width: int) -> None:
        """What beams that are gone took stays counted."""
        account = self.accounts[number]
        for key in [key for key in account.taken if key[1] >= width]:
            account.kept.append((key[0], account.taken.pop(key)))

    def settle(self, number: int, cache: KVCache, compare: bool) -> None:
        """Have the request commit its statistics."""
        account = self.accounts[number]
        delta = cache.commit_pending_stats()
        expected = KVCacheStatsDelta()
        for of in self.attention:
            counted = account.iteration(of)
            self.iteration[of].add(counted)
            taken = counted.iter_alloc_total_blocks
            expected.add(KVCacheStatsDelta(taken, taken, counted.iter_reused_blocks, counted.iter_missed_blocks))
        if compare:
            assert delta == expected, f"request {number} counted {delta} instead of {expected}"
            self.settled += 1
        self.committed.add(delta)
        for tables, reused in ((0, account.full), (1, account.partial)):
            for of, level in reused:
                self.by_level[of][tables][level] += 1
        self.tokens = [sum(pair) for pair in zip(self.tokens, account.tokens, strict=True)]
        self._begin_again(number)

    def discard(self, number: int, cache: KVCache) -> None:
        """Have the request discard its statistics."""
        cache.discard_pending_stats()
        self._begin_again(number)

    def _begin_again(self, number: int) -> None:
        account = self.accounts[number]
        self.accounts[number] = Account(account.expected, self.levels, account.generating)

    def forget(self, number: int) -> None:
        """The request is closed."""
        del self.accounts[number]

    # --- around each call

    def before(self, operation: str) -> None:
        """Note the level of each page, if the call makes room: `look` then compares what moved with what the manager counted."""
        self.pages = None
        if operation in MAKES_ROOM:
            pages = [page for cell in self.manager.shared.hierarchy.all_cells() for page in cell.pages()]
            self.pages = [(page, page.level, page.locks + page.holds > 0) for page in pages if page.owner is not None]
            self.private = [(page, page.level) for page in pages if page.owner is None]
            self.spare = [page for pages in self.manager.shared.tree.duplicates.values() for page in pages if page.alive()]
            self.copied = {id(page): _levels_of_copies(page) for page in pages}
            self.moved, self.dropped, self.returned = self._movement()
            self.copies = [0 for _kind in self.kinds]

    def look(self) -> None:
        """After a call."""
        for peak, now in zip(self.peaks, self._slots(), strict=True):
            peak[:] = [max(pair) for pair in zip(peak, now, strict=True)]
        if self.pages is not None:
            self._check_moves(self.pages)
        self.pages = None

    def _check_moves(self, cached: list[tuple[Page, int, bool]]) -> None:
        moved, dropped, returned = self._movement()
        perhaps = [[0] * self.levels for _kind in self.kinds]
        for page, level in [*self.private, *((page, level) for page, level, _in_use in cached)]:
            if page.level != level:
                of = page.life_cycle
                self.moves_seen += 1
                if page.level in self.copied[id(page)] and returned[of][page.level] > self.returned[of][page.level]:
                    self.returned[of][page.level] += 1
                else:
                    self.moved[of][level][page.level] += 1
        for page, _level, in_use in cached:
            if not page.alive():  # if it was in use, its block may have been removed first: then it ends and is not dropped
                (perhaps if in_use else self.dropped)[page.life_cycle][page.level] += 1
                self.moves_seen += 1
        for page in self.spare:  # it may have replaced a page that was dropped, and may have been dropped itself
            perhaps[page.life_cycle][page.level] += not page.alive()
        for of in self.attention:
            self.moved[of][0][0] += self.copies[of]
            assert self.moved[of] == moved[of], f"movement of life cycle {of}"
            assert self.returned[of] == returned[of], f"pages of life cycle {of} that returned to clean copies"
            for least, more, found in zip(self.dropped[of], perhaps[of], dropped[of], strict=True):
                assert least <= found <= least + more, f"drops of life cycle {of}"

    def _movement(self) -> tuple[list[list[list[int]]], list[list[int]], list[list[int]]]:
        movement = self.manager.movement
        moved = [[list(row) for row in table] for table in movement.moved]
        return moved, [list(row) for row in movement.dropped], [list(row) for row in movement.returned]

    def _slots(self) -> list[list[int]]:
        return [[counts.free + counts.evictable, counts.unavailable, counts.evictable] for counts in all_slot_counts(self.manager)]

    def _reset_peaks(self) -> None:
        self.manager.get_and_reset_iteration_peak_block_stats_by_level()
        self.peaks = self._slots()

    # --- readings

    def check(self, exact: bool) -> None:
        """Read everything that resets, and compare what can be compared at any time; `exact`: also what faults may blur."""
        manager = self.manager
        before = [delta.copy() for delta in self.read]
        for life_cycle, delta in manager.get_and_reset_iteration_stats().items():
            self.read[life_cycle].add(delta)
        for level, tokens in enumerate(manager.get_and_reset_iteration_cached_tokens_by_level()):
            self.read_tokens[level] += tokens
        suspended, resumed = manager.get_and_reset_iteration_suspend_resume_stats()
        self.read_suspended += suspended
        self.read_resumed += resumed
        self._check_peaks()
        self._check_movement()
        self._check_sums()
        tables = manager.get_and_reset_iteration_reused_blocks_by_level()
        if exact:
            assert (self.read_suspended, self.read_resumed) == (self.suspended, self.resumed)
            dirty = {number for number, account in self.accounts.items() if account.dirty(self.attention)}
            assert manager.get_dirty_stats_kv_cache_ids() == dirty
            self._check_iteration(before)
            read = {int(of): (table.full, table.partial) for of, table in tables.items() if of in self.attention}
            assert read == {of: self.by_level[of] for of in self.attention if any(map(any, self.by_level[of]))}
        self.iteration = [KVCacheIterationStatsDelta() for _kind in self.kinds]
        self.by_level = [([0] * self.levels, [0] * self.levels) for _kind in self.kinds]

    def _check_peaks(self) -> None:
        """No less than what was seen after a call: within one there may have been more."""
        found = [peak for groups in self.manager.get_and_reset_iteration_peak_block_stats_by_level() for peak in groups]
        for peak, (available, unavailable, evictable) in zip(found, self.peaks, strict=True):
            assert peak.available >= available, "a peak was missed"
            assert peak.unavailable >= unavailable, "a peak was missed"
            assert peak.evictable >= evictable, "a peak was missed"
        self.peaks = self._slots()

    def _check_iteration(self, before: list[KVCacheIterationStatsDelta]) -> None:
        """What each life cycle read is what its requests committed; loads from colder tiers count as allocations."""
        for of in self.attention:
            for name in OF_REQUESTS:
                read = getattr(self.read[of], name) - getattr(before[of], name)
                loaded = self.read[of].iter_onboard_blocks - before[of].iter_onboard_blocks if "alloc_" in name[:11] else 0
                assert read == getattr(self.iteration[of], name) + loaded, f"life cycle {of}, {name}"

    def _check_movement(self) -> None:
        """The readings, summed up, are the movement tables; bytes are blocks times the bytes of a slot."""
        movement = self.manager.movement
        groups = self.manager.get_life_cycle_pool_group_indices()
        statistics = self.manager.get_storage_statistics()
        tiers = self.manager.cache_tier_list
        for of, read in enumerate(self.read):
            moved, dropped = movement.moved[of], movement.dropped[of]
            by_tier = {tier: sum(dropped[level] for level, of_level in enumerate(tiers) if of_level == tier) for tier in CacheTier}
            slot_bytes = sum(statistics[groups[of]].slot_sizes)
            assert read.iter_onboard_blocks == sum(row[0] for row in moved[1:])
            assert read.iter_onboard_bytes == read.iter_onboard_blocks * slot_bytes
            assert read.iter_offload_blocks == sum(moved[0][1:])
            assert read.iter_offload_bytes == read.iter_offload_blocks * slot_bytes
            assert read.iter_intra_device_copy_blocks == moved[0][0]
            assert read.iter_intra_device_copy_bytes == moved[0][0] * slot_bytes
            assert read.iter_gpu_dropped_blocks == by_tier[CacheTier.GPU_MEM]
            assert read.iter_host_dropped_blocks == by_tier[CacheTier.HOST_MEM]
            assert read.iter_host_dropped_bytes == read.iter_host_dropped_blocks * slot_bytes
            assert read.iter_disk_dropped_blocks == by_tier[CacheTier.DISK]
            assert read.iter_lost_blocks == movement.lost[of]

    def _check_sums(self) -> None:
        """Life cycles add up to the totals, and the totals to what requests committed."""
        onboarded = sum(self.read[of].iter_onboard_blocks for of in self.attention)
        totals = self.manager.get_committed_stats()
        assert totals.alloc_total_blocks == totals.alloc_new_blocks == self.committed.alloc_total_blocks + onboarded
        assert totals.alloc_total_blocks == sum(self.read[of].iter_alloc_total_blocks for of in self.attention)
        for name in ("reused_blocks", "missed_blocks"):
            read = sum(getattr(self.read[of], f"iter_{name}") for of in self.attention)
            assert getattr(totals, name) == getattr(self.committed, name) == read
        assert self.read_tokens == self.tokens


def _levels_of_copies(page: Page) -> list[int]:
    """The levels that have clean copies of a page."""
    levels = []
    copy = page.copy
    while copy is not None:
        levels.append(copy.level)
        copy = copy.copy
    return levels
