"""The public interface of the reference, TensorRT-LLM's `kv_cache_manager_v2`, as data: names, parameters and defaults.

A default of `...` is one whose value engines do not see. `*` begins parameters that are passed by name alone. What deliberately
differs here is listed in docs/tensorrt_llm.md, with the reason.
"""

from __future__ import annotations

from typing import Final

# Where engines and their tests import names from. "" is the package.
NAMES: Final[dict[str, str]] = {
    "": """
        BACKEND BAD_PAGE_INDEX CACHE_LEVEL1 DEFAULT_BEAM_INDEX GPU_LEVEL NDEBUG
        AggregatedPageDesc AttentionLayerConfig AttnLifeCycle BatchDesc BeamIndex BufferConfig BufferId CacheLevel CacheTier
        CacheTierConfig CoalescedBuffer CorruptedError CuError CudaStream DataRole DiskCacheTierConfig ExpandedBuffer
        GpuCacheTierConfig HalfOpenRange HostCacheTierConfig IKvCacheColdPageCodec KVCacheCreatedData KVCacheDesc KVCacheEvent
        KVCacheEventDiff KVCacheEventManager KVCacheRemovedData KVCacheStoredBlockData KVCacheStoredData KVCacheUpdatedData
        KVCacheIterationStatsDelta KVCacheManager KVCacheManagerConfig KVCacheStatsDelta KvCacheStatus LayerGroupId LayerId
        LifeCycleId MemAddress MmItemContext OutOfMemoryError OutOfPagesError PageIndexConverter PageIndexMode PageStatus
        PlannedDropHandle PoolDesc PoolGroupDesc PoolGroupIndex PoolGroupPeakBlockStats PoolIndex Priority ReuseScope
        ReusedBlocksByLevel ScratchDesc SlidingWindowSize SlotDesc SlotDescVariant SsmLayerConfig SsmSnapshotIterationStatsDelta
        StorageStatistics SwaScratchReuseConfig TokenId TokenIdExt UniqueToken
        create_default_kv_cache_cold_page_codec exact_div gen_multimodal_cache_key_tokens num_live_managers poison_reason
        sequence_to_blockchain_keys take_poison typed_range
        _KVCache _KV_CACHE_ITERATION_STATS_DELTA_FIELDS _cpp_introspection _introspection
    """,
    "_common": "BAD_PAGE_INDEX GPU_LEVEL CACHE_LEVEL1 CacheLevel MemAddress CacheTier TokenIdExt",
    "_config": "DataRole KVCacheManagerConfig",
    "_exceptions": "OutOfPagesError CuError",
    "_introspection": """
        active_page_stats all_tree_pages_droppable attention_life_cycle_ids close_test_block committed_page_is_linked
        compute_slots_for_batch create_test_padding_cold_page_codec current_gpu_ratio event_manager_add_stored_block
        event_manager_add_stored_life_cycle force_rebalance_precondition grains_for_slots grains_to_slots is_commit_allowed
        life_cycle_pool_group_indices make_test_block pool_group_index ratio_to_slot_count_list reuse_match_pages
        reuse_match_planned_drop_counts set_last_adjustment_time set_num_sampled_kv_caches set_target_ratio_list_gpu
        ssm_life_cycle_id storage_statistics storage_utilization swa_life_cycle_ids test_block_key
    """,
    "_utils": "typed_range exact_div",
}

CONSTANTS: Final[dict[str, object]] = {
    "BAD_PAGE_INDEX": -1,
    "GPU_LEVEL": 0,
    "CACHE_LEVEL1": 1,
    "DEFAULT_BEAM_INDEX": 0,
    "CacheTier": {"GPU_MEM": 0, "HOST_MEM": 1, "DISK": 2},
    "PageIndexMode": {"SHARED": 0, "PER_LAYER": 1},
    "PageStatus": {"LOCKED": 1, "HELD": 2, "DROPPABLE": 3},
    "_KV_CACHE_ITERATION_STATS_DELTA_FIELDS": (
        "iter_alloc_total_blocks", "iter_alloc_new_blocks", "iter_reused_blocks", "iter_full_reused_blocks",
        "iter_partial_reused_blocks", "iter_missed_blocks", "iter_gen_alloc_blocks", "iter_onboard_blocks", "iter_onboard_bytes",
        "iter_offload_blocks", "iter_offload_bytes", "iter_intra_device_copy_blocks", "iter_intra_device_copy_bytes",
        "iter_host_dropped_blocks", "iter_host_dropped_bytes",
    ),
}  # fmt: skip

