"""Computes the pool groups' shares of a level from the sampled lengths of requests.

The target of a level is the exact result of an adjustment, with floors and grains. So a level whose floors leave no choice is never
reported as mismatched. Equal samples and clock values give equal targets; this file moves no memory.

A closed request contributes the squares of its mean capacity and mean history: long requests fill pools, so they count more. A new
request contributes the length that it can reuse. GPU shares fit the typical active request; shares of colder levels fit what is
reused, since they keep little else for long.
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
    """An exponential moving average without bias from a start value: the first samples count as in a plain mean."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weight = 0.0  # sum of the weights of all samples so far
        self.value = 0.0

    def add(self, sample: float) -> None:
        self.weight = 1.0 + self.decay * self.weight
        self.value += (sample - self.value) / self.weight


class Tuner:
    """Samples lengths, and decides when the levels should be divided anew and how."""

    def __init__(
        self, layout: StorageLayout, config: KVCacheManagerConfig, sizings: list[LevelSizing], clock: Callable[[], float]
    ) -> None:
        self.layout = layout
        self.clock = clock  # monotonic, in seconds
        self.sizings = list(sizings)  # by level, as at present
        self.min_samples = config.rebalance_min_sampled_kv_caches
        self.cooldown_secs = config.rebalance_cooldown_secs
        self.update_interval = config.rebalance_target_ratio_update_interval
        self.threshold = config.rebalance_ratio_threshold
        decay = config.rebalance_moving_average_decay
        self.reused = MovingAverage(decay)  # tokens
        self.capacity_squared = MovingAverage(decay)  # tokens squared
        self.history_squared = MovingAverage(decay)
        self.num_samples = 0  # closed requests so far; an adjustment needs min_samples of them
        self.last_adjustment_time = clock()
        self.gpu_weights: list[float] | None = None  # target shares by pool group; None before the first update
        self.cold_weights: list[float] | None = None  # the same, for all colder levels
        self._updated_at = 0  # num_samples at the latest update of the targets
        self._verdict: bool | None = None  # whether a level is mismatched; None: to be computed anew

    def __reduce__(self) -> str:
        raise LogicError("a Tuner cannot be copied or pickled: it is part of its manager; copy the figures that you need")

    def sample_reused(self, tokens: int) -> None:
        """Add the length that a new request can reuse."""
        self.reused.add(float(tokens))

    def sample_closed(self, mean_capacity: float, mean_history: float) -> None:
        """Add the mean lengths of a closed request."""
        self.capacity_squared.add(mean_capacity * mean_capacity)
        self.history_squared.add(mean_history * mean_history)
        self.num_samples += 1
        if self.num_samples - self._updated_at >= self.update_interval:
            self._updated_at = self.num_samples
            self.update_targets()

    def update_targets(self) -> None:
        """Compute the target shares from the averages. An average of 0 keeps the former shares."""
        capacity = round(math.sqrt(self.capacity_squared.value))
        history = round(math.sqrt(self.history_squared.value))
        if capacity > 0:
            self.gpu_weights = weights_from_length(self.layout, history, max(history, capacity))
        reused = round(self.reused.value)
        if reused > 0:
            self.cold_weights = weights_from_length(self.layout, reused, reused)
        self._verdict = None

    def set_gpu_weights(self, weights: list[float]) -> None:
        """Set the target shares of the GPU until the next update."""
        if len(weights) != self.layout.num_pool_groups:
            raise ConfigError(f"{len(weights)} weights for {self.layout.num_pool_groups} pool groups; pass one for each")
        self.gpu_weights = list(weights)
        self._verdict = None

    def target_weights(self, level: CacheLevel) -> list[float] | None:
        """The target shares of a level, by pool group; None before the first update."""
        return self.gpu_weights if level == GPU_LEVEL else self.cold_weights

    def target_sizing(self, level: CacheLevel) -> LevelSizing:
        """The sizing of a level after an adjustment: its quota divided by the target shares.

        The present sizing before the first update, and if page indices would not fit int32.
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
        """Whether a pool group's target share differs from its present share by at least the threshold factor."""
        target = self.target_sizing(level).ratio(self.layout)
        current = self.sizings[level].ratio(self.layout)
        for wanted, present in zip(target, current, strict=True):
            if not present < wanted * self.threshold or not wanted < present * self.threshold:
                return True
        return False

    def need_adjustment(self) -> bool:
        """Whether there are enough samples, the cooldown has passed, and the GPU or the last level is mismatched.

        Cheap enough for every step: levels are compared once after each change of targets or sizings.
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
        """Record the new sizing of a level."""
        if len(sizing.slots) != self.layout.num_pool_groups:
            raise ConfigError(f"the sizing has {len(sizing.slots)} pool groups; must be {self.layout.num_pool_groups}")
        self.sizings[level] = sizing
        self._verdict = None

    def adjusted(self, now: float) -> None:
        """Record an adjustment, which starts the cooldown."""
        self.last_adjustment_time = now
