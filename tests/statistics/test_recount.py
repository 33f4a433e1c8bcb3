"""Random histories of whole managers: every statistic equals a recount kept beside them, call by call."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2 import GPU_LEVEL, KVCache, OutOfPagesError, introspection
from tests.support.models import Kind, small
from tests.support.recount import Counted, Recount
from tests.support.recount import Kind as Rule
from tests.support.rig import HOST, Rig, toks

SIZE = 4
WEIGHTS = {
    "create": 3,
    "resume": 4,
    "grow": 7,
    "shrink": 6,
    "commit": 3,
    "suspend": 1,
    "settle": 2,
    "discard": 1,
    "close": 2,
    "widen": 1,
    "narrow": 1,
    "fork": 1,
    "prefetch": 1,
    "clear": 1,
    "read": 1,
}
OPERATIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
Step = tuple[str, int, int]
steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 7), st.integers(0, 63)), max_size=120)
MODELS: dict[str, tuple[tuple[Kind, ...], list[Rule]]] = {
    "full": (("full",), [Rule(None, 0)]),
    "full and window": (("full", (8, 0)), [Rule(None, 0), Rule(8, 0)]),
    "window with sinks": (((6, 4),), [Rule(6, 1)]),
    "three": (("full", (5, 0), (12, 8)), [Rule(None, 0), Rule(5, 0), Rule(12, 2)]),
}


class History:
    """Carries out drawn operations on a manager and on its recount."""

    def __init__(self, rig: Rig, rules: list[Rule]) -> None:
        self.rig = rig
        self.books = Recount(rig.manager, rules)
        self.open: list[Counted] = []
        self.done: dict[str, int] = {}
        self.ids = 0

    def run(self, step: Step) -> None:
        name, pick, amount = step
        counted = self.open[pick % len(self.open)] if self.open else None
        if name in ("create", "clear", "read"):
            self.books.before(self.caches())
            happened = getattr(self, name)(amount)
        elif counted is None:
            return
        else:
            self.books.before(self.caches())
            happened = getattr(self, name)(counted, amount)
        self.books.after(name in ("resume", "grow", "widen", "prefetch", "clear"))
        self.books.update_peaks()
        self.books.check_movement()
        self.books.check_committed()
        dirty = {counted.cache.id for counted in self.open if not counted.pending.empty()}
        assert self.rig.manager.get_dirty_stats_kv_cache_ids() == dirty, name
        if happened:
            self.done[name] = self.done.get(name, 0) + 1

    def caches(self) -> list[KVCache]:
        return [counted.cache for counted in self.open]

    # --- of the manager

    def create(self, amount: int) -> bool:
        if len(self.open) == 5:
            return False
        family, length = divmod(amount, 16)
        tokens = [*toks(0, SIZE * (family % 2)), *toks(100 * family, 100 * family + length + 1)]
        expected = None if amount % 5 == 0 else len(tokens)
        self.ids += 1
        cache = self.rig.manager.create_kv_cache(None, tokens if expected else None, self.ids)
        self.rig.own(cache)
        self.open.append(self.books.created(cache, expected))
        return True

    def clear(self, _amount: int) -> bool:
        if self.open:
            return False
        self.rig.manager.clear_reusable_blocks()
        return True

    def read(self, _amount: int) -> bool:
        self.books.check_readings()
        return True

    # --- of a request

    def resume(self, counted: Counted, _amount: int) -> bool:
        cache = counted.cache
        if cache.is_active:
            return False
        linked: list[bool | None] = [None] * len(self.books.kinds)
        if not counted.started and cache.history_length % SIZE:
            for index in range(len(linked)):
                page = introspection.request_pages(cache, index)[-1]
                linked[index] = None if page is None else page.owner is not None
        before = [page for index in range(len(linked)) for page in introspection.request_pages(cache, index)[-1:]]
        if not cache.resume(self.rig.stream):
            return False
        after = [page for index in range(len(linked)) for page in introspection.request_pages(cache, index)[-1:]]
        if counted.started:
            self.books.resumed += 1
        elif all(old is new for old, new in zip(before, after, strict=True)):
            counted.started = True  # nothing to copy, or the last block was taken out of the tree for want of room
        else:
            self.books.resumed_first(counted, linked)
        return True

    def grow(self, counted: Counted, amount: int) -> bool:
        cache = counted.cache
        if not cache.is_active:
            return False
        blocks, history = cache.num_blocks, cache.history_length
        advance = min(cache.capacity - history, amount % 7) if amount % 3 == 0 else 0
        if not cache.resize(cache.capacity + amount % 23, history + advance):
            assert cache.num_blocks == blocks
            return False
        self.books.grew(counted, blocks, history)
        return True

    def shrink(self, counted: Counted, amount: int) -> bool:
        cache = counted.cache
        if not cache.is_active:
            return False
        blocks, history = cache.num_blocks, cache.history_length
        assert cache.resize(max(history, cache.capacity - amount % 23))
        self.books.grew(counted, blocks, history)
        return True

    def commit(self, counted: Counted, amount: int) -> bool:
        cache = counted.cache
        room = cache.capacity - cache.num_committed_tokens
        count = min(room, 1 + amount % 9)
        if not cache.is_active or count == 0 or not introspection.is_commit_allowed(cache):
            return False
        beg = 100 * (amount % 4) + cache.num_committed_tokens
        cache.commit(toks(beg, beg + count))
        return True

    def suspend(self, counted: Counted, _amount: int) -> bool:
        if not counted.cache.is_active:
            return False
        counted.cache.suspend()
        self.books.suspended += 1
        return True

    def settle(self, counted: Counted, _amount: int) -> bool:
        assert counted.cache.commit_pending_stats() == self.books.commit(counted)
        return True

    def discard(self, counted: Counted, _amount: int) -> bool:
        counted.cache.discard_pending_stats()
        counted.pending = type(counted.pending)()
        return True

    def close(self, counted: Counted, _amount: int) -> bool:
        counted.cache.close()
        self.open.remove(counted)
        return True

    def widen(self, counted: Counted, amount: int) -> bool:
        cache = counted.cache
        width = cache.beam_width
        if not cache.is_active or width == 3 or cache.num_committed_tokens < cache.history_length:
            return False
        try:
            cache.beam_width = width + 1 + amount % (3 - width)
        except OutOfPagesError:
            return False
        self.books.widened(counted, width)
        return True

    def narrow(self, counted: Counted, _amount: int) -> bool:
        cache = counted.cache
        if not cache.is_active or cache.beam_width == 1:
            return False
        cache.beam_width = 1
        self.books.narrowed(counted)
        return True

    def fork(self, counted: Counted, _amount: int) -> bool:
        if len(self.open) == 5 or counted.cache.beam_width > 1:
            return False
        self.ids += 1
        twin = Counted(counted.cache.fork(self.ids), counted.expected)
        self.rig.own(twin.cache)
        twin.forked = True
        twin.pending.tokens = [0] * self.books.levels
        self.open.append(twin)
        return True

    def prefetch(self, counted: Counted, amount: int) -> bool:
        if counted.cache.is_active:
            return False
        return counted.cache.prefetch(GPU_LEVEL if amount % 2 else HOST)


@pytest.mark.parametrize("name", MODELS)
@given(drawn=steps)
def test_every_statistic_equals_a_recount(name: str, drawn: list[Step]) -> None:
    """Two tiers of few slots: pending counts, sums, readings, movement, drops, peaks and dirty ids, after every call."""
    kinds, rules = MODELS[name]
    with Rig(small(12, kinds=kinds, host_slots=8), engine=False) as rig:
        history = History(rig, rules)
        for step in drawn:
            history.run(step)
        for counted in history.open:
            assert counted.cache.commit_pending_stats() == history.books.commit(counted)
        history.books.check_readings()
        history.books.check_committed()


@pytest.mark.parametrize("name", MODELS)
def test_the_histories_reach_every_operation(name: str) -> None:
    """The same operations from a seeded generator: each of them happens, and pages are offloaded, onboarded, dropped and copied."""
    generator = random.Random(7)
    kinds, rules = MODELS[name]
    with Rig(small(12, kinds=kinds, host_slots=8), engine=False) as rig:
        history = History(rig, rules)
        for number in range(3000):
            history.run((generator.choice(OPERATIONS), generator.randrange(8), generator.randrange(64)))
            if number % 200 == 199:
                for counted in list(history.open):
                    history.run(("close", history.open.index(counted), 0))
        assert min(history.done.get(name, 0) for name in WEIGHTS) >= 5, history.done
        movement = rig.manager.movement
        assert (
            min(movement.pages_moved(0, 1), movement.pages_moved(1, 0), movement.pages_moved(0, 0), movement.pages_dropped(1)) >= 10
        )
