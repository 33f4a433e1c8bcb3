"""What concerns many requests or the manager as a whole: questions, batches, quotas, events, faults."""

from __future__ import annotations

from array import array
from typing import Final

from kv_cache_manager_v2 import OutOfPagesError, PageDataLostError, commit_batch, resize_batch
from tests.hunt.base import MAX_BLOCKS, SCOPES, Found
from tests.hunt.growth import RequestGrowth

DRIVER_CALLS: Final = (
    "reserve",
    "create_chunk",
    "map_chunk",
    "set_access",
    "host_register",
    "create_event",
    "record_event",
    "record_event",
    "wait_event",
    "wait_event",
    "query_event",
    "synchronize_event",
    "synchronize",
    "copy",
    "copy_batch",
    "copy_batch",
    "wait_gate",
)


class WholeManager(RequestGrowth):
    """Questions, quotas, batches, faults."""

    # --- questions

    def ask(self) -> None:
        rng = self.rng
        kind = int(rng.random() * 6)
        scope = int(rng.random() * len(SCOPES))
        base = self.prompts[scope][int(rng.random() * 4)]
        manager = self.manager
        if kind == 0:
            self.attempt(None, manager.probe_reuse, SCOPES[scope], base)
        elif kind == 1:
            self.attempt(None, manager.explain_miss, SCOPES[scope], base)
            self.attempt(None, manager.explain_hits)
            if manager.hit_curve_rate > 0:
                self.attempt(None, manager.hit_curve)
        elif kind == 2:
            self.attempt(None, manager.probe_first_new_block_key, SCOPES[scope], base)
        else:
            request = self.pick(lambda r: not r.named)
            if request is None:
                return
            if kind == 3:
                self.attempt(request, lambda: request.cache.pages_by_level)
            elif kind == 4:
                loaded = self.attempt(request, lambda: request.cache.is_loaded)
                if loaded and request.active and not self.disturbed and request.cache.pages_by_level[0][0] < 0:
                    raise Found("pages are counted below zero")
            else:
                self.attempt(request, lambda: request.cache.committed_tokens)
                if request.cache.committed_tokens != request.texts[0].tokens[: request.committed]:
                    raise Found(f"{request} committed other tokens than it says")

    def statistics(self) -> None:
        manager = self.manager
        request = self.pick(lambda r: not r.named)
        if request is not None:
            self.attempt(request, request.cache.commit_pending_stats)
        manager.get_committed_stats()
        manager.get_and_reset_iteration_stats()
        manager.get_and_reset_iteration_peak_block_stats()
        for level in range(self.setup.tiers):
            for row in manager.get_storage_statistics(level):
                if not 0 <= row.free <= row.total or not 0 <= row.evictable <= row.total - row.free:
                    raise Found(f"statistics that cannot be: {row}")

    def own_rows(self) -> None:
        """The engine hands in index buffers of its own, or takes them back."""
        request = self.pick(lambda r: r.active and not r.named and r.row < 0)
        if request is None:
            return
        for memory in self.memory:
            if memory.group.ssm:
                continue
            for beam in range(request.width):
                buffer = array("i", [0]) * (MAX_BLOCKS + 3) if self.rng.random() < 0.7 else None
                request.views = []
                request.cache.set_base_page_index_buf(beam, memory.index, buffer)

    def hold_view(self) -> None:
        request = self.pick(lambda r: r.active and not r.named)
        if request is not None:
            memory = self.memory[0]
            row = request.cache.get_base_page_indices(memory.index)
            request.views = [memoryview(row)]  # type: ignore[arg-type]  # an array, or a buffer of ours

    def batch(self) -> None:
        """A step of several requests in one call each."""
        if self.setup.scratch_rewind is not None:
            return
        chosen = [
            r
            for r in self.open
            if r.active and r.committing and not r.named and r.width == 1 and r.written == r.committed < MAX_BLOCKS * self.tpb
        ]
        if not chosen:
            return
        self.operations += len(chosen)
        count = None
        try:
            count = self.attempt(None, resize_batch, [r.cache for r in chosen], [r.written + 1 for r in chosen])
        except Found as found:
            if not isinstance(found.__cause__, PageDataLostError) or not (self.disturbed or self.interrupted):
                raise
        if count is None:
            changed = [number for number, r in enumerate(chosen) if r.cache.capacity != r.capacity]
            count = changed[-1] + 1 if changed else 0
        done = chosen[:count]
        for r in done:
            r.capacity = r.written + 1
        for r in chosen:
            self.expect_lengths(r, "in a batch,")
        for r in done:
            self.step(r, 1)
        try:
            self.attempt(None, commit_batch, [r.cache for r in done], [r.texts[0].tokens[-1] for r in done])
        except Found as found:
            if not isinstance(found.__cause__, PageDataLostError) or not (self.disturbed or self.interrupted):
                raise
        for r in done:
            if r.cache.num_committed_tokens != r.committed:
                r.committed += 1
                r.history = max(r.history, r.committed)
            self.expect_lengths(r, "committed in a batch,")

    # --- the manager as a whole

    def _suspend_all(self) -> bool:
        self.let_go()  # what follows waits for the device
        self.collect()
        for request in list(self.open):
            if request.active and not request.named:
                self._suspend(request)
        for request in [r for r in self.open if r.active and r.named]:
            self._close(request)
        return not any(request.cache.is_active for request in self.open)

    def resize_level(self) -> None:
        if not self._suspend_all():
            return
        level = self.rng.randrange(self.setup.tiers)
        least = 1 if level == 1 and self.setup.host else 2
        self._resize_level(level, self.rng.choice((least, 2, 3, 4, 6)) << 20)

    def grow_and_shrink(self) -> None:
        """Every level, up and down again."""
        for level in range(self.setup.tiers):
            before = self.manager.get_quota(level)
            for quota in (before + (4 << 20), before):
                if self._suspend_all():
                    self._resize_level(level, quota)

    def _resize_level(self, level: int, quota: int) -> None:
        result = self.attempt(None, self.manager.resize, level, quota, self.rng.random() < 0.3)
        self.outcomes["resized" if result else "not resized"] += 1
        self.map()

    def adjust(self) -> None:
        if self._suspend_all():
            result = self.attempt(None, self._adjusted)
            self.outcomes["adjusted" if result else "not adjusted"] += 1
            self.map()

    def _adjusted(self) -> bool:
        try:
            self.manager.adjust()
        except OutOfPagesError:
            return False
        return True

    def clear(self) -> None:
        for request in list(self.open):
            self._close(request)
        self.collect()
        if not self.open:
            self.attempt(None, self.manager.clear_reusable_blocks)

    def flush(self) -> None:
        assert self.listener is not None
        self.listener.flush_iteration_events()
        if not self.mirror.apply(self.listener.get_latest_events(0)):
            raise Found("events are missing")

    def check(self) -> None:
        self.attempt(None, self.manager.check_invariants)
        self.device.check_invariants()

    def settle(self) -> None:
        """The engine waits for the device; what it finds then is no longer on its way."""
        if not self.armed:
            self.let_go()
            self.own.synchronize()

    # --- faults

    def disturb(self) -> None:
        if self.armed:
            return
        rng = self.rng
        self.armed = self.disturbed = True
        self.heal_at = self.operations + rng.randrange(5, 120)
        device = self.device
        for _i in range(rng.choice((1, 1, 2, 3))):
            kind = rng.random()
            times = rng.choice((1, 1, 2, 5, None))
            nth = rng.randrange(1, 12)
            if kind < 0.5 or self.setup.disk == 0:
                call = rng.choice(DRIVER_CALLS)
                device.fail(call, nth, times)
                self.note(f"fail {call} {nth} {times}")
            else:
                call = rng.choice(("read_file", "write_file"))
                effect = rng.random()
                self.note(f"{call} {nth} {times} {effect:.2f}")
                if effect < 0.4:
                    device.fail(call, nth, times)
                elif effect < 0.7:
                    device.fail(call, nth, times, "short")
                else:
                    self.hangs.append(device.hang(call, nth, times))
