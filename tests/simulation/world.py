"""A manager, its device, its engine and the model, in step: every operation is done on all of them and compared at once.

Rule: an operation takes explicit arguments and draws nothing, so that a seeded simulation and a shrinking state machine share it.
It returns its outcome as one word, and counts it.
"""

from __future__ import annotations

import warnings
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from kv_cache_manager_v2 import EmulatedDriver, KVCache, KVCacheManager, PlannedDropHandle, ReuseScope
from kv_cache_manager_v2.device.schedule import EmulatedGate
from kv_cache_manager_v2.errors import (
    AlreadyDroppedError,
    CuError,
    KVCacheError,
    OutOfMemoryError,
    OutOfPagesError,
    PageDataLostError,
)
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, BeamIndex, CacheLevel, LayerGroupId
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.storage.page import Page
from tests.simulation.engine import WORD, Buffer, Engine
from tests.simulation.inside import Inside, longest_match
from tests.simulation.model import Library, Request, Token, chain_all
from tests.simulation.setups import Setup

PriorityCallback = Callable[[int, LifeCycle], int]


class Live:
    """An open request: the public handle, and what the model knows."""

    def __init__(self, number: int, cache: KVCache, model: Request, losses: int) -> None:
        self.number = number
        self.cache = cache
        self.model = model
        self.losses = losses  # pages that had been lost when it was created
        self.lost = False  # a call has raised PageDataLostError
        self.doubt = ""  # a kernel of it found wrong bytes: then it must turn out to be lost
        self.buffers: dict[tuple[int, int], array[int]] = {}  # page-index buffers attached, by (life cycle, beam)

    @property
    def active(self) -> bool:
        return self.model.status == "ACTIVE"


