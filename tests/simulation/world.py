"""The operations of a simulation: each is done on the manager and on the model, and compared at once.

Rule: an operation takes explicit arguments and draws nothing, so that a seeded simulation and a shrinking state machine share it.
It returns its outcome as one word, and counts it.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Sequence

from kv_cache_manager_v2 import KVCache, LogicError, PlannedDropHandle, Tokens
from kv_cache_manager_v2.errors import AlreadyDroppedError, ConfigError, KVCacheError, OutOfPagesError, PageDataLostError
from kv_cache_manager_v2.ids import BeamIndex, CacheLevel, LayerGroupId
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.storage.page import Page
from tests.simulation.calls import Calls
from tests.simulation.conduct import first_written
from tests.simulation.inside import longest_match
from tests.simulation.model import Request, Token, chain_all
from tests.simulation.scene import Live, Scene, words_of
from tests.simulation.setups import Setup

PriorityCallback = Callable[[int, LifeCycle], int]


class World(Scene):
    """All operations. Request by request, then planned drops, the manager itself, mistakes and faults."""

    def __init__(self, setup: Setup, calls: Calls | None = None) -> None:
        super().__init__(setup)
        self.calls = calls or Calls()

    # --- requests

    def create(self, scope: int, prompt: Sequence[Token], priority: int = -1, check: bool = True) -> str:
        """`create_kv_cache`; with `check` the reused length is compared with the definition of a match."""
        callback: PriorityCallback | None = None if priority < 0 else (lambda ordinal, _kind: (priority + 7 * ordinal) % 101)
        limit = max(0, self.library.longest(scope, prompt) - self.setup.config.reuse_match_backoff)
        tokens: Tokens = list(prompt)
        if self.created % 3 == 1 and all(isinstance(token, int) for token in prompt):
            tokens = array("q", [token for token in prompt if isinstance(token, int)])
        if self.created % 4 == 3:
            match = self.manager.find_reuse(self.scopes[scope], tokens)
            cache = self.manager.create_kv_cache(None, None, self.created, callback, reuse_match=match)
            assert match.num_tokens == cache.num_committed_tokens
        else:
            cache = self.manager.create_kv_cache(self.scopes[scope], tokens, self.created, callback)
        found = cache.num_committed_tokens
        assert found <= limit, f"{found} tokens reused, {limit} can be"
        assert (cache.history_length, cache.capacity, cache.status) == (found, found, KVCache.Status.SUSPENDED)
        assert cache.committed_tokens == list(prompt[:found])
        assert sum(cache.cached_tokens_by_level) == found
        model = Request(scope, self.library.roots[scope], self.setup.size, self.setup.kinds)
        model.scratch = self.setup.scratch
        model.start(prompt, found)
        live = Live(self.created, cache, model)
        self.recount.created(live.number, cache, len(prompt))
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
        before = self.fingerprint(live) if check and self.calm() else None
        gate = self.calm() and self.limited(live)
        fits, barely = self.fits_to_resume(live) if before is not None and not self.setup.scratch else (False, True)
        first = live.number not in self.started
        tails = self.recount.tails(live.cache, live.model) if first else []
        failure, done = self.attempt(live, "resume", lambda: live.cache.resume(self.streams[stream]))
        if failure:
            assert live.cache.status == KVCache.Status.SUSPENDED
            return failure
        if not done:
            shortage = live.cache.last_shortage
            assert shortage is not None
            assert before is None or before == self.fingerprint(live), "a resume that returned False changed something"
            assert before is None or shortage.over_limit == gate
            assert not fits or shortage.over_limit, "a resume that fits was refused"
            return self.count("resume", "gate" if shortage.over_limit else "false")
        assert not gate, "resumed beyond max_util_for_resume"
        assert barely, "a resume that cannot fit went through"
        self.resumed(live, first, tails)
        return self.count("resume", "true", *self.positions(live))

    def resumed(self, live: Live, first: bool, tails: list[Page | None]) -> None:
        """Change the model as a resume changed the request."""
        if first:
            self.recount.resumed_first(live.number, live.cache, live.forked, tails, live.model)
        else:
            self.recount.resumed += 1
        self.started.add(live.number)
        live.model.status = "ACTIVE"
        self.rows(live)
        self.check_pages(live)
        self.count("resume", "partial copy" if first and live.model.history % self.setup.size != 0 else "plain")

    def resize(self, live: Live, capacity: int, history: int, check: bool) -> str:
        model = live.model
        before = self.fingerprint(live) if check and self.calm() else None
        if any(len(buffer) * self.setup.size < capacity for buffer in live.buffers.values()):
            return self.mistake(live, "short buffer", lambda: live.cache.resize(capacity, history), ConfigError)
        fits = self.fits_to_grow(live, capacity, history) if before is not None and not self.setup.scratch else None
        failure, done = self.attempt(live, "resize", lambda: self.calls.resize(live.cache, capacity, history))
        if failure:
            lengths = (live.cache.capacity, live.cache.history_length)
            if failure == "device failure" and lengths[1] == history:  # pages were released before the device failed
                self.resized(live, lengths[0], history)
            assert lengths == (model.capacity, model.history)
            return failure
        if not done:
            assert live.cache.last_shortage is not None
            assert before is None or before == self.fingerprint(live), "a resize that returned False changed something"
            assert not fits, "a resize that fits was refused"
            self.rows(live)
            return self.count("resize", "false")
        assert fits is not False, "a resize that cannot fit went through"
        way = "grow" if capacity > model.capacity else "shrink" if capacity < model.capacity else "history"
        self.resized(live, capacity, history)
        if (capacity + history) % 5 == 0:
            self.recount.settle(live.number, live.cache, not self.faulted)
        elif (capacity + history) % 31 == 0:
            self.recount.discard(live.number, live.cache)
            self.count("resize", "statistics discarded")
        self.rows(live)
        if live.cache.has_scratch_slots:
            self.count("resize", "scratch")
        self.count("resize", way)
        return self.count("resize", "true", *self.positions(live))

    def compute(self, live: Live, tokens: Sequence[Sequence[Token]]) -> str:
        """A step of the engine: it reads what is there, and writes the positions up to the capacity, for each beam."""
        model = live.model
        assert live.active
        self.check_pages(live)
        beg = first_written(model)
        for number, (beam, fresh) in enumerate(zip(model.beams, tokens, strict=True)):
            beam.cut(beg)
            value = beam.stamps[-1] if beam.stamps else model.root
            beam.tokens.extend(fresh)
            beam.stamps.extend(chain_all(value, fresh))
            assert len(beam.tokens) == model.capacity
            beam.state = beam.stamps.copy()
            words = words_of(beam.stamps)
            self.engine.step(live.cache, words[beg:], words[:beg], number, checked=())
        return self.count("compute", "done", beg, model.capacity)

    def commit(self, live: Live, beam: int, count: int, is_end: bool) -> str:
        model = live.model
        tokens = model.beams[beam].tokens[model.committed : model.committed + count]
        indices = [beam] * count if model.width > 1 else None
        before = model.committed
        failure, _result = self.attempt(live, "commit", lambda: self.calls.commit(live.cache, tokens, indices, is_end))
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
        config = self.setup.config
        if is_end or (config.commit_min_snapshot and not config.snapshot_at_block_ends):
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

    def batch_step(self, lives: Sequence[Live], grow: Sequence[int], tokens: Sequence[Sequence[Token]]) -> str:
        """A decode step of several requests in two calls: each settles all that it computed, computes, and commits one token."""
        capacities = [live.model.computed + more for live, more in zip(lives, grow, strict=True)]
        histories = [live.model.computed for live in lives]
        faces = [self.face(live) for live in lives]
        done = self.calls.resize_batch([live.cache for live in lives], capacities, histories)
        for number, live in enumerate(lives):
            if number < done:
                self.resized(live, capacities[number], histories[number])
                self.rows(live)
            else:
                assert self.face(live) == faces[number], "a request behind the one that was short of pages has changed"
        ready = lives[:done]
        for number, live in enumerate(ready):
            self.compute(live, [tokens[number][: grow[number]]])
        committing = [live for live in ready if live.model.clean_run(0) > 0]
        values = [live.model.beams[0].tokens[live.model.committed] for live in committing]
        self.calls.commit_batch([live.cache for live in committing], values)
        for live in committing:
            self.library.commit(live.model.commit(0, 1))
            self.rows(live)
            self.count("commit", "batch")
        return self.count("batch", "whole" if done == len(lives) else "part", done)

    def suspend(self, live: Live) -> str:
        failure, _result = self.attempt(live, "suspend", live.cache.suspend)
        if failure:
            return failure
        live.model.status = "SUSPENDED"
        self.recount.suspended += 1
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
        if done and level == 0 and check:
            self.driver.synchronize()
            if live.cache.is_loaded:
                self.count("prefetch", "loaded")
            else:
                assert self.setup.faults, "loaded, at rest, and not there"
        return self.count("prefetch", "true" if done else "false")

    def close(self, live: Live) -> str:
        self.recount.settle(live.number, live.cache, not self.faulted)
        try:
            live.cache.close()
        except PageDataLostError:
            assert self.faulted or self.taken_back, "a request is lost though no transfer failed"
            assert not live.lost, "a loss that a call has told was told again"
            live.lost = True
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
        self.recount.forget(live.number)
        if live.doubt:
            self.closed_in_doubt.append(live)
        self.recent = [*self.recent[-255:], live]  # more than one operation closes

    def fork(self, live: Live, check: bool) -> str:
        before = self.fingerprint(live) if check and self.calm() else None
        try:
            failure, twin = self.attempt(live, "fork", lambda: live.cache.fork(self.created))
        except (OutOfPagesError, LogicError) as error:
            no_room = isinstance(error, OutOfPagesError)
            assert live.model.recurrent if no_room else live.model.reads_scratch(), "a fork was refused"
            assert before is None or before == self.fingerprint(live), "a refused fork changed something"
            return self.count("fork", "no room" if no_room else "within scratch")
        if failure:
            return failure
        assert isinstance(twin, KVCache)
        assert not live.model.reads_scratch(), "a fork would read what was written to scratch"
        model = live.model.fork()
        other = Live(self.created, twin, model)
        other.forked = True
        self.recount.forked(live.number, other.number)
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
        except (OutOfPagesError, ConfigError) as error:
            hierarchy = self.inside.hierarchy
            possible = width <= min(hierarchy.total(0, group) for group in range(hierarchy.num_groups))
            assert way == "widen"
            assert not (possible and type(error) is ConfigError), "a beam width was refused that the GPU could have"  # noqa: PT017
            assert before is None or before == self.fingerprint(live), "widening without room changed something"
            return self.count("beam width", "no room")
        if failure:
            return failure
        if width > model.width:
            old_width = model.width
            model.widen(width)
            self.recount.widened(live.number, model, old_width)
        else:
            self.recount.narrowed(live.number, width)
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
        if failure:
            return failure
        now = self.manager.get_quota(CacheLevel(level))
        if not result:
            assert now == was
            assert before is None or before == self.fingerprint(None), "a resize that was refused changed something"
            return self.count("quota", "refused")
        assert best_efforts or now >= quota
        return self.count("quota", "grown" if now > was else "shrunk" if now < was else "same", now)

    def _adjusted(self) -> bool:
        try:
            self.manager.adjust()
        except OutOfPagesError:
            return False
        return True

    def adjust(self, check: bool) -> str:
        assert not any(live.active for live in self.live)
        before = self.fingerprint(None) if check and self.calm() else None
        self.now += 1.0
        needed = self.manager.need_adjustment
        sizes = self.inside.sizes()
        failure, result = self.attempt(None, "adjust", self._adjusted)
        if failure:
            return failure
        if not result:
            refused = self.manager.last_adjustment
            assert refused is not None
            hanging = self.inside.hierarchy.in_flight.in_flight > 0  # then a level may have to keep its new size
            assert hanging or sizes == self.inside.sizes(), "an adjustment that was refused left another size"
            tried = any(level.ok and level.old_slots != level.new_slots for level in refused.levels)  # and undone: pages had to go
            assert before is None or tried or before == self.fingerprint(None), "an adjustment that was refused changed something"
            return self.count("adjust", "refused")
        changed = before is not None and before != self.fingerprint(None)
        return self.count("adjust", "changed" if changed else "needed" if needed else "nothing to do")

    def clear(self) -> str:
        assert not self.live
        self.attempt(None, "clear", self.manager.clear_reusable_blocks)
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
            assert self.faulted or self.taken_back
            live.lost = True
        except errors:
            pass
        else:
            raise AssertionError(f"the illegal call went through: {name}")
        assert before is None or before == self.fingerprint(live), f"the illegal call changed something: {name}"
        return self.count("illegal call", "refused")

    # --- faults

    def fault(self, call: str, nth: int, times: int, effect: str) -> str:
        assert self.setup.faults
        if effect == "hang":
            self.gates.append(self.driver.hang(call, nth, times))
        else:
            self.driver.fail(call, nth, times, effect)
        self.armed = True
        self.faulted = True
        return self.count("fault", f"{effect} {call}")

    def heal(self) -> str:
        self.driver.heal()
        for gate in self.gates:
            gate.open()
        self.gates = []
        self.armed = False
        return self.count("fault", "healed")

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
            self.counts["check", "statistics of requests"] += self.recount.settled
            self.counts["check", "page moved or dropped"] += self.recount.moves_seen
            self.manager.shutdown()
            self.stream_watch.end()
        self.driver.synchronize()
        self.after()
        for stream in self.streams:
            self.driver.destroy_stream(stream)
        self.driver.close()
