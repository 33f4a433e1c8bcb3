"""A policy of a user's own: what it is told, what it may answer, and what becomes of its mistakes."""

from __future__ import annotations

import logging
import re

import pytest

from kv_cache_manager_v2 import ConfigError, EvictionPolicy, KVCacheManager, LogicError, RequestEnd
from kv_cache_manager_v2.eviction.order import MAX_CLASSES, MAX_CREDIT, EvictionOrder
from tests.conftest import ROOT
from tests.support.models import small
from tests.support.rig import Rig, toks


class KeepLong(EvictionPolicy):
    """Requests of at least three blocks are kept as if six more pages had become evictable before them."""

    def __init__(self) -> None:
        super().__init__([0, 6], 0)
        self.ends: list[tuple[int, int, int]] = []

    def class_of(self, end: RequestEnd) -> int:
        self.ends.append((end.num_tokens, end.num_blocks, end.num_reused))
        return int(end.num_blocks >= 3)


def rig_with(policy: object, slots: int = 8) -> Rig:
    config = small(slots)
    config.eviction_policy = policy  # type: ignore[assignment]  # also what is no policy
    return Rig(config)


def test_a_class_keeps_its_pages_longer() -> None:
    """The long conversation is older, and stays for six more pages; then it is the oldest."""
    with rig_with(KeepLong) as rig:
        policy = rig.manager.eviction_policy
        assert isinstance(policy, KeepLong)
        long, short, later = toks(0, 13), toks(100, 108), toks(200, 208)
        for prompt in (long, short, later):
            rig.seed(prompt)
        rig.take(2).close()
        assert [rig.probe(prompt) for prompt in (long, short, later)] == [13, 0, 8]
        rig.extend(later + toks(300, 308))
        assert policy.ends == [(13, 3, 0), (8, 2, 0), (8, 2, 0), (0, 0, 0), (16, 4, 8)]
        policy.order.set_credits([0, 0])
        rig.take(2).close()
        assert rig.probe(long) == 8, "the oldest again"


def test_the_example_of_the_docs_is_a_policy() -> None:
    """Long prompts are kept, short ones are not."""
    text = (ROOT / "docs" / "eviction_policies.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    config = small(8)
    exec(code, {"config": config, "__name__": "example"})
    with Rig(config) as rig:
        policy = rig.manager.eviction_policy
        rig.seed(toks(0, 8))
        assert {page.worth for page in rig.manager.shared.hierarchy.all_pages()} == {0}
        assert [policy.class_of(RequestEnd(length, 100, b"", [], None, 8)) for length in (8292, 8293)] == [0, 1]


class Broken(EvictionPolicy):
    def __init__(self, answer: object) -> None:
        super().__init__([0, 1], 1)
        self.answer = answer

    def class_of(self, end: RequestEnd) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]  # the mistake that is tested


@pytest.mark.parametrize("answer", [2, -1, "1", None, True, ValueError("no")])
def test_a_mistake_of_a_policy_is_logged(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    """The request closes all the same."""
    with rig_with(lambda: Broken(answer)) as rig, caplog.at_level(logging.ERROR):
        rig.seed(toks(0, 8))
        assert rig.probe(toks(0, 8)) == 8
        assert {page.worth for page in rig.manager.shared.hierarchy.all_pages()} == {1}
    assert "eviction policy" in caplog.text


def test_a_policy_must_not_call_its_manager() -> None:
    """The call is refused; the error is that of the policy."""
    managers: list[KVCacheManager] = []
    refusals: list[LogicError] = []

    class Calls(Broken):
        def class_of(self, end: RequestEnd) -> int:
            try:
                managers[0].clear_reusable_blocks()
            except LogicError as error:
                refusals.append(error)
            return 0

    with rig_with(lambda: Calls(0)) as rig:
        managers.append(rig.manager)
        rig.seed(toks(0, 8))
    assert len(refusals) == 1
    assert "eviction policy" in str(refusals[0])


class Unmade(EvictionPolicy):
    """A mistake: it does not call the constructor of its base."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("policy", ["mru", None, 3, EvictionOrder, lambda: None, Unmade])
def test_what_is_no_policy_is_refused(policy: object) -> None:
    config = small(4)
    config.eviction_policy = policy  # type: ignore[assignment]  # the mistake that is tested
    with pytest.raises(ConfigError, match="EvictionPolicy"):
        KVCacheManager(config)


@pytest.mark.parametrize(
    ("credits", "usual"),
    [([], 0), ([2, 1], 0), ([0], 1), ([0], -1), ([-1, 0], 0), ([0.5], 0), ([MAX_CREDIT + 1], 0), ([0] * (MAX_CLASSES + 1), 0)],
)
def test_wrong_credits_are_refused(credits: list[int], usual: int) -> None:
    with pytest.raises(ConfigError):
        EvictionPolicy(credits, usual)


def test_credits_are_of_as_many_classes_as_before() -> None:
    policy = EvictionPolicy([0, 1])
    for credits in ([0], [0, 1, 2], [1, 0]):
        with pytest.raises(ConfigError):
            policy.order.set_credits(credits)
    assert policy.order.credits == [0, 1]
