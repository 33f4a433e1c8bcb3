"""A step as one object: the calls that it equals, the caches that take part, and its end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kv_cache_manager_v2 import (
    ConfigError,
    KVCache,
    KVCacheEventManager,
    LogicError,
    MakeRoom,
    PlainBatchTables,
    Shortage,
    SuspendCheapest,
    SuspendYoungest,
    commit_ahead_batch,
    commit_batch,
    resize_batch,
    slots_to_read,
)
from tests.support.engine import Token
from tests.support.models import hybrid, small
from tests.support.rig import Rig, toks


class ClosesLast(MakeRoom):
    """A policy of an engine that computes again: closes the last cache of the step."""

    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool:
        if not candidates:
            return False
        candidates[-1].close()
        return True


class Twin:
    """One of two equal scenes: its steps are made of `step()` or of single calls."""

    def __init__(self, rig: Rig, events: KVCacheEventManager, policy: MakeRoom | None) -> None:
        self.rig = rig
        self.events = events
        self.policy = policy
        self.caches: list[KVCache] = []

    def step(self, chosen: list[int], counts: list[int], accepted: list[int], commits: str) -> tuple[list[int], list[int]]:
        """Run the step by `step()`. Returns the positions of the caches in `short` and in `suspended`."""
        caches = [self.caches[number] for number in chosen]
        tokens = [tokens_of(cache, number) for cache, number in zip(caches, accepted, strict=True)]
        given = tokens if commits == "after" and len(chosen) % 2 else None
        with self.rig.manager.step(caches, counts, given, self.policy) as step:
            if commits == "ahead":
                step.commit_ahead([tokens[position] for position in step.positions])
            elif commits == "after" and given is None:
                step.commit([tokens[position] for position in step.positions])
            elif commits == "no":
                step.advance([accepted[position] for position in step.positions])
            assert step.caches == [caches[position] for position in step.positions]
        return [caches.index(cache) for cache in step.short], [caches.index(cache) for cache in step.suspended]

    def single(self, chosen: list[int], counts: list[int], accepted: list[int], commits: str) -> tuple[list[int], list[int]]:
        """Run the same step as its documentation describes it: by calls for each cache."""
        caches = [self.caches[number] for number in chosen]
        tokens = [tokens_of(cache, number) for cache, number in zip(caches, accepted, strict=True)]
        short: list[int] = []
        suspended: list[int] = []
        for position, cache in enumerate(caches):
            last: Shortage | None = None
            while position not in suspended and not cache.resize(cache.history_length + counts[position]):
                shortage = cache.last_shortage
                assert shortage is not None
                active = [each for each in caches if each.is_active]
                helped = (
                    self.policy is not None
                    and not shortage.permanent
                    and (last is None or last.pool_group != shortage.pool_group or shortage.missing < last.missing)
                    and self.policy.make_room(cache, shortage, [each for each in active if each is not cache])
                )
                suspended += [caches.index(each) for each in active if not each.is_active]
                if not helped:
                    short.append(position)
                    break
                last = shortage
        fit = [position for position in range(len(caches)) if position not in short and position not in suspended]
        for position in fit if commits == "ahead" else []:
            caches[position].commit_ahead(tokens[position])
        for position in fit:
            cache = caches[position]
            if commits == "after":
                cache.commit(tokens[position])
            elif commits == "ahead":
                cache.resize(None, max(cache.history_length, cache.num_committed_tokens))
            else:
                cache.resize(None, cache.history_length + accepted[position])
        return short, suspended

    def seen(self) -> list[object]:
        """Lengths, pages, statistics and events."""
        manager = self.rig.manager
        manager.check_invariants()
        found: list[object] = []
        for cache in self.caches:
            found += [cache.status, cache.committed_tokens, cache.history_length, cache.capacity, repr(cache.last_shortage)]
            for group, life_cycle in enumerate(manager.shared.life_cycles):
                if life_cycle.is_attention:
                    found.append(list(cache.get_base_page_indices(group)))
                    found.append(cache.get_base_page_indices_version(group))
        found += [manager.get_storage_statistics(level) for level in range(len(manager.cache_tier_list))]
        found += [manager.get_committed_stats(), repr(manager.get_and_reset_iteration_stats()), repr(manager.movement)]
        found += [manager.get_and_reset_iteration_suspend_resume_stats(), manager.tuner.num_samples]
        self.events.flush_iteration_events()
        found.append(repr(self.events.get_latest_events(0)))
        return found


def tokens_of(cache: KVCache, count: int) -> list[Token]:
    """The next tokens of a cache: a few caches have the same ones."""
    first = cache.num_committed_tokens
    number = cache.id
    assert isinstance(number, int)
    return [1000 * (number % 3) + position for position in range(first, first + count)]


MODELS: dict[str, Callable[[], Any]] = {
    "full": lambda: small(16, host_slots=16),
    "window": lambda: small(32, kinds=("full", (6, 0)), host_slots=8),
    "recurrent": lambda: hybrid(8, 24, host_slots=8),
    "GPU only": lambda: small(16),
}
POLICIES: dict[str, Callable[[], MakeRoom | None]] = {
    "none": lambda: None,
    "youngest": SuspendYoungest,
    "cheapest": SuspendCheapest,
    "own": ClosesLast,
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_equals_the_same_step_made_of_single_calls(kind: str, policy: str, seed: int) -> None:
    """In lengths, pages, statistics and events, under pressure, with every policy."""
    rng = random.Random(seed)
    streams = KVCacheEventManager(4000), KVCacheEventManager(4000)
    with Rig(MODELS[kind](), engine=False, events=streams[0]) as one, Rig(MODELS[kind](), engine=False, events=streams[1]) as two:
        twins = [Twin(one, streams[0], POLICIES[policy]()), Twin(two, streams[1], POLICIES[policy]())]
        refused = 0
        for _step in range(80):
            act = rng.randrange(8)
            number = rng.randrange(max(1, len(twins[0].caches)))
            for twin in twins:
                if act == 0 and len(twin.caches) < 12:
                    twin.caches.append(twin.rig.create(toks(0, 3 * number)))
                elif act == 1 and twin.caches and twin.caches[number].is_active:
                    twin.caches[number].suspend()
                elif act == 2 and len(twin.caches) > 3:
                    twin.caches.pop(number).close()
                for cache in list(twin.caches):
                    if cache.status.name == "SUSPENDED":
                        cache.resume(twin.rig.stream)
                    elif cache.status.name == "CLOSED":
                        twin.caches.remove(cache)
            chosen = [position for position, cache in enumerate(twins[0].caches) if cache.is_active and rng.random() < 0.8]
            rng.shuffle(chosen)
            counts = [rng.choice([0, 1, 1, 1, 2, 15]) for _cache in chosen]
            accepted = [rng.randrange(count + 1) for count in counts]
            commits = rng.choice(["after", "after", "ahead", "after" if kind == "recurrent" else "no"])
            results = [twins[0].step(chosen, counts, accepted, commits), twins[1].single(chosen, counts, accepted, commits)]
            assert results[0] == results[1]
            refused += len(results[0][0]) + len(results[0][1])
            assert twins[0].seen() == twins[1].seen()
        assert refused > 0, "no step was short of pages"


def active(rig: Rig, lengths: Sequence[int], committed: bool = True) -> list[KVCache]:
    """ACTIVE caches with so many tokens each."""
    caches = []
    for number, length in enumerate(lengths):
        cache = rig.open()
        assert cache.resize(length)
        if committed:
            cache.commit(toks(1000 * number, 1000 * number + length))
        caches.append(cache)
    return caches


def test_a_decode_step() -> None:
    """One token for each request; slots and rows in the order of the caches."""
    with Rig(small(32), engine=False) as rig:
        caches = active(rig, [4, 7, 1])
        tables = PlainBatchTables(rig.manager, 4, 8)
        for cache in reversed(caches):
            tables.add(cache)
        with rig.manager.step(caches, 1, [50, 51, 52]) as step:
            assert (step.caches, step.positions, step.short, step.suspended) == (caches, [0, 1, 2], [], [])
            assert [cache.capacity for cache in caches] == [5, 8, 2]
            pages = [list(cache.get_base_page_indices(0)) for cache in caches]
            assert step.slots_to_write(0).slots.tolist() == [4 * pages[0][1], 4 * pages[1][1] + 3, 4 * pages[2][0] + 1]
            assert step.slots_to_read(0) == slots_to_read(caches, 0)
            out = np.zeros(3, np.int64)
            assert step.rows(tables, out=out).tolist() == [2, 1, 0]
        assert [cache.num_committed_tokens for cache in caches] == [5, 8, 2]
        assert caches[2].committed_tokens == [2000, 52]


def test_an_exception_in_the_block_publishes_nothing() -> None:
    """Lengths stay as the step began; the next step sets them anew."""
    with Rig(small(32), engine=False) as rig:
        caches = active(rig, [4, 4])
        tokens = [toks(0, 5), toks(5, 10)]

        def fail() -> None:
            with rig.manager.step(caches, 5, tokens) as step:
                step.commit(tokens)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert [cache.num_committed_tokens for cache in caches] == [4, 4]
        assert [cache.capacity for cache in caches] == [9, 9]
        with rig.manager.step(caches, [1, 2]):
            assert [cache.capacity for cache in caches] == [5, 6]
        assert [cache.history_length for cache in caches] == [4, 4], "nothing said that the tokens were computed"


def test_tokens_committed_ahead_are_computed_by_the_end() -> None:
    """Inside the block other caches of the step can match them; after an exception none can."""
    with Rig(small(32), engine=False) as rig:
        caches = active(rig, [4, 4])
        with rig.manager.step(caches, [5, 1]) as step:
            step.commit_ahead([toks(50, 55), 60])
            assert [cache.num_committed_tokens for cache in caches] == [9, 5]
            assert [cache.history_length for cache in caches] == [4, 4]
            follower = rig.open([*toks(0, 4), *toks(50, 54), 1])
            assert follower.num_committed_tokens == 8
        assert [cache.history_length for cache in caches] == [9, 5]
        with rig.manager.step(caches, 2) as step:
            step.commit_ahead([70, 71])
            step.commit([72, 73])
        assert [cache.committed_tokens[-2:] for cache in caches] == [[70, 72], [71, 73]]
        for error, at_the_end in ((ZeroDivisionError, False), (ConfigError, True)):
            with pytest.raises(error):
                fail_after_a_commit_ahead(rig, caches, at_the_end)
            assert [cache.num_committed_tokens for cache in caches] == [11, 7]
            assert [cache.history_length for cache in caches] == [11, 7]
            assert rig.probe([*caches[0].committed_tokens, 80]) == 8


def fail_after_a_commit_ahead(rig: Rig, caches: list[KVCache], at_the_end: bool) -> None:
    """A step that fails after it has committed ahead, in the block or when the block ends."""
    with rig.manager.step(caches, 1) as step:
        step.commit_ahead([80, 81])
        assert rig.probe([*caches[0].committed_tokens]) == 12
        if not at_the_end:
            raise ZeroDivisionError
        step.commit([-1, 82])


def test_a_cache_given_twice_is_refused() -> None:
    """By every call for a batch, before anything changes: it would have two lengths in one step."""
    with Rig(small(16), engine=False) as rig:
        first, second = active(rig, [4, 4])
        twice = [first, second, first]
        calls: list[Callable[[], object]] = [
            lambda: rig.manager.step(twice, 1),
            lambda: resize_batch(twice, [8, 8, 8]),
            lambda: commit_batch(twice, [1, 2, 3]),
            lambda: commit_ahead_batch(twice, [1, 2, 3]),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=r"caches\[2\] is caches\[0\] again"):
                call()
        assert [cache.capacity for cache in (first, second)] == [4, 4]
        assert resize_batch([first, second], [8, 8]) == 2
        assert slots_to_read([first, first], 0).total == 16


def test_histories_advance_without_a_commit() -> None:
    """For requests that are not to be reused; all new tokens, or so many of each."""
    with Rig(small(32), engine=False) as rig:
        caches = active(rig, [4, 4], committed=False)
        for cache in caches:
            cache.stop_committing()
        with rig.manager.step(caches, 4) as step:
            step.advance()
        assert [cache.history_length for cache in caches] == [4, 4]
        with rig.manager.step(caches, 4) as step:
            step.commit([[1], [2]])
            step.advance([1, 0])
        assert [cache.history_length for cache in caches] == [5, 4]
        assert [cache.num_committed_tokens for cache in caches] == [0, 0]


def test_caches_without_pages_are_left_out_and_named() -> None:
    """Those after them take part if their pages suffice; nothing of the others changes."""
    with Rig(small(8), engine=False) as rig:
        caches = active(rig, [4, 4, 4, 3])
        tokens = [[9] * 20, [9] * 8, [9] * 12, [9]]
        with rig.manager.step(caches, [20, 8, 12, 1], tokens) as step:
            assert step.positions == [1, 3]
            assert step.short == [caches[0], caches[2]]
            assert step.suspended == []
            assert step.slots_to_write(0).offsets.tolist() == [0, 8, 9]
        assert [cache.num_committed_tokens for cache in caches] == [4, 12, 4, 4]
        assert [cache.capacity for cache in caches] == [4, 12, 4, 4]
        shortage = caches[0].last_shortage
        assert shortage is not None
        assert shortage.missing > 0


def test_the_youngest_gives_its_pages_to_older_ones_only() -> None:
    """Younger caches are suspended until the older request fits. A request that is itself the youngest is left out, so the oldest
    continues."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        old, middle, young = active(rig, [8, 12, 12])
        with rig.manager.step([young, middle, old], [0, 4, 4], [[], [5], [6]], make_room=SuspendYoungest()) as step:
            assert step.caches == [middle, old]
            assert step.suspended == [young]
            assert step.short == []
        assert [cache.num_committed_tokens for cache in (old, middle, young)] == [9, 13, 12]
        middle.close()
        assert young.resume(rig.stream)
        with rig.manager.step([young, old], [12, 1], make_room=SuspendYoungest()) as step:
            assert step.short == [young]
            assert step.suspended == []