# Functions, constructors and methods, with what they take after `self`.
CALLS: Final[dict[str, str]] = {
    "exact_div": "x, y",
    "gen_multimodal_cache_key_tokens": "id_offset, multi_modal_data_digest, num_tokens, token_offset=0, uuid=None",
    "num_live_managers": "",
    "poison_reason": "",
    "take_poison": "",
    "create_default_kv_cache_cold_page_codec": "",
    "sequence_to_blockchain_keys": "tokens_per_block, reuse_scope, tokens",
    # configuration
    "GpuCacheTierConfig": "quota",
    "HostCacheTierConfig": "quota",
    "DiskCacheTierConfig": "quota, path",
    "GpuCacheTierConfig.assert_valid": "",
    "BufferConfig": "role, size, tokens_per_block_override=None",
    "AttentionLayerConfig": "layer_id, buffers, sliding_window_size=None, num_sink_tokens=None",
    "SsmLayerConfig": "layer_id, buffers",
    "KVCacheDesc": "capacity, history_length",
    "BatchDesc": "kv_caches, system_prompt_length=0",
    "SwaScratchReuseConfig": "max_rewind_len=0",
    "KVCacheManagerConfig": (
        "tokens_per_block, cache_tiers, layers, max_util_for_resume=0.97, enable_partial_reuse=True, reuse_match_backoff=0, "
        "constraints=[], typical_step=None, initial_pool_ratio=None, swa_scratch_reuse=None, commit_min_snapshot=False, "
        "enable_stats=True, text_only=False, rebalance_min_sampled_kv_caches=2000, rebalance_cooldown_secs=120.0, "
        "rebalance_target_ratio_update_interval=100, rebalance_ratio_threshold=1.25, rebalance_moving_average_decay=0.9999"
    ),
    # values
    "AttnLifeCycle.get_stale_range": "history_length, tokens_per_block",
    "BufferId": "layer_id, role",
    "HalfOpenRange": "beg, end",
    "MmItemContext": "digest, uuid=None",
    "PlannedDropHandle.drop": "",
    "ReuseScope": "lora_id=None, salt=None",
    "ScratchDesc": "range, slot_ids",
    "PageIndexConverter.__call__": "base_indices, index_mode=None, scratch=None",
    # the manager
    "KVCacheManager": "config, event_manager=None, cold_page_codec=None",
    "KVCacheManager.adjust": "",
    "KVCacheManager.clamp_max_seq_len_for_mem": "batch_size, token_num_upper_bound",
    "KVCacheManager.clear_reusable_blocks": "",
    "KVCacheManager.clear_stats_dirty": "kv_cache_id",
    "KVCacheManager.clear_stats_excluded": "kv_cache_id",
    "KVCacheManager.create_kv_cache": (
        "reuse_scope=None, input_tokens=None, id=None, custom_priority_callback=..., expected_prompt_length=None, text_only=None, "
        "enable_request_stats=False"
    ),
    "KVCacheManager.get_aggregated_pages": "buffer_ids",
    "KVCacheManager.get_and_reset_iteration_cached_tokens_by_level": "",
    "KVCacheManager.get_and_reset_iteration_disk_prefetch_blocks": "",
    "KVCacheManager.get_and_reset_iteration_peak_block_stats": "cache_level",
    "KVCacheManager.get_and_reset_iteration_peak_block_stats_by_level": "",
    "KVCacheManager.get_and_reset_iteration_reused_blocks_by_level": "",
    "KVCacheManager.get_and_reset_iteration_stats": "",
    "KVCacheManager.get_and_reset_iteration_suspend_resume_stats": "",
    "KVCacheManager.get_and_reset_ssm_snapshot_iteration_stats": "",
    "KVCacheManager.get_committed_stats": "",
    "KVCacheManager.get_dirty_stats_kv_cache_ids": "",
    "KVCacheManager.get_layer_group_id": "layer_id",
    "KVCacheManager.get_life_cycle_pool_group_indices": "cache_level=0",
    "KVCacheManager.get_mem_pool_base_address": "layer_id, data_role, index_mode=None",
    "KVCacheManager.get_page_index_converter": "layer_id, data_role",
    "KVCacheManager.get_page_index_scale": "layer_id, data_role",
    "KVCacheManager.get_page_index_upper_bound": "layer_id, data_role",
    "KVCacheManager.get_page_stride": "layer_id, data_role",
    "KVCacheManager.get_quota": "cache_level",
    "KVCacheManager.get_storage_statistics": "cache_level=0",
    "KVCacheManager.is_stats_excluded": "kv_cache_id",
    "KVCacheManager.mark_stats_dirty": "kv_cache_id",
    "KVCacheManager.mark_stats_excluded": "kv_cache_id",
    "KVCacheManager.probe_first_new_block_key": "reuse_scope=None, input_tokens=None",
    "KVCacheManager.probe_reuse": "reuse_scope=None, input_tokens=None",
    "KVCacheManager.record_request_resumed": "",
    "KVCacheManager.record_request_suspended": "",
    "KVCacheManager.resize": "cache_level, quota, best_efforts=False",
    "KVCacheManager.shutdown": "",
    "KVCacheManager.supports_index_mode": "mode",
    # a request
    "_KVCache._get_last_cached_token_level": "",
    "_KVCache._get_num_reusable_tokens_before_hybrid_pruning": "",
    "_KVCache._get_num_reusable_tokens_before_pruning": "",
    "_KVCache.close": "",
    "_KVCache.commit": "accepted_input_tokens, beam_search_indices=None, is_end=False",
    "_KVCache.commit_pending_stats": "",
    "_KVCache.discard_pending_stats": "",
    "_KVCache.get_aggregated_page_indices": "layer_group_id, beam_id=0, valid_only=False",
    "_KVCache.get_base_page_indices": "layer_group_id, beam_id=0",
    "_KVCache.get_scratch_desc": "layer_group_id",
    "_KVCache.get_ssm_block_base_index": "layer_group_id",
    "_KVCache.plan_committed_block_drop": "",
    "_KVCache.prefetch": "target",
    "_KVCache.resize": "capacity, history_length=None",
    "_KVCache.resume": "cuda_stream=None",
    "_KVCache.set_base_page_index_buf": "beam_idx, layer_group_id, buf",
    "_KVCache.stop_committing": "",
    "_KVCache.supports_index_mode": "mode",
    "_KVCache.suspend": "",
    # statistics
    "KVCacheStatsDelta": "alloc_total_blocks=0, alloc_new_blocks=0, reused_blocks=0, missed_blocks=0",
    "KVCacheStatsDelta.add": "other",
    "KVCacheStatsDelta.clear": "",
    "KVCacheStatsDelta.copy": "",
    "KVCacheStatsDelta.subtract": "other",
    "KVCacheIterationStatsDelta": (
        "iter_alloc_total_blocks=0, iter_alloc_new_blocks=0, iter_reused_blocks=0, iter_full_reused_blocks=0, "
        "iter_partial_reused_blocks=0, iter_missed_blocks=0, iter_gen_alloc_blocks=0, iter_onboard_blocks=0, iter_onboard_bytes=0, "
        "iter_offload_blocks=0, iter_offload_bytes=0, iter_intra_device_copy_blocks=0, iter_intra_device_copy_bytes=0, "
        "iter_host_dropped_blocks=0, iter_host_dropped_bytes=0"
    ),
    "ReusedBlocksByLevel": "full=..., partial=...",
    "ReusedBlocksByLevel.add": "other",
    "SsmSnapshotIterationStatsDelta": (
        "iter_snapshot_lookups=0, iter_snapshot_hits=0, iter_snapshot_misses=0, iter_reused_tokens=0, iter_unreused_tokens=0, "
        "iter_aligned_snapshot_hits=0, iter_unaligned_snapshot_hits=0"
    ),
    # events
    "KVCacheEventManager": (
        "max_kv_event_entries, *, window_size=0, attention_dp_rank=None, attention_dp_gather=None, hash_algo='v2_sha256', "
        "window_size_by_layer_group=None, mm_token_id_offset=None"
    ),
    "KVCacheEventManager.add_created_event": "num_blocks_per_cache_level, layer_group_ids=None",
    "KVCacheEventManager.add_removed_event": "block_hashes",
    "KVCacheEventManager.add_stored_block_event_from_block": "block",
    "KVCacheEventManager.flush_iteration_events": "",
    "KVCacheEventManager.get_latest_events": "timeout_ms=None",
    "KVCacheCreatedData": "num_blocks_per_cache_level",
    "KVCacheEvent": "event_id, data, window_size, hash_algo=None, attention_dp_rank=None, layer_group_id=None",
    "KVCacheEventDiff": "old_value, new_value",
    "KVCacheRemovedData": "block_hashes",
    "KVCacheStoredData": "parent_hash, blocks",
    "KVCacheStoredBlockData": "block_hash, tokens, cache_level, priority, mm_keys=[], cache_salt=None",
    "KVCacheUpdatedData": "block_hash, cache_level, priority",
    "UniqueToken": "token_id, token_extra_id=0",
    # introspection
    "_introspection.force_rebalance_precondition": "manager, skew=2.0",
    "_introspection.life_cycle_pool_group_indices": "manager, level=0",
    "_introspection.pool_group_index": "manager, life_cycle, level=0",
    "_introspection.storage_statistics": "manager, cache_level=0",
}

