"""From the lengths that requests really had to the shares that the pool groups should have.

Rule: the target of a level is what an adjustment would give it, floors and grains included, so a level that its floors hold fast is
never reported as mismatched. Nothing here reads a clock of its own or moves memory: the same samples give the same targets.

A closed request contributes the squares of its mean capacity and mean history (long requests fill pools, so they count more), a
created one the length that it could reuse. The GPU is shaped for the typical running request; colder levels for what is reused, as
they hold nothing else for long.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import GPU_LEVEL, CacheLevel
from kv_cache_manager_v2.layout.pools import StorageLayout
from kv_cache_manager_v2.layout.sizing import LevelSizing, resized, weights_from_length


class MovingAverage:
    """A mean in which a sample's weight falls by `decay` with each later one; the first samples count as in a plain mean."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weight = 0.0  # sum of the weights of all samples so far
        self.value = 0.0

    def add(self, sample: float) -> None:
        self.weight = 1.0 + self.decay * self.weight
        self.value += (sample - self.value) / self.weight


class Tuner:
    """Samples lengths, and says when the levels should be re-proportioned and how."""

    def __init__(
        self, layout: StorageLayout, config: KVCacheManagerConfig, sizings: list[LevelSizing], clock: Callable[[], float]
    ) -> None:
        self.layout = layout
        self.clock = clock  # seconds, never going back
        self.sizings = list(sizings)  # by level: how each one is divided at present
        self.min_samples = config.rebalance_min_sampled_kv_caches
        self.cooldown_secs = config.rebalance_cooldown_secs
        self.update_interval = config.rebalance_target_ratio_update_interval
        self.threshold = config.rebalance_ratio_threshold
        decay = config.rebalance_moving_average_decay
        self.reused = MovingAverage(decay)  # tokens
        self.capacity_squared = MovingAverage(decay)  # tokens squared
        self.history_squared = MovingAverage(decay)
        self.num_samples = 0  # closed requests so far; at min_samples an adjustment becomes possible
        self.last_adjustment_time = clock()
        self.gpu_weights: list[float] | None = None  # shares to aim at, by pool group; None until samples gave some
        self.cold_weights: list[float] | None = None  # the same for all colder levels
        self._updated_at = 0  # num_samples at the latest update of the targets
        self._verdict: bool | None = None  # whether a level is mismatched; None after anything that it depends on changed

    def __reduce__(self) -> str:
        raise LogicError("a Tuner cannot be copied or pickled: it is part of its manager; copy the figures that you need")

    def sample_reused(self, tokens: int) -> None:
        """A request was created and can reuse so many tokens."""
        self.reused.add(float(tokens))

    def sample_closed(self, mean_capacity: float, mean_history: float) -> None:
        """A request was closed that had these lengths on average over its steps."""
        self.capacity_squared.add(mean_capacity * mean_capacity)
        self.history_squared.add(mean_history * mean_history)
        self.num_samples += 1
        if self.num_samples - self._updated_at >= self.update_interval:
            self._updated_at = self.num_samples
            self.update_targets()

    def update_targets(self) -> None:
        """Compute the shares to aim at from the averages; an average of 0 says nothing and keeps the former shares."""
        capacity = round(math.sqrt(self.capacity_squared.value))
        history = round(math.sqrt(self.history_squared.value))
        if capacity > 0:
            self.gpu_weights = weights_from_length(self.layout, history, max(history, capacity))
        reused = round(self.reused.value)
        if reused > 0:
            self.cold_weights = weights_from_length(self.layout, reused, reused)

        self._verdict = None

    def set_gpu_weights(self, weights: list[float]) -> None:
        """Aim at these shares of the GPU until the next update, whatever was sampled."""
        if len(weights) != self.layout.num_pool_groups:
            raise ConfigError(f"{len(weights)} weights; the layout has {self.layout.num_pool_groups} pool groups")
        self.gpu_weights = list(weights)
        self._verdict = None

    def target_weights(self, level: CacheLevel) -> list[float] | None:
        """The shares to aim at on a level, by pool group; None while the samples say nothing."""
        return self.gpu_weights if level == GPU_LEVEL else self.cold_weights

    def target_sizing(self, level: CacheLevel) -> LevelSizing:
        """What an adjustment would make of a level: its quota, divided by the weights to aim at, floors kept.

        Its present sizing, while the samples say nothing, and where that division is impossible (page indices past int32).
        """
        weights = self.target_weights(level)
        current = self.sizings[level]
        if weights is None:
            return current
        try:
            return resized(self.layout, current, None, weights)
        except ConfigError:
            return current

    def mismatched(self, level: CacheLevel) -> bool:
        """Whether some pool group's target share is not within the threshold of its present share."""
        target = self.target_sizing(level).ratio(self.layout)
        current = self.sizings[level].ratio(self.layout)
        for wanted, present in zip(target, current, strict=True):
            if not present < wanted * self.threshold or not wanted < present * self.threshold:
                return True
        return False

    def need_adjustment(self) -> bool:
        """Whether enough requests were sampled, the cooldown is over, and the GPU or the last level is mismatched.

        Cheap enough to ask at every step: the comparison is made once for each change of targets or sizings.
        """
        if self.num_samples < self.min_samples or self.layout.num_pool_groups == 1:
            return False
        if self.clock() - self.last_adjustment_time < self.cooldown_secs:
            return False
        if self._verdict is None:
            last = CacheLevel(len(self.sizings) - 1)
            self._verdict = self.mismatched(GPU_LEVEL) or (last != GPU_LEVEL and self.mismatched(last))
        return self._verdict

    def set_sizing(self, level: CacheLevel, sizing: LevelSizing) -> None:
        """A level was re-divided or got another quota."""
        if len(sizing.slots) != self.layout.num_pool_groups:
            raise ConfigError(f"sizing of {len(sizing.slots)} pool groups; the layout has {self.layout.num_pool_groups}")
        self.sizings[level] = sizing
        self._verdict = None

    def adjusted(self, now: float) -> None:
        """An adjustment is over: the cooldown starts."""
        self.last_adjustment_time = now
