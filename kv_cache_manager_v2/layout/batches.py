"""How many slots a batch of requests needs.

Blocks of the common prompt count once, as long as some request needs them. Beyond them each request needs slots for its own blocks,
except stale blocks, and blocks that share scratch slots.
"""

from __future__ import annotations

from kv_cache_manager_v2.config import BatchDesc, KVCacheDesc, KVCacheManagerConfig
from kv_cache_manager_v2.layout.life_cycle import LifeCycle
from kv_cache_manager_v2.layout.pools import StorageLayout


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    """Blocks in both ranges."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def _shared_blocks(cycle: LifeCycle, batch: BatchDesc, prompt_blocks: int) -> int:
    """Blocks of the common prompt that are not stale for every request."""
    beg, end = 0, prompt_blocks
    for request in batch.kv_caches:
        stale_beg, stale_end = cycle.stale(request.history_length)
        beg, end = max(beg, stale_beg), min(end, stale_end)
    return prompt_blocks - max(0, end - beg)


def request_slots(layout: StorageLayout, life_cycle: int, request: KVCacheDesc, prompt_blocks: int = 0) -> int:
    """Slots of one life cycle that a request needs beyond the common prompt, scratch slots included."""
    cycle = layout.life_cycles[life_cycle]
    if not cycle.is_attention:
        return 1  # its live state, even without any token
    history, capacity = request.history_length, request.capacity
    prompt = (0, prompt_blocks)
    stale = cycle.stale(history)
    own = cycle.blocks(history, capacity) - (prompt_blocks - _overlap(stale, prompt))
    if layout.max_rewind is None:
        return max(0, own)
    scratch = cycle.scratch(history, capacity, layout.max_rewind)
    scratch_blocks = _overlap(scratch, scratch)
    # Scratch blocks are after the history and stale blocks before it, so only blocks of the prompt could be subtracted twice.
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
    """Slots, by pool group, that a batch with a cached common prompt needs until all of its requests are active."""

    def __init__(self, num_pool_groups: int) -> None:
        self.running = [0] * num_pool_groups  # when all requests are active
        self.waiting = [0] * num_pool_groups  # when all but one are, the most over all choices of it; max_util_for_resume applies
        self.starting = [0] * num_pool_groups  # while that one resumes: includes its copies of pages that it will write to


def resume_needs(layout: StorageLayout, config: KVCacheManagerConfig, batch: BatchDesc) -> ResumeNeeds:
    """The slots that it takes to resume all requests of a batch whose common prompt is cached.

    An active request has the given lengths, or fewer pages just after its match. A suspended one may need prompt blocks that are
    stale for the others. While it resumes, its recurrent state and the block of a partial match exist twice: cached and copied.
    """
    needs = ResumeNeeds(layout.num_pool_groups)
    count = len(batch.kv_caches)
    own_of = [[0] * layout.num_pool_groups for _request in range(count)]  # pages of each request alone, once it is active
    waits_of = [[0] * layout.num_pool_groups for _request in range(count)]  # pages that it copies from and no other request needs
    copies_of = [[0] * layout.num_pool_groups for _request in range(count)]  # pages that it copies to
    size = layout.tokens_per_block
    for cycle in layout.life_cycles:
        group = layout.pool_group_of[cycle.index]
        shared: list[tuple[int, int]] = []  # prompt blocks that active requests need
        start: list[tuple[int, int]] = []  # prompt blocks that suspended requests need
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
        all_own = sum([own_of[number][pool_group] for number in range(count)])
        prompt = needs.waiting[pool_group]
        needs.running[pool_group] += all_own
        needs.waiting[pool_group] = 0
        for number in range(count):
            waiting = prompt + all_own - own_of[number][pool_group] + waits_of[number][pool_group]
            needs.waiting[pool_group] = max(needs.waiting[pool_group], waiting)
            needs.starting[pool_group] = max(needs.starting[pool_group], waiting + copies_of[number][pool_group])
    return needs


def _found(layout: StorageLayout, config: KVCacheManagerConfig, request: KVCacheDesc, prompt: int) -> tuple[int, int]:
    """The least and the most tokens of the common prompt that a request can match.

    A request within the prompt computes its own last token, and with windows or recurrent layers it may match nothing. Without
    partial reuse only whole blocks are certain to match.
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
    """The ranges of the first `blocks` blocks that are not stale at this history."""
    beg, end = cycle.stale(history)
    return [(0, min(beg, blocks)), (end, blocks)]


def _covered(ranges: list[tuple[int, int]]) -> int:
    """The number of blocks in the union of the ranges."""
    count = 0
    reached = 0
    for beg, end in sorted(ranges):
        first = max(beg, reached)
        if end > first:
            count += end - first
            reached = end
    return count


def by_pool_group(layout: StorageLayout, by_life_cycle: list[int]) -> list[int]:
    """Sums of counts over the life cycles of each pool group."""
    sums = [0] * layout.num_pool_groups
    for life_cycle, count in enumerate(by_life_cycle):
        sums[layout.pool_group_of[life_cycle]] += count
    return sums


def length_bytes(layout: StorageLayout, history: int, capacity: int) -> list[int]:
    """Bytes of a request with these lengths, by pool group; at least one slot for each life cycle."""
    sums = [0] * layout.num_pool_groups
    for cycle in layout.life_cycles:
        pool_group = layout.pool_group_of[cycle.index]
        sums[pool_group] += max(1, cycle.blocks(history, capacity)) * layout.slot_bytes(pool_group)
    return sums


def history_slots(layout: StorageLayout, tokens: int) -> list[int]:
    """Slots, by pool group, of one request with a history of `tokens`; with scratch reuse also enough to prefill it in one step."""
    slots: list[int] = []
    for cycle in layout.life_cycles:
        need = cycle.blocks(tokens, tokens)
        if layout.max_rewind is not None:
            need = max(need, request_slots(layout, cycle.index, KVCacheDesc(tokens, 0)))
        slots.append(need)
    return by_pool_group(layout, slots)
