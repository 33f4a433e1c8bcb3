"""Divides the quota of a level into slots of its pool groups.

Memory is allocated in *grains*, units of the tier's granularity, with exact arithmetic. A quota is rounded up to whole grains and
divided by weight. Each pool group gets at least its *floor*, the fewest slots that it may have. Grains left over by rounding are
distributed until no pool group can have one more slot. The result depends on the arguments alone, so repetition loses no grain.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from kv_cache_manager_v2.config import BatchDesc, KVCacheDesc, KVCacheManagerConfig
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import GPU_LEVEL, CacheLevel, CacheTier
from kv_cache_manager_v2.layout.arithmetic import ceil_div, round_half_even, round_up
from kv_cache_manager_v2.layout.batches import batch_slots, by_pool_group, history_slots, length_bytes, resume_needs
from kv_cache_manager_v2.layout.pools import StorageLayout

logger: Final = logging.getLogger(__name__)

DEFAULT_REQUEST: Final = (2049, 2048)  # capacity, history of a request that sizes the pools by default

# The origin of a level's weights (LevelSizing.weights_from).
FROM_RATIO: Final = "initial_pool_ratio"
FROM_TYPICAL_STEP: Final = "typical_step"
FROM_CONSTRAINTS: Final = "constraints"
FROM_DEFAULT: Final = "one request of 2048 tokens"
FROM_TUNING: Final = "sampled lengths"


class LevelSizing:
    """How the quota of one level is divided into slots, and why. Lists are by pool group."""

    def __init__(self, tier: CacheTier, asked: int, quota: int, granularity: int) -> None:
        self.tier = tier
        self.asked = asked  # bytes, as configured or passed to a resize
        self.quota = quota  # bytes, rounded up to the granularity and raised to the minimum
        self.granularity = granularity  # bytes of a grain; never changes, since physical chunks have this size
        self.slots: list[int] = []
        self.weights: list[float] = []  # requested shares; sum 1
        self.weights_from = FROM_DEFAULT
        self.floors: list[int] = []  # the fewest slots that each may have
        self.minimum_quota = 0  # bytes of the floors, in whole grains
        self.pinned: list[bool] = []  # whether the floor, not the weight, decided the slots

    def pool_bytes(self, layout: StorageLayout) -> list[int]:
        """Bytes of the slots, by pool group, not rounded to grains."""
        return [count * layout.slot_bytes(pool_group) for pool_group, count in enumerate(self.slots)]

    def used_quota(self, layout: StorageLayout) -> int:
        """Bytes of the grains that the slots occupy. The rest of the quota is too small for one more slot."""
        grains = [grains_for_slots(count, layout.slot_sizes[pg], self.granularity) for pg, count in enumerate(self.slots)]
        return sum(grains) * self.granularity

    def with_slots(self, layout: StorageLayout, slots: list[int]) -> LevelSizing:
        """This sizing with fewer slots, for a level that lost memory in a failed resize."""
        smaller = LevelSizing(self.tier, self.asked, self.quota, self.granularity)
        smaller.weights = self.weights
        smaller.weights_from = self.weights_from
        smaller.floors = self.floors
        smaller.minimum_quota = self.minimum_quota
        smaller.pinned = self.pinned
        smaller.slots = list(slots)
        smaller.quota = smaller.used_quota(layout)
        return smaller

    def ratio(self, layout: StorageLayout) -> list[float]:
        """Each pool group's share of the bytes of all slots."""
        return normalised(self.pool_bytes(layout))


# --- grains


def grains_for_slots(num_slots: int, slot_sizes: list[int], granularity: int) -> int:
    """Grains that the pools of one group need for this many slots."""
    grains = 0
    for size in slot_sizes:
        grains += ceil_div(num_slots * size, granularity)
    return grains


