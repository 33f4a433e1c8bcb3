"""Policies that learn: what is kept, how wrong hints are discounted, and that least recently used is never far better."""

from __future__ import annotations

import random

import pytest

from kv_cache_manager_v2 import AdaptivePolicy, ConfigError, HintsPolicy
from kv_cache_manager_v2.eviction.adaptive import LearningPolicy
from kv_cache_manager_v2.eviction.conversations import Conversations, prefixes_of
from kv_cache_manager_v2.eviction.ghost_cache import GhostCache
from kv_cache_manager_v2.eviction.policy import RequestEnd
from tests.support import inside
from tests.support.models import small
from tests.support.rig import Rig, toks

CAPACITY = 64  # blocks


def ended(path: list[int], expect: str | None = None) -> RequestEnd:
    """A request whose blocks have these contents."""
    return RequestEnd(4 * len(path), 0, b"", [bytes([n & 255, n >> 8 & 255, n >> 16]) for n in path], expect, CAPACITY)


def serve(policy: LearningPolicy, path: list[int], expect: str | None = None) -> int:
    """A request ends, and its pages become evictable; its class."""
    worth = policy.class_of(ended(path, expect))
    policy.order.clock += len(path)
    return worth


def test_a_request_continues_the_one_whose_blocks_it_begins_with() -> None:
    """Also the same prompt again. What several paths branch off is no conversation, and an edited one begins another."""
    known = Conversations()

    def turn(path: list[int]) -> int:
        prefixes = prefixes_of(ended(path))
        return known.add(prefixes[-1], known.continued_by(prefixes), len(path), 1, 0).turn

    assert [turn(path) for path in ([1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [9, 2, 3])] == [0, 1, 2, 3, 0]
    assert [turn([7]), turn([7, 1]), turn([7, 2]), turn([7, 3]), turn([7, 3, 1])] == [0, 1, 0, 0, 1]


def test_a_ghost_takes_the_tail_of_what_ranks_least() -> None:
    ghost = GhostCache()
    ghost.add(1, 6, 10.0, 8)
    ghost.add(2, 4, 11.0, 8)
    assert [ghost.find(1, 6), ghost.find(2, 4), ghost.find(2, 3), ghost.find(3, 1)] == [4, 4, 3, 0]
    ghost.add(1, 6, 12.0, 8)
    assert [ghost.find(1, 6), ghost.find(2, 4)] == [6, 2]
    for rank in range(1000):
        ghost.add(1, 6, 20.0 + rank, 8)
    assert len(ghost._queue) <= 70, "earlier ranks are forgotten"


def test_turns_that_go_on_get_more_credit() -> None:
    """One conversation in four goes on; those that do, go on for long."""
    policy = AdaptivePolicy()
    rng = random.Random(1)
    going: list[list[int]] = []
    for number in range(600):
        path = [8 * number, 8 * number + 1]
        serve(policy, path)
        if number % 4 == 0:
            going.append(path)
        for path in rng.sample(going, min(3, len(going))):
            path.append(number)
            serve(policy, path)
            if len(path) > 12:
                going.remove(path)
    assert policy.trusted
    credits = policy.order.credits
    assert credits == sorted(credits)
    assert credits[2] > credits[1] + 20, "a second turn is worth more than the first"


@pytest.mark.parametrize(("right", "clear"), [(1.0, True), (0.5, False)])
def test_hints_count_as_far_as_they_are_right(right: float, clear: bool) -> None:
    """Half of the conversations end at once. Hints that are as good as a coin change hardly anything."""
    policy = HintsPolicy()
    rng = random.Random(2)

    def said(ends: bool) -> str:
        return "end" if ends == (rng.random() < right) else "more"

    for number in range(500):
        serve(policy, [2 * number, 2 * number + 1], said(number % 2 == 0))
        before = number - 10
        if before > 0 and before % 2:
            serve(policy, [2 * before, 2 * before + 1, number], said(True))
    credits = policy.order.credits
    assert (credits[2] - credits[0] > 2 * CAPACITY) == clear, credits


def test_least_recently_used_takes_over_where_it_finds_more() -> None:
    """While it finds more, all credits are 0. What was learnt applies again once it finds as much."""
    policy = AdaptivePolicy()
    for number in range(300):  # every other conversation goes on, ten conversations later, for four turns
        serve(policy, [number, 1000])
        for turn in range(1, 5):
            before = number - 10 * turn
            if before > 0 and before % 2:
                serve(policy, [before, *range(1000, 1001 + turn)])
    policy._plain.hits = policy._ranked.hits + policy._total  # as if least recently used had found everything
    serve(policy, [5001, 2, 3])
    states = [policy.trusted]
    assert set(policy.order.credits) == {0}
    policy._plain.hits, policy._ranked.hits = 0.0, 100.0  # and now less
    serve(policy, [5001, 2, 3, 4])
    assert [*states, policy.trusted] == [False, True]
    assert policy.order.credits[4] > policy.order.credits[1]


def test_what_is_said_to_be_over_goes_first() -> None:
    """By the real manager; nothing is learnt before the first hint."""
    with Rig(small(12)) as rig:
        policy = rig.manager.eviction_policy
        assert isinstance(policy, HintsPolicy)
        assert not policy.listens
        over = toks(1000, 1008)
        for number in range(40):
            prompt = toks(16 * number, 16 * number + 8)
            request = rig.start(prompt)
            assert request.advance(prompt[len(request.tokens) :])
            request.cache.close("end" if number % 2 else "more")
            if number % 2:
                before = 16 * (number - 1)
                rig.extend(toks(before, before + 12))
        kept = toks(2000, 2008)
        for prompt, expect in ((kept, "more"), (over, "end")):
            request = rig.start(prompt)
            assert request.advance(prompt)
            request.cache.close(expect)
        rig.take(2).close()
        rig.take(10)
        assert rig.probe(over) == 0
        assert inside.heads_before_tails(rig.manager) == []


@pytest.mark.parametrize("expect", ["END", "", 1, True, ["end"]])
def test_what_is_expected_is_more_or_end(expect: object) -> None:
    with Rig(small(4)) as rig:
        cache = rig.create()
        with pytest.raises(ConfigError, match="expect"):
            cache.close(expect)  # type: ignore[arg-type]  # the mistake that is tested
        assert cache.resume(rig.stream), "it is still open"
