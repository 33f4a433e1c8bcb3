"""How many slots a batch of requests needs.

Rule: what requests share is counted once. The blocks of the common prompt count once as long as any request still needs them;
beyond that, each request pays for its own blocks, less those that fell out of every window, less those that borrow scratch slots.
"""

from __future__ import annotations

from kv_cache_manager_v2.config import BatchDesc, KVCacheDesc, KVCacheManagerConfig
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.layout.pools import StorageLayout


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    """Blocks in both ranges."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def _shared_blocks(cycle: LifeCycle, batch: BatchDesc, prompt_blocks: int) -> int:
    """Blocks of the common prompt that at least one request still needs."""
    beg, end = 0, prompt_blocks
    for request in batch.kv_caches:
        stale_beg, stale_end = cycle.stale(request.history_length)
        beg, end = max(beg, stale_beg), min(end, stale_end)
    return prompt_blocks - max(0, end - beg)


def request_slots(layout: StorageLayout, life_cycle: int, request: KVCacheDesc, prompt_blocks: int = 0) -> int:
    """Slots of one life cycle that a request needs beyond the common prompt, scratch slots included."""
    cycle = layout.life_cycles[life_cycle]
    if not cycle.is_attention:
        return 1  # its live state, also with no token at all
    history, capacity = request.history_length, request.capacity
    prompt = (0, prompt_blocks)
    stale = cycle.stale(history)
    own = cycle.blocks(history, capacity) - (prompt_blocks - _overlap(stale, prompt))
    if layout.max_rewind is None:
        return max(0, own)
    scratch = cycle.scratch(history, capacity, layout.max_rewind)
    scratch_blocks = _overlap(scratch, scratch)
    # Scratch lies beyond the history, stale blocks before it: only blocks of a prompt not yet computed could be subtracted twice.
    own -= scratch_blocks - _overlap(scratch, prompt)
    return max(0, own) + layout.scratch_slots(life_cycle, scratch_blocks)


def life_cycle_slots(layout: StorageLayout, batch: BatchDesc) -> list[int]:
    """Slots that a batch needs, by life cycle."""
    prompt_blocks = batch.system_prompt_length // layout.tokens_per_block
    needs: list[int] = []
    for cycle in layout.life_cycles:
        if cycle.is_attention and len(batch.kv_caches) > 0:
            need = _shared_blocks(cycle, batch, prompt_blocks)
            need += sum([request_slots(layout, cycle.index, request, prompt_blocks) for request in batch.kv_caches])
        else:
            need = 0 if cycle.is_attention else len(batch.kv_caches)
        needs.append(need)
    return needs


def batch_slots(layout: StorageLayout, batch: BatchDesc) -> list[int]:
    """Slots that a batch needs, by pool group."""
    return by_pool_group(layout, life_cycle_slots(layout, batch))


class ResumeNeeds:
    """Slots, by pool group, that a batch needs until all of its requests run, from a cached common prompt on."""

    def __init__(self, num_pool_groups: int) -> None:
        self.running = [0] * num_pool_groups  # in use when all run, and when one of them waits again
        self.waiting = [0] * num_pool_groups  # in use when all but one run, whichever that is: the gate lets it pass
        self.starting = [0] * num_pool_groups  # ... and what it takes more, while it copies what it will write into


def resume_needs(layout: StorageLayout, config: KVCacheManagerConfig, batch: BatchDesc) -> ResumeNeeds:
    """What it takes to start a batch whose common prompt is in the cache.

    Running requests are as described, or at the match, which takes no more pages of their own. A waiting one may still need prompt
    blocks that fell out of the others' windows. The block that its match ends in and its recurrent state are there twice while it
    starts: cached, and copied.
    """
    needs = ResumeNeeds(layout.num_pool_groups)
    count = len(batch.kv_caches)
    own_of = [[0] * layout.num_pool_groups for _request in range(count)]  # what each has alone once it runs
    waits_of = [[0] * layout.num_pool_groups for _request in range(count)]  # what it copies from, if no other request needs that
    copies_of = [[0] * layout.num_pool_groups for _request in range(count)]
    size = layout.tokens_per_block
    for cycle in layout.life_cycles:
        group = layout.pool_group_of[cycle.index]
        shared: list[tuple[int, int]] = []  # prompt blocks that those who run need
        start: list[tuple[int, int]] = []  # and those who wait
        for number, request in enumerate(batch.kv_caches):
            if not cycle.is_attention:
                own_of[number][group] += 1
                copies_of[number][group] += 1
                waits_of[number][group] += 1 if batch.system_prompt_length > 0 else 0
                continue
            found, most = _found(layout, config, request, batch.system_prompt_length)
            prompt_blocks = found // size
            history = max(request.history_length, found)
            shared += _live(cycle, history, prompt_blocks)
            start += _live(cycle, found, prompt_blocks)
            own = request_slots(layout, cycle.index, KVCacheDesc(request.capacity, history), prompt_blocks)
            if found % size > 0 or most % size > 0:
                own = max(own, 1)
                copies_of[number][group] += 1
            for end in (found, most):
                start.append((end // size, -(-end // size)))
            own_of[number][group] += own
        needs.running[group] += _covered(shared)
        needs.waiting[group] += _covered(shared + start)
    for pool_group in range(layout.num_pool_groups):
        everybody = sum([own_of[number][pool_group] for number in range(count)])
        prompt = needs.waiting[pool_group]
        needs.running[pool_group] += everybody
        needs.waiting[pool_group] = 0
        for number in range(count):
            waiting = prompt + everybody - own_of[number][pool_group] + waits_of[number][pool_group]
            needs.waiting[pool_group] = max(needs.waiting[pool_group], waiting)
            needs.starting[pool_group] = max(needs.starting[pool_group], waiting + copies_of[number][pool_group])
    return needs


def _found(layout: StorageLayout, config: KVCacheManagerConfig, request: KVCacheDesc, prompt: int) -> tuple[int, int]:
    """The least and the most tokens of the prompt with which a request starts; it is given what it takes of its own with the least.

    One that is no longer than the prompt computes its last token itself; but windows and recurrent layers keep nothing for a
    shorter prompt. Without partial reuse, only a prompt that ends there finds the end of this one.
    """
    short = request.capacity <= prompt
    most = max(0, request.capacity - 1) if short else prompt
    least = most if config.enable_partial_reuse else most - most % layout.tokens_per_block
    if short:
        for cycle in layout.life_cycles:
            if not cycle.is_attention or cycle.window_size is not None:
                least = 0
    return max(0, least - config.reuse_match_backoff), max(0, most - config.reuse_match_backoff)


def _live(cycle: LifeCycle, history: int, blocks: int) -> list[tuple[int, int]]:
    """Those of the first so many blocks that are needed at a history."""
    beg, end = cycle.stale(history)
    return [(0, min(beg, blocks)), (end, blocks)]


def _covered(ranges: list[tuple[int, int]]) -> int:
    """Blocks in any of the ranges."""
    count = 0
    reached = 0
    for beg, end in sorted(ranges):
        first = max(beg, reached)
        if end > first:
            count += end - first
            reached = end
    return count


def by_pool_group(layout: StorageLayout, by_life_cycle: list[int]) -> list[int]:
    """Sum counts of life cycles over those that share a pool group."""
    sums = [0] * layout.num_pool_groups
    for life_cycle, count in enumerate(by_life_cycle):
        sums[layout.pool_group_of[life_cycle]] += count
    return sums


def length_bytes(layout: StorageLayout, history: int, capacity: int) -> list[int]:
    """Bytes that one request of this shape takes, by pool group; at least one slot of each life cycle."""
    sums = [0] * layout.num_pool_groups
    for cycle in layout.life_cycles:
        pool_group = layout.pool_group_of[cycle.index]
        sums[pool_group] += max(1, cycle.blocks(history, capacity)) * layout.slot_bytes(pool_group)
    return sums


def settled_slots(layout: StorageLayout, tokens: int) -> list[int]:
    """Slots, by pool group, of one request whose `tokens` tokens are all settled; with scratch reuse also enough to prefill them in
    one step, since that is what scratch is for."""
    slots: list[int] = []
    for cycle in layout.life_cycles:
        need = cycle.blocks(tokens, tokens)
        if layout.max_rewind is not None:
            need = max(need, request_slots(layout, cycle.index, KVCacheDesc(tokens, 0)))
        slots.append(need)
    return by_pool_group(layout, slots)
