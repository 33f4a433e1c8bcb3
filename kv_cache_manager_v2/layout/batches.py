"""How many slots a batch of requests needs.

Rule: what requests share is counted once. The blocks of the common prompt count once as long as any request still needs them;
beyond that, each request pays for its own blocks, less those that fell out of every window, less those that borrow scratch slots.
"""

from __future__ import annotations

from kv_cache_manager_v2.config import BatchDesc, KVCacheDesc
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