# Calls whose parameters engines pass by position, under names that were not compared; the number of parameters is.
BY_POSITION: Final[dict[str, tuple[int, int]]] = {  # (required, all)
    "AttnLifeCycle.make": (3, 3),
    "KVCacheEventManager.add_stored_life_cycle_event_from_block": (2, 2),
    "KVCacheEventManager.add_removed_life_cycle_event": (2, 2),
    "KVCacheEventManager.set_layer_group_window_sizes": (1, 1),
    "_introspection.committed_page_is_linked": (3, 3),
    "_introspection.compute_slots_for_batch": (4, 4),
    "_introspection.grains_for_slots": (3, 3),
    "_introspection.grains_to_slots": (3, 3),
    "_introspection.make_test_block": (3, 5),
    "_introspection.ratio_to_slot_count_list": (5, 5),
    "_introspection.reuse_match_pages": (4, 5),
    "_introspection.reuse_match_planned_drop_counts": (4, 5),
}

# Attributes and properties; `=` marks those that engines assign.
ATTRIBUTES: Final[dict[str, str]] = {
    "AggregatedPageDesc": "base size stride layer_group_id buffers",
    "AttentionLayerConfig": "window_size",
    "AttnLifeCycle": "window_size num_sink_blocks",
    "CoalescedBuffer": "single_buffer_size buffer_ids size num_buffers",
    "ExpandedBuffer": "id expansion",
    "GpuCacheTierConfig": "tier",
    "KVCacheIterationStatsDelta": "empty iter_cache_hit_rate _field_names",
    "KVCacheManager": """
        all_buffer_ids allow_seq_rebasing cache_tier_list commit_min_snapshot enable_partial_match enable_swa_scratch_reuse
        event_manager init_config layer_grouping layer_ids need_adjustment num_layers pool_group_descs text_only tokens_per_block
    """,
    "KVCacheManagerConfig": "enable_swa_scratch_reuse",
    "KVCacheStatsDelta": "empty",
    "PageIndexConverter": "scale layer_offset expansion scratch_pages_per_block",
    "PoolDesc": "pool_index base_address slot_bytes",
    "PoolGroupDesc": "pool_group_index num_slots slot_desc pools",
    "PoolGroupPeakBlockStats": "available unavailable evictable",
    "ReusedBlocksByLevel": "full partial empty",
    "ScratchDesc": "range slot_ids",
    "SlotDesc": "variants",
    "SlotDescVariant": "layer_group_id coalesced_buffers slot_size_list",
    "SsmSnapshotIterationStatsDelta": "empty iter_snapshot_hit_rate",
    "StorageStatistics": "slot_sizes total free evictable available unavailable",
    "_KVCache": """
        Status beam_width= cached_tokens_by_level capacity= committed_tokens cuda_stream= enable_swa_scratch_reuse= finish_event
        has_scratch_slots history_length= id is_active manager num_blocks num_committed_tokens reuse_scope status text_only=
        tokens_per_block
    """,
}
