"""How a tier's quota becomes slot counts.

Rule: memory is bought in *grains* (the tier's granularity), and no decision about it is taken in floats. A quota is rounded up to
whole grains and split by weight; the floors win over the weights; what rounding leaves over is handed out until not one more slot
of any pool group fits. The split is a function of its arguments alone, so repeating it never loses a grain.
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
from kv_cache_manager_v2.layout.batches import batch_slots, by_pool_group, length_bytes, resume_needs, settled_slots
from kv_cache_manager_v2.layout.pools import StorageLayout

logger: Final = logging.getLogger(__name__)

DEFAULT_REQUEST: Final = (2049, 2048)  # capacity, history of the one request that sizes the pools when nothing is configured

# Where a level's weights came from (LevelSizing.weights_from).
FROM_RATIO: Final = "initial_pool_ratio"
FROM_TYPICAL_STEP: Final = "typical_step"
FROM_CONSTRAINTS: Final = "constraints"
FROM_DEFAULT: Final = "one request of 2048 tokens"
FROM_TUNING: Final = "sampled lengths"


class LevelSizing:
    """How one level's quota became slots, and what bound it. Lists by pool group."""

    def __init__(self, tier: CacheTier, asked: int, quota: int, granularity: int) -> None:
        self.tier = tier
        self.asked = asked  # bytes, as configured or passed to a resize
        self.quota = quota  # bytes, rounded up to the granularity, and raised to the minimum where that is more
        self.granularity = granularity  # bytes of a grain; fixed for the level's life, since physical chunks have this size
        self.slots: list[int] = []
        self.weights: list[float] = []  # shares asked for; sum 1
        self.weights_from = FROM_DEFAULT
        self.floors: list[int] = []  # slots that the level must have
        self.minimum_quota = 0  # bytes: the floors, in whole grains
        self.pinned: list[bool] = []  # whether the floor, not the weight, decided

    def pool_bytes(self, layout: StorageLayout) -> list[int]:
        """Bytes of the slots, by pool group, before rounding to grains."""
        return [count * layout.slot_bytes(pool_group) for pool_group, count in enumerate(self.slots)]

    def used_quota(self, layout: StorageLayout) -> int:
        """Bytes of the grains that the slots occupy; the rest of the quota holds no further slot of any pool group."""
        grains = [grains_for_slots(count, layout.slot_sizes[pg], self.granularity) for pg, count in enumerate(self.slots)]
        return sum(grains) * self.granularity

    def with_slots(self, layout: StorageLayout, slots: list[int]) -> LevelSizing:
        """This sizing, for a level that has fewer slots: the device did not give their memory back."""
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
    """Grains that the pools of one group need for so many slots."""
    grains = 0
    for size in slot_sizes:
        grains += ceil_div(num_slots * size, granularity)
    return grains


def grains_to_slots(grains: int, slot_sizes: list[int], granularity: int) -> int:
    """Most slots that fit so many grains, each pool in grains of its own; exact. O(pools * log(grains))."""
    total = sum(slot_sizes)
    # n slots need at least n * total / g grains, and at most one more for each pool.
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
    """Bytes without which a level cannot have its floors."""
    return sum([grains_for_slots(floor, sizes, granularity) for floor, sizes in zip(floors, slot_sizes, strict=True)]) * granularity


# --- splitting a quota


def split_quota(
    quota: int, granularity: int, slot_sizes: list[list[int]], weights: Sequence[float], min_slots: list[int]
) -> list[int]:
    """Slots for each pool group: by weight, never below the floors, and nothing left over that one more slot could use.

    Raises ConfigError if the quota is no multiple of the granularity, a weight is not positive, or the floors do not fit. At most
    one round for each pool group. Rounding is half to even; ties between groups go to the earlier one.
    """
    _check_split(quota, granularity, slot_sizes, weights, min_slots)
    shares = integer_weights(weights)
    slots = list(min_slots)
    active = list(range(len(slot_sizes)))
    budget = quota // granularity
    while len(active) > 0:
        proposed = _propose(budget, granularity, slot_sizes, shares, active)
        pinned = [group for group in active if proposed[group] <= min_slots[group]]
        settled = active if len(pinned) == 0 else pinned  # those at their floor leave first; the rest share what remains anew
        for group in settled:
            wanted = max(proposed[group], min_slots[group])
            grains = grains_for_slots(wanted, slot_sizes[group], granularity)
            slots[group] = grains_to_slots(grains, slot_sizes[group], granularity)
            budget -= grains
        active = [group for group in active if group not in settled]
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
            f"{len(weights)} weights and {len(min_slots)} floors for {len(slot_sizes)} pool groups; give one of each for each"
        )
    if not all(0.0 < weight < math.inf for weight in weights):
        raise ConfigError(f"weights of the pool groups must be positive, but are {list(weights)}")
    needed = min_quota(slot_sizes, min_slots, granularity)
    if quota < needed:
        raise ConfigError(f"insufficient quota: {quota} bytes, but the least number of slots {min_slots} needs {needed} bytes")


def _propose(budget: int, granularity: int, slot_sizes: list[list[int]], shares: list[int], active: list[int]) -> list[int]:
    """Slots by weight alone. The lightest group chooses first, so that what it cannot use flows to heavier ones."""
    proposed = [0] * len(slot_sizes)
    remaining = sum([shares[group] for group in active])
    for _share, group in sorted([(shares[group], group) for group in active]):
        grains = round_half_even(budget * shares[group], remaining)
        remaining -= shares[group]
        proposed[group] = grains_to_slots(grains, slot_sizes[group], granularity)
        budget -= grains_for_slots(proposed[group], slot_sizes[group], granularity)
    return proposed


