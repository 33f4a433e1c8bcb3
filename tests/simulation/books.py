"""A recount of the statistics beside a simulated manager: what each request took and found, from its lengths alone.

Rule: it never asks the manager how it counts. Where injected faults may have stopped a call half-way, the requests' figures are
taken as they are; sums and movement are compared all the same.
"""

from __future__ import annotations

from kv_cache_manager_v2 import CacheTier, KVCache, KVCacheIterationStatsDelta, KVCacheManager, KVCacheStatsDelta
from kv_cache_manager_v2.introspection import all_slot_counts, request_pages
from kv_cache_manager_v2.storage.page import Page
from tests.simulation.model import Kind, Request


class Account:
    """What a request has counted since it last settled."""

    def __init__(self, number: int, expected: int | None, generating: bool = False) -> None:
        self.number = number
        self.expected = expected  # prompt length: from this history on, growth is generation
        self.generating = generating
        self.taken: dict[tuple[int, int, int], bool] = {}  # (life cycle, beam, block) -> whether while generating
        self.kept = 0  # blocks of beams that are gone ...
        self.kept_missed = 0  # ... those of them that were missed
        self.copied = 0
        self.copies_missed = 0
        self.reused = 0
        self.tokens: list[int] = []  # reused, by level
        self.looked_up = False  # whether a snapshot was looked for

    def delta(self) -> KVCacheStatsDelta:
        missed = sum(1 for generated in self.taken.values() if not generated)
        taken = len(self.taken) + self.kept + self.copied
        return KVCacheStatsDelta(taken, taken, self.reused, missed + self.kept_missed + self.copies_missed)

    def dirty(self) -> bool:
        return not self.delta().empty or any(self.tokens) or self.looked_up


