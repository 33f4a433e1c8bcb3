"""nano-vllm's block manager over kv_cache_manager_v2. Before the engine is made:

    nanovllm.engine.scheduler.BlockManager = KvcmBlockManager

The engine's workers own the memory of the pages; the manager keeps the books. An engine without a GPU may use it too.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import kv_cache_manager_v2 as kvcm


class Sequence(Protocol):
    """What the block manager reads of nano-vllm's sequences, and writes: `block_table` and `num_cached_tokens`."""

    seq_id: int
    token_ids: list[int]  # prompt and output
    block_table: list[int]
    num_cached_tokens: int  # whose keys and values are there
    num_scheduled_tokens: int  # of the running step

    @property
    def num_blocks(self) -> int: ...

    def __len__(self) -> int: ...


class KvcmBlockManager:
    """The six methods that nano-vllm's scheduler calls."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        config = kvcm.KVCacheManagerConfig(
            tokens_per_block=block_size,
            cache_tiers=[kvcm.ExternalGpuTierConfig(num_blocks)],
            layers=[
                kvcm.AttentionLayerConfig(0, [kvcm.BufferConfig("kv", 1)])
            ],  # all layers have one block table; bytes do not matter
            max_util_for_resume=1.0,
            enable_partial_reuse=False,
            enable_stats=False,
            text_only=True,
        )
        self.driver = kvcm.EmulatedDriver()  # for the order of steps only
        self.stream = self.driver.create_stream()
        self.manager = kvcm.KVCacheManager(config, driver=self.driver)
        self.group = self.manager.get_layer_group_id(0)
        self.block_size = block_size
        self.matches: dict[int, kvcm.ReuseMatch] = {}  # of waiting sequences
        self.caches: dict[int, kvcm.KVCache] = {}  # of running sequences

    def can_allocate(self, seq: Sequence) -> int:
        """How many blocks of a waiting sequence are cached, never its last one; -1 if the others do not fit now."""
        match = self.matches.get(seq.seq_id)
        if match is None:
            limits = kvcm.MatchLimits(max_tokens=(seq.num_blocks - 1) * self.block_size)
            match = self.matches[seq.seq_id] = self.manager.find_reuse(None, array("i", seq.token_ids), limits)
        with self.manager.create_kv_cache(reuse_match=match) as cache:  # the blocks that it holds are not free
            fits = seq.num_blocks - cache.num_blocks <= sum(self.manager.free_and_evictable())
            return cache.num_blocks if fits else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        """Admit a sequence directly after `can_allocate`."""
        cache = self.caches[seq.seq_id] = self.manager.create_kv_cache(reuse_match=self.matches.pop(seq.seq_id))
        if (
            cache.num_blocks != num_cached_blocks
            or not cache.resume(self.stream)
            or not cache.resize(seq.num_blocks * self.block_size)
        ):
            raise RuntimeError("call allocate() directly after can_allocate()")
        seq.num_cached_tokens = cache.num_committed_tokens
        seq.block_table.extend(cache.get_base_page_indices(self.group))

    def deallocate(self, seq: Sequence) -> None:
        """End a sequence, or preempt it: what is committed stays cached."""
        self.caches.pop(seq.seq_id).close()
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    def can_append(self, seq: Sequence) -> bool:
        """Whether there is a page for the last token. Takes it."""
        return self.caches[seq.seq_id].resize(seq.num_blocks * self.block_size)

    def may_append(self, seq: Sequence) -> None:
        """Add the last token's page to the block table."""
        seq.block_table.extend(self.caches[seq.seq_id].get_base_page_indices(self.group)[len(seq.block_table) :])

    def hash_blocks(self, seq: Sequence) -> None:
        """Commit the blocks that the step has filled. Pages may be exchanged for cached ones: each step reads the table anew."""
        first = seq.num_cached_tokens // self.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        if first < end:
            cache = self.caches[seq.seq_id]
            cache.commit(seq.token_ids[first * self.block_size : end * self.block_size])
            seq.block_table[first:end] = cache.get_base_page_indices(self.group)[first:end]
