"""A layer group that makes matches shorter is named, with the reason and a remedy that fits."""

from __future__ import annotations

import dataclasses

import pytest

from kv_cache_manager_v2 import KVCacheManagerConfig
from tests.support.models import hybrid, small
from tests.support.rig import Rig, toks

LENGTH = 16  # tokens of a prompt


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "look-ups" in record.getMessage()]


def test_states_that_are_dropped_are_named_after_a_hundred_lookups(caplog: pytest.LogCaptureFixture) -> None:
    """One line, however often it happens."""
    with Rig(hybrid(2, 64), engine=False) as rig:
        for number in range(33):
            for prompt in range(3):
                rig.manager.create_kv_cache(None, toks(1000 * prompt, 1000 * prompt + LENGTH)).close()
            if number == 0:
                for prompt in range(3):
                    rig.seed(toks(1000 * prompt, 1000 * prompt + LENGTH))
        assert not warnings_of(caplog)
        for _number in range(9):
            rig.manager.create_kv_cache(None, toks(0, LENGTH)).close()
        (line,) = warnings_of(caplog)
        report = rig.manager.explain_hits()
        full, states = report.groups
        assert (full.spoiled, full.remedy, str(full)) == (0, "", "layer group 0 (full attention, 1 layer) made no match shorter")
        assert states.name == "recurrent, 1 layer"
        assert states.lost_tokens == LENGTH * states.spoiled == report.cached_tokens - report.reused_tokens
        assert states.dropped > 0
        assert "initial_pool_ratio" in states.remedy
        assert line.startswith("after 100 look-ups, ")
        assert "layer group 1 (recurrent, 1 layer) made" in line
        assert str(report).splitlines()[2] == str(states)


def forks(rig: Rig) -> None:
    """A second prompt that begins like the first, which was cached as a whole."""
    rig.seed(toks(0, 32))
    rig.create([*toks(0, 16), *toks(500, 516)]).close()


@pytest.mark.parametrize(
    ("config", "group", "remedy"),
    [
        (hybrid(4, 64), 1, "no snapshot where other requests branch off"),
        (dataclasses.replace(small(64, kinds=("full", (8, 0))), commit_min_snapshot=True), 1, "committed lengths only"),
    ],
)
def test_a_group_that_keeps_nothing_at_a_branch_is_told_from_one_that_lacks_memory(
    config: KVCacheManagerConfig, group: int, remedy: str
) -> None:
    with Rig(config, engine=False) as rig:
        forks(rig)
        report = rig.manager.explain_hits()
        assert (report.num_lookups, report.lookup_tokens, report.cached_tokens, report.reused_tokens) == (1, 32, 16, 0)
        assert [found.spoiled for found in report.groups] == [int(number == group) for number in range(len(report.groups))]
        assert (report.groups[group].lost_tokens, report.groups[group].dropped) == (16, 0)
        assert remedy in report.groups[group].remedy


def test_look_ups_that_lose_nothing_name_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Also with windows, and dummy requests are not counted."""
    with Rig(small(64, kinds=("full", (8, 0)))) as rig:
        rig.manager.mark_stats_excluded("dummy")
        rig.manager.create_kv_cache(None, toks(0, 8), "dummy").close()
        for number in range(120):
            rig.extend(toks(1000 * (number % 3), 1000 * (number % 3) + LENGTH))
        report = rig.manager.explain_hits()
        assert report.num_lookups == 120
        assert report.cached_tokens == report.reused_tokens == 39 * 3 * LENGTH
        assert not any(group.spoiled for group in report.groups)
        assert not warnings_of(caplog)