@pytest.mark.parametrize("policy", [SuspendYoungest, SuspendCheapest])
def test_caches_that_are_not_of_the_step_can_give_pages_too(policy: Callable[[list[KVCache]], MakeRoom]) -> None:
    """`also` is read at each shortage. Closed and suspended ones are no help."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        old, other, _busy, closed = active(rig, [8, 12, 12, 0])
        closed.close()
        also = [closed]
        room = policy(also)
        with rig.manager.step([old], 4, make_room=room) as step:
            assert step.short == [old]
        also.append(other)
        with rig.manager.step([old], 4, make_room=room) as step:
            assert step.short == []
            assert step.suspended == [], "the other one is not of the step"
        assert not other.is_active


def test_the_cheapest_to_bring_back_is_suspended() -> None:
    """The fewest bytes of its own among those that end the shortage. Pages that others use too cost nothing, and free nothing."""
    with Rig(small(16, host_slots=32), engine=False) as rig:
        old, third, fourth = active(rig, [16, 12, 12])
        (twin,) = active(rig, [16])
        assert twin.get_base_page_indices(0) == old.get_base_page_indices(0), "adopted: four pages of two requests"
        assert twin.resize(20)
        with rig.manager.step([old, twin, third, fourth], [28, 4, 0, 0], make_room=SuspendCheapest()) as step:
            assert step.suspended == [third], "the twin has one page of its own, and two are missing"
            assert step.caches == [old, twin, fourth]
        with rig.manager.step([twin, old, fourth], [12, 28, 0], make_room=SuspendCheapest()) as step:
            assert step.suspended == [fourth], "three pages of its own; the old one has seven"
            assert step.short == []


@pytest.mark.parametrize("policy", [SuspendYoungest, SuspendCheapest])
def test_nothing_is_suspended_in_vain(policy: Callable[[], MakeRoom]) -> None:
    """Without a colder tier, or with a full one, pages cannot leave the GPU."""
    for config in (small(8), small(8, host_slots=4)):
        with Rig(config, engine=False) as rig:
            first, second, third = active(rig, [8, 8, 16], committed=False)
            if len(config.cache_tiers) > 1:
                third.suspend()
                active(rig, [16], committed=False)
            with rig.manager.step([first, second], 16, make_room=policy()) as step:
                assert step.suspended == []
                assert step.short == [first, second]


class Asked(MakeRoom):
    """A policy that records its calls, and answers as configured."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.questions: list[tuple[KVCache, int, list[KVCache]]] = []

    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool:
        self.questions.append((asking, shortage.missing, list(candidates)))
        if callable(self.answer):
            self.answer(candidates)
            return True
        return self.answer  # type: ignore[no-any-return]  # also what it must not answer