class World:
    """Everything that is simulated."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0  # the manager's clock, seconds
        self.driver = EmulatedDriver(setup.schedule, setup.seed, setup.timeout_calls)
        self.manager = KVCacheManager(setup.config, driver=self.driver, clock=self._clock)
        self.inside = Inside(self.manager, self.driver)
        self.engine = Engine(self.manager, setup.size)
        self.streams = [self.driver.create_stream() for _stream in range(setup.num_streams)]
        self.library = Library(setup.num_scopes)
        self.scopes = [
            ReuseScope(None if number == 0 else number, 7 if number == 2 else None) for number in range(setup.num_scopes)
        ]
        self.live: list[Live] = []
        self.plans: list[PlannedDropHandle] = []
        self.gates: list[EmulatedGate] = []  # of file transfers that hang
        self.closed_in_doubt: list[Live] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.created = 0
        self.started: set[int] = set()  # requests that have been ACTIVE
        self.recent: list[Live] = []  # closed lately: their kernels may still be queued
        self.armed = False  # faults have been ordered: calls may fail
        self.trace = 0  # checksum of all that happened
        movement = self.manager.movement
        self.quotas = [self.manager.get_quota(CacheLevel(level)) for level in range(len(movement.dropped[0]))]

    def _clock(self) -> float:
        return self.now

    # --- bookkeeping

    def count(self, operation: str, outcome: str, *details: int) -> str:
        self.counts[operation, outcome] += 1
        self.trace = zlib.crc32(f"{operation} {outcome} {details}".encode(), self.trace)
        return outcome

    def losses(self) -> int:
        return sum(self.manager.movement.lost)

    def calm(self) -> bool:
        """Whether nothing can change behind a call's back."""
        shared = self.inside.shared
        waiting = shared.abandoned or shared.discarded_plans or shared.provisions
        return self.inside.hierarchy.transfers_in_flight == 0 and not waiting and not self.armed

    def fingerprint(self, live: Live | None) -> tuple[object, ...]:
        return (self.inside.fingerprint(), self.face(live) if live is not None else None, self.manager.num_open_caches)

    def face(self, live: Live) -> tuple[object, ...]:
        """All that the public face shows of a request."""
        cache = live.cache
        rows: list[tuple[int, ...]] = []
        for number, kind in enumerate(self.setup.kinds):
            for beam in range(cache.beam_width):
                if kind.recurrent:
                    rows.append((cache.get_ssm_block_base_index(LayerGroupId(number), BeamIndex(beam)),))
                else:
                    rows.append(tuple(cache.get_aggregated_page_indices(LayerGroupId(number), BeamIndex(beam))))
        lengths = (cache.capacity, cache.history_length, cache.num_committed_tokens, cache.num_blocks, cache.beam_width)
        return (int(cache.status), lengths, tuple(rows), tuple(cache.committed_tokens))

    def attempt(self, live: Live | None, operation: str, call: Callable[[], object]) -> tuple[str, object]:
        """Do a call that may meet injected faults: ("", result), or the name of the failure."""
        try:
            result = call()
        except PageDataLostError:
            assert live is not None
            assert self.losses() > live.losses, "a request is lost though no page was"
            live.lost = True
            return self.count(operation, "data lost"), None
        except OutOfPagesError:
            raise
        except (CuError, OutOfMemoryError):
            assert self.armed, "a device failure that nobody ordered"
            return self.count(operation, "device failure"), None
        assert live is None or not live.lost or operation == "close", f"{operation} went through though the request is lost"
        return "", result

    def after(self) -> None:
        """Look at what kernels found meanwhile."""
        if self.engine.errors:
            errors, self.engine.errors = self.engine.errors, []
            for request, text in errors:
                assert self.setup.faults, f"wrong bytes: {text}"
                for live in [*self.live, *self.closed_in_doubt]:
                    if live.model is request:
                        live.doubt = text
                        break
                else:
                    self.closed_in_doubt.append(self._ghost(request, text))

    def _ghost(self, request: Request, text: str) -> Live:
        """A request that was closed before its kernels ran."""
        for live in self.recent:
            if live.model is request:
                live.doubt = text
                return live
        raise AssertionError(f"wrong bytes: {text}")

    # --- requests

    def create(self, scope: int, prompt: Sequence[Token], priority: int = -1, check: bool = True) -> str:
        """`create_kv_cache`; with `check` the reused length is compared with the definition of a match."""
        callback: PriorityCallback | None = None if priority < 0 else (lambda ordinal, _kind: (priority + 7 * ordinal) % 101)
        limit = max(0, self.library.longest(scope, prompt) - self.setup.config.reuse_match_backoff)
        tokens: object = list(prompt)
        if self.created % 3 == 1 and all(isinstance(token, int) for token in prompt):
            tokens = array("q", [token for token in prompt if isinstance(token, int)])
        losses = self.losses()
        cache = self.manager.create_kv_cache(self.scopes[scope], tokens, self.created, callback)
        found = cache.num_committed_tokens
        assert found <= limit, f"{found} tokens reused, {limit} can be"
        assert (cache.history_length, cache.capacity, cache.status) == (found, found, KVCache.Status.SUSPENDED)
        assert cache.committed_tokens == list(prompt[:found])
        assert sum(cache.cached_tokens_by_level) == found
        model = Request(scope, self.library.roots[scope], self.setup.size, self.setup.kinds)
        model.scratch = self.setup.scratch
        model.start(prompt, found)
        live = Live(self.created, cache, model, losses)
        self.created += 1
        self.live.append(live)
        if check:
            assert found == self.definition(scope, prompt), "not the longest reusable prefix"
        kind = "miss" if found == 0 else "hit" if found % self.setup.size == 0 else "partial hit"
        return self.count("create", kind, found)

    def definition(self, scope: int, prompt: Sequence[Token]) -> int:
        config = self.setup.config
        blocks = self.inside.blocks()
        data = self.scopes[scope].data
        partial, backoff = config.enable_partial_reuse, config.reuse_match_backoff
        return longest_match(blocks, data, prompt, self.setup.kinds, self.setup.size, partial, backoff)

    def probe(self, scope: int, prompt: Sequence[Token]) -> str:
        found = self.manager.probe_reuse(self.scopes[scope], list(prompt))
        limit = max(0, self.library.longest(scope, prompt) - self.setup.config.reuse_match_backoff)
        assert found <= limit, f"{found} tokens promised, {limit} can be reused"
        return self.count("probe", "hit" if found else "miss", found)

    def resume(self, live: Live, stream: int, check: bool) -> str:
        hierarchy = self.inside.hierarchy
        groups = range(self.inside.shared.layout.num_pool_groups)
        most = self.setup.config.max_util_for_resume
        before = self.fingerprint(live) if check and self.calm() else None
        gate = self.calm() and any(hierarchy.utilization(0, group) > most for group in groups)
        failure, done = self.attempt(live, "resume", lambda: live.cache.resume(self.streams[stream]))
        if failure:
            assert live.cache.status == KVCache.Status.SUSPENDED
            return failure
        if not done:
            shortage = live.cache.last_shortage
            assert shortage is not None
            assert before is None or before == self.fingerprint(live), "a resume that returned False changed something"
            return self.count("resume", "gate" if shortage.gate else "false")
        assert not gate, "resumed beyond max_util_for_resume"
        partial = live.model.history % self.setup.size != 0 and live.number not in self.started
        self.started.add(live.number)
        live.model.status = "ACTIVE"
        self.rows(live)
        self.launch(live, self.engine.check(live.model, live.cache))
        self.count("resume", "partial copy" if partial else "plain")
        return self.count("resume", "true", *self.positions(live))

    def launch(self, live: Live, kernel: Callable[[], None]) -> None:
        self.driver.launch(live.cache.cuda_stream, kernel)

    def resize(self, live: Live, capacity: int, history: int, check: bool) -> str:
        model = live.model
        before = self.fingerprint(live) if check and self.calm() else None
        use_none = history == model.history
        failure, done = self.attempt(live, "resize", lambda: live.cache.resize(capacity, None if use_none else history))
        if failure:
            lengths = (live.cache.capacity, live.cache.history_length)
            if failure == "device failure" and lengths[1] == history:  # pages were let go before the device failed
                model.resized(lengths[0], history, self.setup.max_rewind)
            assert lengths == (model.capacity, model.history)
            return failure
        if not done:
            assert live.cache.last_shortage is not None
            assert before is None or before == self.fingerprint(live), "a resize that returned False changed something"
            self.rows(live)
            return self.count("resize", "false")
        way = "grow" if capacity > model.capacity else "shrink" if capacity < model.capacity else "history"
        model.resized(capacity, history, self.setup.max_rewind)
        self.rows(live)
        if live.cache.has_scratch_slots:
            self.count("resize", "scratch")
        self.count("resize", way)
        return self.count("resize", "true", *self.positions(live))

    def compute(self, live: Live, tokens: Sequence[Sequence[Token]]) -> str:
        """A step of the engine: it reads what is there, and writes the positions up to the capacity, for each beam."""
        model = live.model
        assert live.active
        self.launch(live, self.engine.check(model, live.cache))
        beg = model.computed if model.recurrent else max(model.history, model.committed)
        for beam, fresh in zip(model.beams, tokens, strict=True):
            beam.cut(beg)
            value = beam.stamps[-1] if beam.stamps else model.root
            beam.tokens.extend(fresh)
            beam.stamps.extend(chain_all(value, fresh))
            assert len(beam.tokens) == model.capacity
            if model.recurrent:
                beam.state = beam.stamps[-1] if beam.stamps else None
        self.launch(live, self.engine.step(model, live.cache, beg))
        return self.count("compute", "done", beg, model.capacity)

    def commit(self, live: Live, beam: int, count: int, is_end: bool) -> str:
        model = live.model
        tokens = model.beams[beam].tokens[model.committed : model.committed + count]
        indices = [beam] * count if model.width > 1 else None
        before = model.committed
        failure, _result = self.attempt(live, "commit", lambda: live.cache.commit(tokens, indices, is_end))
        if failure == "data lost":
            return failure
        if failure and live.cache.num_committed_tokens == before:
            assert live.cache.history_length == model.history
            return failure
        values = model.commit(beam, count)
        self.library.commit(values)
        if is_end:
            model.committing = False
            model.ended = True
        if self.setup.config.commit_min_snapshot or is_end:
            model.settle_tail()
        self.rows(live)
        kind = "end" if is_end else "long" if count > self.setup.size else "one" if count == 1 else "short"
        self.count("commit", "beam" if model.width > 1 else kind)
        return self.count("commit", "done", *self.positions(live))

    def stop(self, live: Live) -> str:
        model = live.model
        again = not model.committing
        failure, _result = self.attempt(live, "stop_committing", live.cache.stop_committing)
        if failure:
            return failure
        model.committing = False
        model.settle_tail()
        self.rows(live)
        return self.count("stop_committing", "again" if again else "done")

    def suspend(self, live: Live) -> str:
        failure, _result = self.attempt(live, "suspend", live.cache.suspend)
        if failure:
            return failure
        live.model.status = "SUSPENDED"
        live.buffers.clear()
        self.rows(live)
        return self.count("suspend", "done")

    def prefetch(self, live: Live, level: int, check: bool) -> str:
        before = self.fingerprint(live) if check and self.calm() else None
        failure, done = self.attempt(live, "prefetch", lambda: live.cache.prefetch(CacheLevel(level)))
        if failure:
            return failure
        if not done:
            assert before is None or before == self.fingerprint(live), "a prefetch that returned False changed something"
        return self.count("prefetch", "true" if done else "false")

    def close(self, live: Live) -> str:
        live.cache.close()
        self._closed(live)
        assert live.cache.status == KVCache.Status.CLOSED
        assert live.cache.num_blocks == 0
        live.cache.close()
        return self.count("close", "lost" if live.lost else "active" if live.active else "suspended")

    def drop_handle(self, live: Live) -> str:
        """The user forgets the cache without closing it."""
        self._closed(live)
        del live.cache
        return self.count("drop handle", "done")

    def _closed(self, live: Live) -> None:
        self.live.remove(live)
        if live.doubt:
            self.closed_in_doubt.append(live)
        self.recent = [*self.recent[-63:], live]

    def fork(self, live: Live, check: bool) -> str:
        before = self.fingerprint(live) if check and self.calm() else None
        try:
            failure, twin = self.attempt(live, "fork", lambda: live.cache.fork(self.created))
        except OutOfPagesError:
            assert live.model.recurrent, "only a recurrent state needs room"
            assert before is None or before == self.fingerprint(live), "a fork without room changed something"
            return self.count("fork", "no room")
        if failure:
            return failure
        assert isinstance(twin, KVCache)
        model = live.model.fork()
        other = Live(self.created, twin, model, live.losses)
        other.doubt = live.doubt
        self.created += 1
        self.live.append(other)
        assert twin.committed_tokens == model.beams[0].tokens[: model.committed]
        assert (twin.history_length, twin.capacity) == (model.history, model.history)
        return self.count("fork", live.model.status.lower())

    def set_width(self, live: Live, width: int, check: bool) -> str:
        model = live.model
        before = self.fingerprint(live) if check and self.calm() else None
        way = "widen" if width > model.width else "narrow"
        try:
            failure, _result = self.attempt(live, "beam width", lambda: setattr(live.cache, "beam_width", width))
        except OutOfPagesError:
            assert way == "widen"
            assert before is None or before == self.fingerprint(live), "widening without room changed something"
            return self.count("beam width", "no room")
        if failure:
            return failure
        if width > model.width:
            model.widen(width)
        else:
            model.narrow(width)
        live.buffers = {key: value for key, value in live.buffers.items() if key[1] < width}
        self.rows(live)
        return self.count("beam width", way)

    def change_stream(self, live: Live, stream: int) -> str:
        live.cache.cuda_stream = self.streams[stream]
        return self.count("stream", live.model.status.lower())

    def attach(self, live: Live, group: int, beam: int) -> str:
        """Give the cache a page-index buffer of ours, or take it back."""
        key = (group, beam)
        if key in live.buffers:
            live.cache.set_base_page_index_buf(BeamIndex(beam), LayerGroupId(group), None)
            del live.buffers[key]
            return self.count("index buffer", "detach")
        buffer = array("i", [-7]) * (live.model.blocks + 40)
        live.cache.set_base_page_index_buf(BeamIndex(beam), LayerGroupId(group), buffer)
        live.buffers[key] = buffer
        return self.count("index buffer", "attach")

    # --- planned drops

    def plan(self, live: Live) -> str:
        failure, handle = self.attempt(live, "plan drop", live.cache.plan_committed_block_drop)
        if failure:
            return failure
        if handle is None:
            return self.count("plan drop", "none")
        assert isinstance(handle, PlannedDropHandle)
        self.plans.append(handle)
        return self.count("plan drop", "planned")

    def drop_plan(self, number: int, forget: bool) -> str:
        handle = self.plans.pop(number)
        if forget:
            return self.count("planned drop", "discarded")
        before = self.manager.movement
        dropped = sum(map(sum, before.dropped))
        handle.drop()
        try:
            handle.drop()
        except AlreadyDroppedError:
            pass
        else:
            raise AssertionError("a plan was dropped twice")
        return self.count("planned drop", "pages" if sum(map(sum, before.dropped)) > dropped else "nothing")

    # --- the manager

    def quota(self, level: int, quota: int, best_efforts: bool, check: bool) -> str:
        assert not any(live.active for live in self.live)
        before = self.fingerprint(None) if check and self.calm() else None
        was = self.manager.get_quota(CacheLevel(level))
        failure, result = self.attempt(None, "quota", lambda: self.manager.resize(CacheLevel(level), quota, best_efforts))
        if level == 0:
            self.engine.remap()
        if failure:
            return failure
        now = self.manager.get_quota(CacheLevel(level))
        if not result:
            assert now == was
            assert before is None or before == self.fingerprint(None), "a resize that was refused changed something"
            return self.count("quota", "refused")
        assert best_efforts or now >= quota
        return self.count("quota", "grown" if now > was else "shrunk" if now < was else "same", now)

    def adjust(self, check: bool) -> str:
        assert not any(live.active for live in self.live)
        before = self.fingerprint(None) if check and self.calm() else None
        self.now += 1.0
        needed = self.manager.need_adjustment
        failure, result = self.attempt(None, "adjust", self.manager.adjust)
        self.engine.remap()
        if failure:
            return failure
        if not result:
            assert before is None or before == self.fingerprint(None), "an adjustment that was refused changed something"
            return self.count("adjust", "refused")
        changed = before is not None and before != self.fingerprint(None)
        return self.count("adjust", "changed" if changed else "needed" if needed else "nothing to do")

    def clear(self) -> str:
        assert not self.live
        self.manager.clear_reusable_blocks()
        assert self.inside.tree.num_blocks == 0
        self.library.clear()
        return self.count("clear", "done")

    # --- mistakes

    def mistake(self, live: Live | None, name: str, call: Callable[[], object], *errors: type[KVCacheError]) -> str:
        """An illegal call: it raises one of our errors and changes nothing."""
        before = self.fingerprint(live) if self.calm() else None
        try:
            call()
        except PageDataLostError:
            assert live is not None
            assert self.losses() > live.losses
            live.lost = True
        except errors:
            pass
        else:
            raise AssertionError(f"the illegal call went through: {name}")
        assert before is None or before == self.fingerprint(live), f"the illegal call changed something: {name}"
        return self.count("illegal call", "refused")

    # --- faults

    def fault(self, call: str, nth: int, effect: str) -> str:
        assert self.setup.faults
        if effect == "hang":
            self.gates.append(self.driver.hang(call, nth))
        else:
            self.driver.fail(call, nth, 1, effect)
        self.armed = True
        return self.count("fault", f"{effect} {call}")

    def heal(self) -> str:
        self.driver.heal()
        for gate in self.gates:
            gate.open()
        self.gates = []
        self.armed = False
        return self.count("fault", "healed")

    # --- checks

    def positions(self, live: Live) -> tuple[int, ...]:
        """For the trace: lengths and page indices."""
        cache = live.cache
        values = [live.number, cache.capacity, cache.history_length, cache.num_committed_tokens]
        for number, kind in enumerate(self.setup.kinds):
            if not kind.recurrent:
                values.extend(cache.get_aggregated_page_indices(LayerGroupId(number)))
        return tuple(values)

    def rows(self, live: Live) -> None:
        """Lengths and page indices are what the model says."""
        cache, model = live.cache, live.model
        assert (cache.capacity, cache.history_length) == (model.capacity, model.history)
        assert (cache.num_committed_tokens, cache.num_blocks, cache.beam_width) == (model.committed, model.blocks, model.width)
        for number, kind in enumerate(model.kinds):
            seen: set[int] = set()
            for beam in range(model.width):
                if kind.recurrent:
                    slot = cache.get_ssm_block_base_index(LayerGroupId(number), BeamIndex(beam))
                    assert (slot != BAD_PAGE_INDEX) == live.active
                    continue
                row = list(cache.get_aggregated_page_indices(LayerGroupId(number), BeamIndex(beam)))
                assert len(row) == model.blocks
                shared = model.beams[beam].shared
                for block, slot in enumerate(row):
                    expected = live.active and block >= shared and model.has_page(number, block)
                    assert (slot != BAD_PAGE_INDEX) == expected, f"life cycle {number}, beam {beam}, block {block}: {row}"
                    assert slot == BAD_PAGE_INDEX or slot not in seen, f"a slot twice in {row}"
                    seen.add(slot)
                buffer = live.buffers.get((number, beam))
                if buffer is not None:
                    assert buffer.tolist() == row + [BAD_PAGE_INDEX] * (len(buffer) - len(row))

    def check(self) -> None:
        """Every structure, without disturbing anything."""
        self.manager.check_invariants()
        self.after()

    def check_bytes(self) -> None:
        """Let the device come to rest: then every page in the tree holds what its tokens say, on whatever tier it lies, and who
        computed on wrong bytes is lost."""
        self.driver.synchronize()
        self.inside.hierarchy.settle()
        self.after()
        self._settle_doubts()
        scopes = {scope.data: self.library.roots[number] for number, scope in enumerate(self.scopes)}
        memo: dict[tuple[bytes, tuple[Token, ...]], list[int]] = {}
        for data, path, block in self.inside.blocks():
            values = self._values(memo, data, scopes[data], path)
            if block.unsettled:
                continue
            assert values[-1] in self.library.committed, "a block that nobody committed"
            for number, page in enumerate(block.pages):
                if page is None or page.transfers > 0:
                    continue
                beg = len(path) - block.num_tokens
                for buffer in self.engine.buffers:
                    if buffer.group == number:
                        self._check_page(number, page, buffer, values, beg)
        self.counts["check", "tree"] += 1

    def _values(
        self, memo: dict[tuple[bytes, tuple[Token, ...]], list[int]], data: bytes, root: int, path: tuple[Token, ...]
    ) -> list[int]:
        beg = (len(path) - 1) // self.setup.size * self.setup.size
        before = memo.get((data, path[:beg]), [])
        values = before + chain_all(before[-1] if before else root, path[beg:])
        memo[data, path] = values
        return values

    def _check_page(self, number: int, page: Page, buffer: Buffer, values: list[int], beg: int) -> None:
        size = self.setup.size
        pool = buffer.pool
        offset = buffer.offset * WORD
        words = array("q", self.inside.page_bytes(page, pool, offset, buffer.words * WORD))
        if self.setup.kinds[number].recurrent:
            found = [words[0], words[-1]]
            expected = [values[beg + page.coverage - 1] ^ buffer.salt] * 2
        else:
            step = buffer.step(size)
            found = words[: (page.coverage - 1) * step + 1 : step].tolist()
            expected = [value ^ buffer.salt for value in values[beg : beg + page.coverage]]
        assert found == expected, (
            f"a page of life cycle {number} on level {page.level}, good for {page.coverage} tokens from {beg} on, "
            f"holds {found} instead of {expected}"
        )

    def _settle_doubts(self) -> None:
        for live in self.live:
            if not live.doubt or live.lost:
                continue
            try:
                if live.active:
                    live.cache.resize(None)
                else:
                    live.cache.prefetch(CacheLevel(len(self.quotas) - 1))
            except PageDataLostError:
                live.lost = True
                self.count("doubt", "lost")
            assert live.lost, f"wrong bytes, and no page was lost: {live.doubt}"
        for live in self.closed_in_doubt:
            assert self.losses() > live.losses, f"wrong bytes, and no page was lost: {live.doubt}"
        self.closed_in_doubt = []

    def finish(self) -> None:
        """Close everything; nothing is left behind."""
        self.heal()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for live in list(self.live):
                self.close(live)
            self.plans.clear()
            self.check_bytes()
            self.check()
            self.manager.shutdown()
        self.driver.synchronize()
        self.after()
        for stream in self.streams:
            self.driver.destroy_stream(stream)
        self.driver.close()