class Books:
    """The statistics of a manager, counted a second time."""

    def __init__(self, manager: KVCacheManager, kinds: list[Kind], size: int) -> None:
        self.manager = manager
        self.kinds = kinds
        self.size = size
        self.attention = [number for number, kind in enumerate(kinds) if not kind.recurrent]
        self.accounts: dict[int, Account] = {}  # by request
        self.committed = KVCacheStatsDelta()
        self.tokens = [0] * len(manager.cache_tier_list)  # reused, of requests that settled
        self.read = [KVCacheIterationStatsDelta() for _kind in kinds]  # sums of all readings
        self.read_tokens = [0] * len(self.tokens)
        self.suspended = 0
        self.resumed = 0
        self.read_suspended = 0
        self.read_resumed = 0
        self.settled = 0  # deltas compared, so that a test sees that there were any
        self.peaks: list[list[int]] = []
        self._reset_peaks()

    # --- requests

    def created(self, number: int, cache_tokens: list[int], model: Request, prompt: int) -> None:
        """A request that reused the model's committed tokens, from these levels."""
        account = self.accounts[number] = Account(number, prompt)
        account.tokens = cache_tokens
        blocks = range(model.blocks)
        account.reused = sum(
            1 for of in self.attention for block in blocks if block not in self.kinds[of].stale(self.size, model.history)
        )
        account.looked_up = prompt > 0 and len(self.attention) < len(self.kinds)

    def forked(self, number: int, twin: int) -> None:
        self.accounts[twin] = Account(twin, self.accounts[number].expected)

    def resized(self, number: int, model: Request, capacity: int, history: int, max_rewind: int) -> None:
        """A resize went through: change the model, and count the blocks that came or went."""
        account = self.accounts[number]
        before = model.blocks
        old_history = model.history
        model.resized(capacity, history, max_rewind)
        if model.blocks > before and account.expected is not None and old_history >= account.expected:
            account.generating = True
        for of in self.attention:
            for beam in range(model.width):
                for block in range(before, model.blocks):
                    if model.has_page(of, block):
                        account.taken[of, beam, block] = account.generating
                for block in range(model.blocks, before):
                    account.taken.pop((of, beam, block), None)

    def tails(self, cache: KVCache, model: Request) -> list[Page | None]:
        """Before a first resume: the last page of each life cycle, which is copied if the history ends inside it."""
        if model.history % self.size == 0:
            return []
        return [request_pages(cache, of)[-1] for of in self.attention]

    def resumed_first(self, number: int, cache: KVCache, forked: bool, tails: list[Page | None], model: Request) -> None:
        account = self.accounts[number]
        for source, own in zip(tails, self.tails(cache, model), strict=True):
            if source is not None and own is not source:
                account.copied += 1
                account.copies_missed += 1 if source.owner is None and not forked else 0

    def widened(self, number: int, model: Request, old_width: int) -> None:
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
                        account.copied += 1
                    else:
                        account.taken[of, beam, block] = account.generating

    def narrowed(self, number: int, width: int) -> None:
        """What beams that are gone took stays counted."""
        account = self.accounts[number]
        for key in [key for key in account.taken if key[1] >= width]:
            account.kept += 1
            account.kept_missed += 0 if account.taken.pop(key) else 1

    def settle(self, number: int, cache: KVCache, compare: bool) -> None:
        """Have the request commit its statistics."""
        account = self.accounts[number]
        delta = cache.commit_pending_stats()
        if compare:
            assert delta == account.delta(), f"request {number} counted {delta} instead of {account.delta()}"
            self.settled += 1
        self.committed.add(delta)
        for level, tokens in enumerate(account.tokens):
            self.tokens[level] += tokens
        self.accounts[number] = Account(number, account.expected, account.generating)

    def forget(self, number: int) -> None:
        """The request is over."""
        del self.accounts[number]

    # --- the manager

    def update_peaks(self) -> None:
        """After a call."""
        for peak, now in zip(self.peaks, self._slots(), strict=True):
            peak[:] = [max(pair) for pair in zip(peak, now, strict=True)]

    def _slots(self) -> list[list[int]]:
        return [[counts.free + counts.evictable, counts.unavailable, counts.evictable] for counts in all_slot_counts(self.manager)]

    def _reset_peaks(self) -> None:
        self.manager.get_and_reset_iteration_peak_block_stats_by_level()
        self.peaks = self._slots()

    def check(self, exact: bool) -> None:
        """Read everything that resets, and compare what can be compared at any time; `exact`: also what faults may blur."""
        manager = self.manager
        for of, delta in manager.get_and_reset_iteration_stats().items():
            self.read[of].add(delta)
        for level, tokens in enumerate(manager.get_and_reset_iteration_cached_tokens_by_level()):
            self.read_tokens[level] += tokens
        suspended, resumed = manager.get_and_reset_iteration_suspend_resume_stats()
        self.read_suspended += suspended
        self.read_resumed += resumed
        found = [peak for groups in manager.get_and_reset_iteration_peak_block_stats_by_level() for peak in groups]
        for peak, (available, unavailable, evictable) in zip(found, self.peaks, strict=True):
            assert peak.available >= available, "a peak was missed"
            assert peak.unavailable >= unavailable, "a peak was missed"
            assert peak.evictable >= evictable, "a peak was missed"
        self.peaks = self._slots()
        self._check_movement()
        self._check_sums()
        if exact:
            assert (self.read_suspended, self.read_resumed) == (self.suspended, self.resumed)
            dirty = {account.number for account in self.accounts.values() if account.dirty()}
            assert manager.get_dirty_stats_kv_cache_ids() == dirty

    def _check_movement(self) -> None:
        """The readings, summed up, are the movement tables."""
        movement = self.manager.movement
        tiers = self.manager.cache_tier_list
        for of, read in enumerate(self.read):
            moved, dropped = movement.moved[of], movement.dropped[of]
            assert read.iter_onboard_blocks == sum(row[0] for row in moved[1:])
            assert read.iter_offload_blocks == sum(moved[0][1:])
            assert read.iter_intra_device_copy_blocks == moved[0][0]
            by_tier = {CacheTier.GPU_MEM: 0, CacheTier.HOST_MEM: 0, CacheTier.DISK: 0}
            for level, tier in enumerate(tiers):
                by_tier[tier] += dropped[level]
            assert read.iter_gpu_dropped_blocks == by_tier[CacheTier.GPU_MEM]
            assert read.iter_host_dropped_blocks == by_tier[CacheTier.HOST_MEM]
            assert read.iter_disk_dropped_blocks == by_tier[CacheTier.DISK]
            assert read.iter_lost_blocks == movement.lost[of]

    def _check_sums(self) -> None:
        """Life cycles add up to the totals, and the totals to what requests settled."""
        onboarded = sum(self.read[of].iter_onboard_blocks for of in self.attention)
        totals = self.manager.get_committed_stats()
        assert totals.alloc_total_blocks == totals.alloc_new_blocks == self.committed.alloc_total_blocks + onboarded
        assert totals.alloc_total_blocks == sum(self.read[of].iter_alloc_total_blocks for of in self.attention)
        for name in ("reused_blocks", "missed_blocks"):
            read = sum(getattr(self.read[of], f"iter_{name}") for of in self.attention)
            assert getattr(totals, name) == getattr(self.committed, name) == read
        assert self.read_tokens == self.tokens