def test_a_policy_is_asked_as_long_as_it_helps() -> None:
    """With the other ACTIVE caches of the step, in its order; never for a request that can never fit."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        caches = active(rig, [4, 8, 8, 8])
        policy = Asked(lambda candidates: candidates[-1].suspend())
        with rig.manager.step(caches, [13, 1, 0, 0], make_room=policy) as step:
            assert step.suspended == [caches[3], caches[2]]
            assert step.short == []
        assert policy.questions == [(caches[0], 3, caches[1:]), (caches[0], 1, caches[1:3])]
        idle = Asked(True)
        with rig.manager.step(caches[:2], [17, 5], make_room=idle) as step:
            assert step.short == caches[:2]
        assert [len(idle.questions), idle.questions[0][0]] == [2, caches[0]], "once for each, since nothing became better"
        never = Asked(False)
        with rig.manager.step(caches[:1], 60, make_room=never) as step:
            assert step.short == caches[:1]
        assert never.questions == []


def test_a_policy_may_suspend_the_one_that_asks() -> None:
    with Rig(small(8, host_slots=16), engine=False) as rig:
        caches = active(rig, [8, 8, 8])
        policy = Asked(lambda candidates: caches[0].suspend())
        with rig.manager.step(caches, [24, 4, 4], make_room=policy) as step:
            assert step.suspended == [caches[0]]
            assert step.caches == caches[1:]


def test_errors_of_a_policy_pass_through() -> None:
    """Nothing is committed, and the manager goes on; an answer that is no bool is refused."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        caches = active(rig, [16, 16])
        step = rig.manager.step(caches, 8, make_room=Asked(lambda candidates: candidates[9]))
        with pytest.raises(IndexError):
            step.__enter__()
        with pytest.raises(LogicError, match="begun once"):
            step.__enter__()
        with pytest.raises(ConfigError, match=r"the answer of make_room\(\) is 1; it must be True or False"):
            rig.manager.step(caches, 8, make_room=Asked(1)).__enter__()
        assert [cache.capacity for cache in caches] == [16, 16]


