"""Make-room policies asked by `resume` and `resize`, and policies that suspend and resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kv_cache_manager_v2 import ConfigError, KVCache, LogicError, MakeRoom, Shortage, SuspendCheapest, SuspendYoungest
from tests.manager.test_step import active
from tests.support.models import small
from tests.support.rig import Rig


class Does(MakeRoom):
    """A policy that does the next of its actions at each call, then returns False."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self.acts = list(acts)
        self.questions: list[tuple[KVCache, bool, list[KVCache]]] = []

    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool:
        self.questions.append((asking, shortage.over_limit, list(candidates)))
        if not self.acts:
            return False
        self.acts.pop(0)()
        return True


@pytest.mark.parametrize("policy", [SuspendYoungest, SuspendCheapest])
def test_resize_and_resume_ask_a_policy(policy: Callable[[list[KVCache]], MakeRoom]) -> None:
    """As a step does; the policy knows the other caches itself."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        old, young = active(rig, [16, 16])
        assert not old.resize(20)
        assert not old.resize(20, make_room=policy([]))
        assert old.resize(20, 16, policy([old, young]))
        assert not young.is_active
        assert not young.resume()
        assert not young.resume(rig.stream, policy([])), "a policy without caches frees nothing"
        assert young.resume(make_room=SuspendCheapest([old]))
        assert not old.is_active
        assert not old.resume(rig.stream, SuspendYoungest())
        assert old.resume(make_room=policy([young]))


def test_a_pool_group_in_use_is_a_shortage_that_a_policy_can_end() -> None:
    """`max_util_for_resume` refuses before slots are counted; then slots are missing, which is another shortage."""
    with Rig(small(8, host_slots=32, max_util=0.5), engine=False) as rig:
        first, second, third = active(rig, [8, 4, 8], committed=False)
        third.suspend()
        assert first.resize(16)
        policy = Does(second.suspend, first.suspend)
        assert third.resume(make_room=policy)
        assert [over_limit for _asking, over_limit, _candidates in policy.questions] == [True]
        assert policy.questions[0][2] == []


def test_a_policy_that_does_not_help_is_asked_once() -> None:
    """A policy that returns False, or a request that can never fit, ends the call."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        first, _second = active(rig, [16, 16])
        idle = Does(lambda: None, lambda: None)
        assert not first.resize(32, make_room=idle)
        assert len(idle.questions) == 1
        assert not first.resize(400, make_room=idle)
        assert len(idle.questions) == 1
        with pytest.raises(ConfigError, match="make_room is 3"):
            first.resize(16, make_room=3)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="make_room is 3"):
            first.resume(make_room=3)  # type: ignore[arg-type]


def test_a_policy_may_change_the_cache_that_asks() -> None:
    """The call then says whether the cache is what was asked for."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        first, second = active(rig, [16, 16])
        assert not first.resize(32, make_room=Does(first.suspend))
        assert not first.is_active
        third = rig.open()
        assert third.resize(12)

        def bring_back() -> None:
            second.suspend()
            assert first.resume()

        assert first.resume(make_room=Does(bring_back))
        assert not second.resume(make_room=Does(second.close))
        with pytest.raises(LogicError, match="CLOSED"):
            second.resume()


def test_a_cache_that_a_policy_resizes_gets_its_pages_again() -> None:
    """It was sized before another one had a shortage: it takes part with pages for all of its new tokens, or not at all."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        first, second, third = active(rig, [4, 4, 4])
        with rig.manager.step([first, second, third], [8, 20, 0], make_room=Does(lambda: first.resize(4))) as step:
            assert [cache.capacity - cache.history_length for cache in step.caches] == [8, 0]
            assert (step.caches, step.short) == ([first, third], [second])
        with rig.manager.step([first, second, third], [8, 16, 0], make_room=Does(third.close, lambda: first.resize(8))) as step:
            assert [cache.capacity - cache.history_length for cache in step.caches] == [8, 16]


def test_a_cache_that_asks_may_be_suspended_and_resumed() -> None:
    """In one answer, while room is made for it, or in two: then it takes part."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        first, second, third = active(rig, [4, 8, 8])

        def rest() -> None:
            first.suspend()
            third.suspend()
            assert first.resume()

        with rig.manager.step([first, second], 20, make_room=Does(rest, second.suspend)) as step:
            assert (step.caches, step.suspended, step.short) == ([first], [second], [])
        first.resize(4)
        assert second.resume()
        assert third.resume()

        def back() -> None:
            third.suspend()
            assert first.resume()

        with rig.manager.step([first, second], 20, make_room=Does(first.suspend, back)) as step:
            assert (step.caches, step.suspended, step.short) == ([first], [], [second])


def test_a_cache_that_a_policy_resumes_takes_part_again() -> None:
    """In one answer or in a later one, before or after its turn: it is in `caches`, with its pages, and nowhere else."""
    with Rig(small(8, host_slots=16), engine=False) as rig:
        first, second, third, fourth = active(rig, [4, 4, 8, 8])

        def swap() -> None:
            second.suspend()
            third.suspend()
            assert second.resume()

        def back() -> None:
            fourth.suspend()
            assert third.resume()

        policy = Does(swap, back)
        with rig.manager.step([first, second, third, fourth], [12, 4, 0, 4], make_room=policy) as step:
            assert step.caches == [first, second, third]
            assert step.suspended == [fourth]
            assert step.short == []
            assert [cache.capacity for cache in step.caches] == [16, 8, 8]