def grains_to_slots(grains: int, slot_sizes: list[int], granularity: int) -> int:
    """The most slots that fit this many grains; pools share no grain. O(pools * log(grains))."""
    total = sum(slot_sizes)
    # n slots of `total` bytes need at least n * total / granularity grains, and at most one more for each pool.
    low = max(0, (grains - len(slot_sizes)) * granularity // total)
    high = max(0, grains * granularity // total)
    while low < high:
        middle = (low + high + 1) // 2
        if grains_for_slots(middle, slot_sizes, granularity) <= grains:
            low = middle
        else:
            high = middle - 1
    return low


def min_quota(slot_sizes: list[list[int]], floors: list[int], granularity: int) -> int:
    """The smallest quota with which a level can have its floors."""
    return sum([grains_for_slots(floor, sizes, granularity) for floor, sizes in zip(floors, slot_sizes, strict=True)]) * granularity


# --- dividing a quota


def split_quota(
    quota: int, granularity: int, slot_sizes: list[list[int]], weights: Sequence[float], min_slots: list[int]
) -> list[int]:
    """Slots of each pool group: divided by weight, at least the floors, with no grains left over for one more slot.

    Rounds half to even; ties between groups go to the earlier one. O(pool groups squared) besides the grains left over. Raises
    ConfigError if the quota is not a multiple of the granularity, a weight is not positive, or the floors do not fit.
    """
    _check_split(quota, granularity, slot_sizes, weights, min_slots)
    shares = integer_weights(weights)
    slots = list(min_slots)
    active = list(range(len(slot_sizes)))
    budget = quota // granularity
    while len(active) > 0:
        proposed = _propose(budget, granularity, slot_sizes, shares, active)
        pinned = [group for group in active if proposed[group] <= min_slots[group]]
        fixed = active if len(pinned) == 0 else pinned  # first fix groups at their floors; the others share the rest anew
        for group in fixed:
            wanted = max(proposed[group], min_slots[group])
            grains = grains_for_slots(wanted, slot_sizes[group], granularity)
            slots[group] = grains_to_slots(grains, slot_sizes[group], granularity)
            budget -= grains
        active = [group for group in active if group not in fixed]
    assert budget >= 0
    _hand_out(budget, granularity, slot_sizes, shares, slots)
    return slots


def _check_split(quota: int, granularity: int, slot_sizes: list[list[int]], weights: Sequence[float], min_slots: list[int]) -> None:
    if quota % granularity != 0:
        raise ConfigError(
            f"quota {quota} is not a multiple of the granularity {granularity}; round it up to {round_up(quota, granularity)}"
        )
    if len(weights) != len(slot_sizes) or len(min_slots) != len(slot_sizes):
        raise ConfigError(
            f"{len(weights)} weights and {len(min_slots)} floors for {len(slot_sizes)} pool groups; pass one of each for each group"
        )
    if not all(0.0 < weight < math.inf for weight in weights):
        raise ConfigError(f"the weights of the pool groups are {list(weights)}; all must be positive and finite")
    needed = min_quota(slot_sizes, min_slots, granularity)
    if quota < needed:
        raise ConfigError(f"insufficient quota: {quota} bytes, but the floors {min_slots} need {needed} bytes")


def _propose(budget: int, granularity: int, slot_sizes: list[list[int]], shares: list[int], active: list[int]) -> list[int]:
    """Slots by weight alone. The smallest weight comes first, so that larger ones get the grains that it cannot use."""
    proposed = [0] * len(slot_sizes)
    remaining = sum([shares[group] for group in active])
    for _share, group in sorted([(shares[group], group) for group in active]):
        grains = round_half_even(budget * shares[group], remaining)
        remaining -= shares[group]
        proposed[group] = grains_to_slots(grains, slot_sizes[group], granularity)
        budget -= grains_for_slots(proposed[group], slot_sizes[group], granularity)
    return proposed


def _hand_out(budget: int, granularity: int, slot_sizes: list[list[int]], shares: list[int], slots: list[int]) -> None:
    """Distribute the grains left over, each time to the group that has the fewest bytes for its weight."""
    totals = [sum(sizes) for sizes in slot_sizes]
    while True:
        chosen = -1
        cost = 0
        for group, sizes in enumerate(slot_sizes):
            more = grains_for_slots(slots[group] + 1, sizes, granularity) - grains_for_slots(slots[group], sizes, granularity)
            if more > budget:
                continue
            # bytes / weight, compared exactly by cross multiplication
            if chosen < 0 or slots[group] * totals[group] * shares[chosen] < slots[chosen] * totals[chosen] * shares[group]:
                chosen, cost = group, more
        if chosen < 0:
            return
        grains = grains_for_slots(slots[chosen], slot_sizes[chosen], granularity) + cost
        slots[chosen] = grains_to_slots(grains, slot_sizes[chosen], granularity)
        budget -= cost


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Integers in the exact proportions of positive, finite floats."""
    ratios = [float(weight).as_integer_ratio() for weight in weights]
    common = math.lcm(*[denominator for _numerator, denominator in ratios])
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def normalised(amounts: Sequence[int]) -> list[float]:
    """The amounts as fractions of their sum; equal fractions if the sum is 0."""
    total = sum(amounts)
    if total == 0:
        return [1.0 / len(amounts)] * len(amounts)
    return [amount / total for amount in amounts]


# --- floors and weights


def structural_slots(layout: StorageLayout) -> list[int]:
    """The fewest slots, by pool group, with which a single request cannot deadlock."""
    widest = 0
    for cycle in layout.life_cycles:
        if cycle.window_size is not None:
            widest = max(widest, cycle.structural_floor(0))
    return by_pool_group(layout, [cycle.structural_floor(widest) for cycle in layout.life_cycles])


def min_slots(layout: StorageLayout, config: KVCacheManagerConfig, level: CacheLevel = GPU_LEVEL) -> list[int]:
    """The floors of a level, by pool group.

    On the GPU they are enough to resume all requests of each constraint, in any order, from a cached common prompt. They include
    the slots that must stay free because of max_util_for_resume. Colder levels only need what a single request holds.
    """
    floors = structural_slots(layout)
    if level == GPU_LEVEL:
        numerator, denominator = exact_fraction(config.max_util_for_resume)
        for batch in config.constraints:
            needs = resume_needs(layout, config, batch)
            for pool_group, count in enumerate(batch_slots(layout, batch)):
                passing = max(count, needs.running[pool_group], needs.waiting[pool_group])
                needed = max(ceil_div(passing * denominator, numerator), needs.starting[pool_group])
                floors[pool_group] = max(floors[pool_group], needed)
    return floors


def exact_fraction(value: float) -> tuple[int, int]:
    """The decimal number that a user wrote, as (numerator, denominator): 97/100 for 0.97, which a float only approximates."""
    return Fraction(repr(float(value))).as_integer_ratio()


def initial_weights(layout: StorageLayout, config: KVCacheManagerConfig) -> tuple[list[float], str]:
    """Shares of the pool groups, and the part of the configuration that they come from."""
    ratio = config.initial_pool_ratio
    if ratio is not None:
        weights = [0.0] * layout.num_pool_groups
        for life_cycle, weight in enumerate(ratio):
            weights[layout.pool_group_of[life_cycle]] += weight
        return weights, FROM_RATIO
    if config.typical_step is not None:
        return _slot_weights(layout, batch_slots(layout, config.typical_step)), FROM_TYPICAL_STEP
    if len(config.constraints) > 0:
        return _slot_weights(layout, min_slots(layout, config)), FROM_CONSTRAINTS
    capacity, history = DEFAULT_REQUEST
    return _slot_weights(layout, batch_slots(layout, BatchDesc([KVCacheDesc(capacity, history)]))), FROM_DEFAULT


def _slot_weights(layout: StorageLayout, slots: list[int]) -> list[float]:
    """Shares of bytes, before rounding to grains, which would distort small models. No share is 0."""
    return normalised([max(1, count) * layout.slot_bytes(pool_group) for pool_group, count in enumerate(slots)])


def weights_from_length(layout: StorageLayout, history: int, capacity: int) -> list[float]:
    """Shares of bytes of one request with these lengths. A capacity below the history is raised to it, with a warning."""
    if capacity < history:
        logger.warning("capacity %d is below the history %d; raised to it", capacity, history)
        capacity = history
    return normalised(length_bytes(layout, history, capacity))


# --- levels


def size_levels(layout: StorageLayout, config: KVCacheManagerConfig) -> list[LevelSizing]:
    """Slots of all levels, warm to cold.

    A quota below its minimum is raised to it, with one warning. Raises ConfigError instead if `strict_quota` is set, and if page
    indices of the GPU's slots would not fit int32.
    """
    sizings, raised = plan_levels(layout, config)
    if len(raised) > 0:
        text = "; ".join(raised)
        if config.strict_quota:
            raise ConfigError(f"{text}; raise the quota, lower the constraints, or leave strict_quota unset")
        logger.warning("%s; raised to the minimum", text)
    check_index_range(layout, sizings[GPU_LEVEL].slots)
    return sizings


def plan_levels(layout: StorageLayout, config: KVCacheManagerConfig) -> tuple[list[LevelSizing], list[str]]:
    """The sizing of each level, and a sentence for each quota that was raised to its minimum."""
    weights, weights_from = initial_weights(layout, config)
    sizings: list[LevelSizing] = []
    raised: list[str] = []
    for index, tier_config in enumerate(config.cache_tiers):
        asked = tier_config.bytes_for([layout.slot_bytes(group) for group in range(layout.num_pool_groups)])
        granularity = tier_config.granularity()
        floors = min_slots(layout, config, CacheLevel(index))
        minimum = min_quota(layout.slot_sizes, floors, granularity)
        quota = max(round_up(asked, granularity), minimum)
        if asked < minimum and tier_config.exact_size:
            raise ConfigError(
                f"level {index} has slots of {asked} bytes in all, but needs {minimum}: raise num_slots, or lower the constraints"
            )
        if round_up(asked, granularity) < minimum:
            raised.append(
                f"level {index} ({tier_config.tier.name}): quota of {asked} bytes is below the minimum of {minimum} bytes"
            )
        sizings.append(make_sizing(layout, LevelSizing(tier_config.tier, asked, quota, granularity), weights, weights_from, floors))
    return sizings, raised


def make_sizing(
    layout: StorageLayout, sizing: LevelSizing, weights: list[float], weights_from: str, floors: list[int]
) -> LevelSizing:
    """Fill in the slots and their reasons, for a quota in whole grains."""
    sizing.weights = list(weights)
    sizing.weights_from = weights_from
    sizing.floors = list(floors)
    sizing.minimum_quota = min_quota(layout.slot_sizes, floors, sizing.granularity)
    sizing.slots = split_quota(sizing.quota, sizing.granularity, layout.slot_sizes, weights, floors)
    by_weight = _propose(
        sizing.quota // sizing.granularity,
        sizing.granularity,
        layout.slot_sizes,
        integer_weights(weights),
        list(range(layout.num_pool_groups)),
    )
    sizing.pinned = [proposed <= floor for proposed, floor in zip(by_weight, floors, strict=True)]
    return sizing


def resized(
    layout: StorageLayout, current: LevelSizing, quota: int | None = None, weights: list[float] | None = None
) -> LevelSizing:
    """The sizing of a level with a new quota, new weights, or both. Does not change `current`.

    Raises ConfigError if the quota is below the level's minimum, or if page indices would not fit int32.
    """
    asked = current.asked if quota is None else quota
    rounded = current.quota if quota is None else round_up(quota, current.granularity)
    if rounded < current.minimum_quota:
        raise ConfigError(
            f"quota of {asked} bytes is below the minimum of {current.minimum_quota} bytes of the {current.tier.name} level"
        )
    sizing = LevelSizing(current.tier, asked, rounded, current.granularity)
    if weights is None:
        make_sizing(layout, sizing, current.weights, current.weights_from, current.floors)
    else:
        make_sizing(layout, sizing, weights, FROM_TUNING, current.floors)
    if current.tier == CacheTier.GPU_MEM:
        check_index_range(layout, sizing.slots)
    return sizing


def check_index_range(layout: StorageLayout, slots: list[int]) -> None:
    """Raise ConfigError if page indices of some buffer would not fit int32, the type that kernels read."""
    for pool_group, count in enumerate(slots):
        limit = layout.max_slots(pool_group)
        if count > limit:
            raise ConfigError(
                f"pool group {pool_group} would get {count} slots of {layout.index_span[pool_group]} page indices each, "
                f"more than fit int32; at most {limit} slots are possible: lower the GPU quota or use larger blocks"
            )


# --- the longest possible sequence


def clamp_max_seq_len(layout: StorageLayout, slots: list[int], batch_size: int, upper: int, max_util: float = 1.0) -> int:
    """The longest history, at most `upper`, of one request of a batch whose other requests have one token each.

    All requests must fit the slots, with scratch reuse also during a prefill in one step. All but one may use at most `max_util` of
    the slots, since the last one could not be resumed otherwise. Returns `upper`, a multiple of the block length, or 0. O(life
    cycles * log(upper)). Raises ConfigError if batch_size < 1 or upper < 0.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; it must be at least 1")
    if upper < 0:
        raise ConfigError(f"upper is {upper}; it must be at least 0")
    if upper == 0:
        return 0
    if _seq_len_fits(layout, slots, batch_size, upper, max_util):
        return upper
    low, high = 0, upper // layout.tokens_per_block
    while low < high:
        middle = (low + high + 1) // 2
        if _seq_len_fits(layout, slots, batch_size, middle * layout.tokens_per_block, max_util):
            low = middle
        else:
            high = middle - 1
    return low * layout.tokens_per_block


def _seq_len_fits(layout: StorageLayout, slots: list[int], batch_size: int, tokens: int, max_util: float) -> bool:
    longest = history_slots(layout, tokens)
    shortest = history_slots(layout, 1)
    numerator, denominator = exact_fraction(max_util)
    for pool_group, there in enumerate(slots):
        if longest[pool_group] + (batch_size - 1) * shortest[pool_group] > there:
            return False
        if batch_size > 1:
            before_last = longest[pool_group] + (batch_size - 2) * shortest[pool_group]
            if before_last * denominator > there * numerator:
                return False
    return True