def test_mistakes_are_refused_before_anything_changes() -> None:
    """Each error names the argument and the cache."""
    with Rig(small(16), engine=False) as rig, Rig(small(16), engine=False) as other:
        manager = rig.manager
        caches = active(rig, [4, 4])
        with pytest.raises(ConfigError, match="call step"):
            manager.step(active(other, [4]), 1)
        with pytest.raises(ConfigError, match="num_new_tokens has 1 items; pass one for each of the 2 caches"):
            manager.step(caches, [1])
        with pytest.raises(ConfigError, match="tokens has 3 items"):
            manager.step(caches, 1, [1, 2, 3])
        with pytest.raises(ConfigError, match=r"caches\[1\] \(id 2\): num_new_tokens\[1\] is -1; it must be at least 0"):
            manager.step(caches, [0, -1]).__enter__()
        with pytest.raises(ConfigError, match=r"num_new_tokens\[0\] is True"):
            manager.step(caches, True).__enter__()
        step = manager.step(caches, np.int32(1))
        outside: list[Callable[[], object]] = [
            lambda: step.commit([1, 2]),
            lambda: step.commit_ahead([1, 2]),
            step.advance,
            lambda: step.slots_to_write(0),
            lambda: step.slots_to_read(0),
            lambda: step.rows(PlainBatchTables(manager, 2, 4)),
        ]
        for call in outside:
            with pytest.raises(LogicError, match="inside the with block"):
                call()
        with step:
            with pytest.raises(ConfigError, match="tokens has 1 items; pass one for each of the 2 caches of the step"):
                step.commit([1])
            with pytest.raises(ConfigError, match="num_tokens has 3 items"):
                step.advance([1, 1, 1])
            with pytest.raises(ConfigError, match=r"num_tokens\[0\] is -1; it must be at least 0"):
                step.advance([-1, 1])
            with pytest.raises(ConfigError, match=r"num_tokens\[1\] is 2; it must be at most the number of new tokens, 1"):
                step.advance([1, 2])
        for call in outside:
            with pytest.raises(LogicError, match="inside the with block"):
                call()
        assert [cache.num_committed_tokens for cache in caches] == [4, 4]
        caches[1].suspend()
        with pytest.raises(LogicError, match=r"caches\[1\] \(id 2\): resize\(\) needs a cache that is ACTIVE"):
            manager.step(caches, 1).__enter__()
        with manager.step([], 1, []) as empty:
            assert empty.caches == empty.short == []


def test_errors_at_the_end_name_the_cache() -> None:
    """Earlier ones are committed, as by `commit_batch`."""
    with Rig(small(16), engine=False) as rig:
        caches = active(rig, [4, 4])
        with pytest.raises(ConfigError, match=r"caches\[1\] \(id 2\)"), rig.manager.step(caches, 1, [7, -1]):
            pass
        assert [cache.num_committed_tokens for cache in caches] == [5, 4]
        assert [cache.history_length for cache in caches] == [5, 4]