def _hand_out(budget: int, granularity: int, slot_sizes: list[list[int]], shares: list[int], slots: list[int]) -> None:
    """Spend left-over grains, one step of one group at a time: always for the group that has least for its weight."""
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
    """Integers in exactly the proportions of positive, finite floats."""
    ratios = [float(weight).as_integer_ratio() for weight in weights]
    common = math.lcm(*[denominator for _numerator, denominator in ratios])
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def normalised(amounts: Sequence[int]) -> list[float]:
    """Shares of a total, each rounded once; equal shares of nothing."""
    total = sum(amounts)
    if total == 0:
        return [1.0 / len(amounts)] * len(amounts)
    return [amount / total for amount in amounts]


# --- floors and weights


def structural_slots(layout: StorageLayout) -> list[int]:
    """Slots, by pool group, without which a single request could deadlock."""
    widest = 0
    for cycle in layout.life_cycles:
        if cycle.window_size is not None:
            widest = max(widest, cycle.structural_floor(0))
    return by_pool_group(layout, [cycle.structural_floor(widest) for cycle in layout.life_cycles])


def min_slots(layout: StorageLayout, config: KVCacheManagerConfig, level: CacheLevel = GPU_LEVEL) -> list[int]:
    """The floors of a level, by pool group.

    On the GPU a constraint's slots are raised by 1 / max_util_for_resume: its last request is resumed only while utilisation is
    below that. They are enough for all of its requests to be resumed, from the common prompt in the cache, in any order. A
    constraint says nothing about colder levels, which only must be able to take in what a single request holds.
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
    """The decimal number that a user wrote, as (numerator, denominator): 0.97 is 97/100, which its binary float is not."""
    return Fraction(repr(float(value))).as_integer_ratio()


def initial_weights(layout: StorageLayout, config: KVCacheManagerConfig) -> tuple[list[float], str]:
    """Shares of the pool groups, and which part of the configuration they follow."""
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
    """Shares of bytes, exact: not rounded to grains first, which would distort small models. No group's share is 0."""
    return normalised([max(1, count) * layout.slot_bytes(pool_group) for pool_group, count in enumerate(slots)])


def weights_from_length(layout: StorageLayout, history: int, capacity: int) -> list[float]:
    """Shares of bytes that one request of this shape takes. A capacity below the history is raised to it, with a warning."""
    if capacity < history:
        logger.warning("capacity %d is below the history %d; raised to it", capacity, history)
        capacity = history
    return normalised(length_bytes(layout, history, capacity))


# --- levels


def size_levels(layout: StorageLayout, config: KVCacheManagerConfig) -> list[LevelSizing]:
    """Slot counts of all levels, warm to cold.

    Raises ConfigError if a quota is below its minimum and `strict_quota` is set (otherwise it is raised, with one warning that
    names both figures), or if page indices of the GPU's slots would not fit int32.
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
    """The sizing of each level, and a sentence for each quota that is below its minimum, raised to it here."""
    weights, weights_from = initial_weights(layout, config)
    sizings: list[LevelSizing] = []
    raised: list[str] = []
    for index, tier_config in enumerate(config.cache_tiers):
        asked = tier_config.quota
        granularity = tier_config.granularity()
        floors = min_slots(layout, config, CacheLevel(index))
        minimum = min_quota(layout.slot_sizes, floors, granularity)
        quota = max(round_up(asked, granularity), minimum)
        if round_up(asked, granularity) < minimum:
            raised.append(
                f"level {index} ({tier_config.tier.name}): quota of {asked} bytes is below the minimum of {minimum} bytes"
            )
        sizings.append(make_sizing(layout, LevelSizing(tier_config.tier, asked, quota, granularity), weights, weights_from, floors))
    return sizings, raised


def make_sizing(
    layout: StorageLayout, sizing: LevelSizing, weights: list[float], weights_from: str, floors: list[int]
) -> LevelSizing:
    """Fill in slots and the reasons for them, for a quota that is already in whole grains."""
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
    """The sizing of a level after a new quota, new weights, or both; `current` is left alone.

    Raises ConfigError if the quota is below the level's minimum (a resize never raises it), or page indices outgrow int32.
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
    """Raise ConfigError if a page index of any buffer could pass 2**31 - 1: kernels read them as int32."""
    for pool_group, count in enumerate(slots):
        limit = layout.max_slots(pool_group)
        if count > limit:
            raise ConfigError(
                f"pool group {pool_group} would get {count} slots of {layout.index_span[pool_group]} page indices each, "
                f"more than int32 can count; at most {limit} slots are possible: lower the GPU quota or use larger blocks"
            )


# --- how long a sequence can become


def clamp_max_seq_len(layout: StorageLayout, slots: list[int], batch_size: int, upper: int, max_util: float = 1.0) -> int:
    """Largest sequence length, not above `upper`, that one request of a batch can reach while the others hold one token each.

    Counts settled tokens; SSM slots; with scratch reuse, a prefill in one step. All requests must fit, and all but the last to be
    resumed must leave the utilisation at or below `max_util`, else that last one would wait for ever. Returns `upper`, or a
    multiple of the block length, or 0. Raises ConfigError if batch_size < 1 or upper < 0. O(life cycles * log(upper)).
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
    longest = settled_slots(layout, tokens)
    shortest = settled_slots(layout, 1)
    numerator, denominator = exact_fraction(max_util)
    for pool_group, there in enumerate(slots):
        if longest[pool_group] + (batch_size - 1) * shortest[pool_group] > there:
            return False
        if batch_size > 1:
            before_last = longest[pool_group] + (batch_size - 2) * shortest[pool_group]
            if before_last * denominator > there * numerator:
                return False
    return True
