"""Pool groups are resized as the lengths of requests change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_cache_manager_v2 import OutOfPagesError
from kv_cache_manager_v2.config import LayerConfig
from tests.support.engine import Token
from tests.support.models import KIB, MIB, attention, model
from tests.support.rig import Clock, Rig, mixed, toks


def rebalanced(
    layers: list[LayerConfig], *, min_samples: int = 10, cooldown: float = 60.0, threshold: float = 1.25, gpu: int = 16 * MIB
) -> tuple[Rig, Clock]:
    """A rig whose manager looks at its pools after few requests, with a clock of ours."""
    config = model(layers, gpu=gpu)
    config.rebalance_min_sampled_kv_caches = min_samples
    config.rebalance_cooldown_secs = cooldown
    config.rebalance_ratio_threshold = threshold
    config.rebalance_target_ratio_update_interval = 1
    clock = Clock()
    return Rig(config, clock=clock), clock


def two_windows() -> list[LayerConfig]:
    return [attention(0, 8 * KIB, window=128), attention(1, 2 * KIB)]


def due(rig: Rig) -> bool:
    """Whether an adjustment is due now."""
    return rig.manager.need_adjustment


def totals(rig: Rig) -> list[int]:
    return [rig.counts(group=group).total for group in range(2)]


def serve(rig: Rig, count: int, length: int, id: Callable[[int], int] | None = None) -> None:
    """So many requests of so many tokens come and go."""
    for number in range(count):
        cache = rig.open(None, id=1000 + number if id is None else id(number))
        assert cache.resize(length, length)
        cache.close()


def test_pools_follow_the_requests() -> None:
    """Short requests where long ones were expected: the window's pool group grows, the other shrinks; committed content survives,
    and a replay reuses it and verifies."""
    rig, clock = rebalanced(two_windows())
    with rig:
        tokens: list[Token] = mixed(0, 300)
        rig.extend(tokens)
        before = totals(rig)
        assert not due(rig)
        serve(rig, 40, 64)
        assert not due(rig)  # the cooldown runs from the start
        clock.now += 61
        assert due(rig)
        rig.manager.adjust()
        after = totals(rig)
        assert after[0] > before[0]
        assert after[1] < before[1]
        assert not due(rig)
        again = rig.start(tokens)
        assert len(again.tokens) == 300
        again.check()


@pytest.mark.parametrize("skew", [2.0, 0.5])
def test_content_survives_a_rebalance(skew: float) -> None:
    """A skew of 2 either way is forced: one group grows, the other shrinks; what was cached and what suspended requests hold is
    intact."""
    rig, clock = rebalanced(two_windows())
    with rig:
        tokens: list[Token] = mixed(0, 300)
        rig.extend(tokens)
        live = rig.start()
        assert live.advance(toks(7000, 7200))
        live.suspend()
        before = totals(rig)
        current = [count * size for count, size in zip(before, (8 * KIB, 2 * KIB), strict=True)]
        wanted = [current[0] * skew, current[1]]
        rig.manager.tuner.num_samples = 1000
        rig.manager.tuner.set_gpu_weights([weight / sum(wanted) for weight in wanted])
        clock.now += 61
        assert due(rig)
        rig.manager.adjust()
        after = totals(rig)
        assert (after[0] > before[0], after[1] < before[1]) == (skew > 1, skew > 1)
        assert live.resume()
        live.check()
        again = rig.start(tokens)
        assert len(again.tokens) > 0
        again.check()


def test_an_adjustment_that_does_not_fit_is_an_error() -> None:
    """Pages of suspended requests need the slots that would go: OutOfPagesError, and every level is as it was."""
    rig, clock = rebalanced(two_windows())
    with rig:
        request = rig.start()
        request.prefill(toks(0, 32 * 3000), 3200)
        request.suspend()
        before = totals(rig)
        rig.manager.tuner.num_samples = 1000
        rig.manager.tuner.set_gpu_weights([0.9, 0.1])
        clock.now += 61
        assert due(rig)
        nothing: object = rig.manager.last_adjustment
        assert nothing is None
        with pytest.raises(OutOfPagesError, match="pages of pool group 1 on level 0 and colder must be kept"):
            rig.manager.adjust()
        refused = rig.manager.last_adjustment
        assert refused is not None
        assert not refused
        assert totals(rig) == before
        assert not due(rig)  # the cooldown starts again
        request.close()
        rig.manager.tuner.set_gpu_weights([0.5, 0.5])
        rig.manager.adjust()
        assert rig.manager.last_adjustment
        assert totals(rig) != before
