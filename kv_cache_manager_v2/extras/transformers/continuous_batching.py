"""The manager under transformers' continuous batching, `model.generate_batch`.

transformers' own cache shares prefixes only where all layers are full attention, in whole blocks, and gives up all cached blocks
at once under pressure. With the manager in its place, prefixes are shared with sliding windows too, inside blocks, and from call to
call. What nobody uses now moves to host memory and disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache, group_layers_by_attn_type
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from kv_cache_manager_v2.arguments import instance
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.extras.transformers.model_layers import LayerBuffers, learn_layers
from kv_cache_manager_v2.extras.transformers.model_pages import Configure, Disk, ModelPages
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.reuse.keys import ScopeLike
from kv_cache_manager_v2.token_slots import slots_to_read, slots_to_write

ScopeOf: TypeAlias = Callable[[str], ScopeLike | None]  # the scope of a request, by its id


class LayerKind:
    """All layers with one kind of attention: what the preparation of a batch asks about them."""

    read_trash_index = write_trash_index = 0  # for padding, of which there is none on the CPU

    def __init__(self, cache: ManagedBatchCache, index: int, layer_type: str, layers: Sequence[LayerBuffers]) -> None:
        buffers = [buffer for layer in layers for buffer in layer.attention]
        if len({buffer.addressing for buffer in buffers}) != 1:
            raise ConfigError(f"the {layer_type} layers differ in their windows or sizes; continuous batching needs equal ones")
        self.cache: Final = cache
        self.index: Final = index
        self.layer_type: Final = layer_type
        self.window: Final = layers[0].plan.window
        self.group: Final = buffers[0].addressing[0]
        self.converter: Final = buffers[0].converter
        self.block_table: Final[dict[str, list[int]]] = {}  # of requests for a swap space of transformers': there is none

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Tokens that so many queries after so many tokens read."""
        return query_length + (past_length if self.window is None else min(past_length, self.window - 1))

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Blocks that a request needs for its next tokens."""
        kv = self.cache.requests.get(request_id)
        blocks = -(-(past_length + query_length) // self.cache.batching.manager.tokens_per_block)
        return max(0, blocks - (0 if kv is None else kv.num_blocks))


class SectorPool:
    """transformers' pool of unused memory. The manager has its own."""

    def try_to_free_sectors(self) -> None:
        """Nothing to do: cached pages give way when pages are needed."""


class ManagedBatchCache(PagedAttentionCache):
    """What continuous batching takes for its cache: one request of the manager for each of its requests."""

    def __init__(self, batching: ContinuousBatching, config: PretrainedConfig, max_batch_tokens: int) -> None:
        manager = batching.manager
        self.batching: Final = batching
        self.requests: Final[dict[str, KVCache]] = {}
        self.cache_allocators: Final[dict[str, LayerKind]] = {}
        self._kind_of: Final[dict[int, LayerKind]] = {}
        for index, (layer_type, layers) in enumerate(group_layers_by_attn_type(config).items()):
            kind = LayerKind(self, index, layer_type, [batching.buffers[layer] for layer in layers])
            self.cache_allocators[layer_type] = kind
            self._kind_of.update(dict.fromkeys(layers, kind))
        self.pool = SectorPool()
        self.config = config
        self.device = torch.device("cpu")
        self.allow_block_sharing = self.use_prefix_sharing = True
        self.read_cache_limit: int | None = None
        self.max_blocks_per_request = self.max_decode_fast_path_length = 0  # no kernel with block tables
        self.bytes_per_sector = 1 << 62  # so that transformers makes no swap space of its own
        self.num_blocks = max(desc.num_slots for desc in manager.pool_group_descs)
        self.max_tokens_read = self.num_blocks * manager.tokens_per_block
        self.max_batch_tokens = max_batch_tokens

    # --- the scheduler

    def search_prefix_match(self, request_id: str, prompt_ids: Sequence[int]) -> int:
        """Begin a request, which is asked for again as long as it waits. Returns how many of its first tokens are cached."""
        self.free_blocks(request_id)
        kv = self._begin(request_id, prompt_ids[:-1])
        self.batching.num_reused_tokens += kv.num_committed_tokens
        return kv.num_committed_tokens

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        """Take pages for the next tokens of a request. False, with nothing changed, if there are too few."""
        past = state.current_len()
        if dry_run:
            return self.batching.manager.clamp_max_seq_len_for_mem(1, past + request_len) == past + request_len
        kv = self.requests.get(state.request_id) or self._begin(state.request_id, None)
        while True:
            if (kv.is_active or kv.resume(self.batching.stream)) and kv.resize(past + request_len, max(past, kv.history_length)):
                return True
            shortage = kv.last_shortage
            if shortage is None or shortage.permanent or shortage.in_transfer == 0:
                return False
            self.batching.driver.synchronize()  # file transfers in flight keep slots

    def count_storable_requests(self, list_blocks_needed: Sequence[Mapping[str, int]]) -> int:
        """How many requests, in this order, get the blocks that they need in each kind of layers."""
        manager = self.batching.manager
        available = [sum(manager.free_and_evictable(desc.pool_group_index)) for desc in manager.pool_group_descs]
        pool_groups = manager.get_life_cycle_pool_group_indices()
        group_of = {kind.layer_type: pool_groups[kind.group] for kind in self.cache_allocators.values()}
        for number, needed in enumerate(list_blocks_needed):
            for layer_type, blocks in needed.items():
                available[group_of[layer_type]] -= blocks
            if min(available) < 0:
                return number
        return len(list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> float:
        """The share of pages that are free or can be had by eviction, in the pool group with the least of them."""
        if not relative:
            raise LogicError("compute_free_capacity(): the manager knows no free bytes that all kinds of layers could use")
        manager = self.batching.manager
        return min(sum(manager.free_and_evictable(desc.pool_group_index)) / desc.num_slots for desc in manager.pool_group_descs)

    def evict_cached_blocks(self) -> bool:
        """False: cached pages are evicted one by one, when pages are needed."""
        return False

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """End a request. What it has committed stays cached."""
        kv = self.requests.pop(request_id, None)
        if kv is not None:
            kv.stop_committing()
            kv.close()

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """End all requests."""
        for request_id in list(self.requests):
            self.free_blocks(request_id)

    def reset(self) -> None:
        """End all requests."""
        self.free_all_requests()

    # --- after a forward pass

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        """Not empty, so that every pass is told to `mark_complete_blocks`."""
        return {"all": 1}

    def mark_complete_blocks(self, state: RequestState, complete_blocks: Mapping[str, int]) -> None:
        """Commit what the request has computed."""
        kv = self.requests.get(state.request_id)
        if kv is None or state.status == RequestStatus.FINISHED:
            return
        done = kv.num_committed_tokens
        kv.commit([*state.initial_tokens, *state.generated_tokens][done : state.position_offset])

    def prepare_fork_request(
        self, src_state: RequestState, dst_req_ids: Sequence[str], copy_src_and_dst: Mapping[str, object]
    ) -> list[str]:
        """Requests that continue from another's history. Pages are copied when they are needed."""
        kv = self.requests[src_state.request_id]
        if kv.history_length < src_state.current_len():
            kv.resize(None, src_state.current_len())
        for request_id in dst_req_ids:
            self.requests[request_id] = kv.fork()
        return list(dst_req_ids)

    def perform_cache_copy(self, copy_src_and_dst: Mapping[str, object]) -> None:
        """Nothing to copy: see `prepare_fork_request`."""

    # --- a forward pass

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: Sequence[list[int]] | None,
        write_index: Sequence[list[int]],
    ) -> None:
        """Append where the tokens of a request lie that it reads and writes, for each kind of layers."""
        self.batching.driver.order(self.batching.stream)
        kvs, begins, ends = [self.requests[request_id]], [past_length], [past_length + query_length]
        for kind in self.cache_allocators.values():
            write_index[kind.index].extend(slots_to_write(kvs, kind.group, begins, ends, kind.converter).slots.tolist())
            if read_index is not None:
                read_index[kind.index].extend(slots_to_read(kvs, kind.group, begins, ends, kind.converter).slots.tolist())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values of a batch, of shape (1, heads, tokens, head_dim), and return all that it reads.

        What `kwargs` has for each kind of layers becomes that of this layer's kind.
        """
        kind = self._kind_of[layer_idx]
        for name in ("cu_seq_lens_k", "max_length_k"):
            kwargs[name] = kwargs[name][kind.layer_type]
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"].to(torch.int32)
        read, write = kwargs["read_index"][kind.index], kwargs["write_index"][kind.index]
        found: list[torch.Tensor] = []
        for buffer, new in zip(self.batching.buffers[layer_idx].attention, (key_states, value_states), strict=True):
            buffer.memory.index_copy_(0, write, new[0].transpose(0, 1))
            found.append(buffer.memory.index_select(0, read).transpose(0, 1)[None] if read.numel() else new)
        return found[0], found[1]

    def _begin(self, request_id: str, tokens: Sequence[int] | None) -> KVCache:
        scope_of = self.batching.scope_of
        kv = self.batching.manager.create_kv_cache(None if scope_of is None else scope_of(request_id), tokens)
        self.requests[request_id] = kv
        return kv


class ContinuousBatching(ModelPages):
    """The manager under `generate_batch` of one model. `install_continuous_batching` makes it; `close()` or `with` ends it."""

    def __init__(
        self,
        model: PreTrainedModel,
        gpu_bytes: int,
        host_bytes: int,
        disk: Disk | None,
        tokens_per_block: int,
        configure: Configure | None,
        driver: Driver | None,
        scope_of: ScopeOf | None,
    ) -> None:
        """Internal. `install_continuous_batching` makes it."""
        if instance(model, PreTrainedModel, "model").device.type != "cpu":
            raise ConfigError(f"the model is on {model.device}; continuous batching over the manager needs a model on the CPU")
        plans = learn_layers(model)
        if any(plan.states for plan in plans):
            raise ConfigError(
                f"{type(model).__name__} has recurrent layers, which transformers' continuous batching has no state for"
            )
        super().__init__(model, plans, gpu_bytes, host_bytes, disk, tokens_per_block, configure, driver)
        self.scope_of: Final = scope_of
        self.num_reused_tokens = 0  # prompt tokens that were found cached
        self.caches: Final[list[ManagedBatchCache]] = []
        self._replaced: Final = continuous_api.PagedAttentionCache
        continuous_api.PagedAttentionCache = self._make_cache

    def close(self) -> None:
        """Put transformers' own cache back, end all requests, and free all memory. Idempotent."""
        if continuous_api.PagedAttentionCache == self._make_cache:
            continuous_api.PagedAttentionCache = self._replaced
        self.model.destroy_cached_continuous_batching_manager()
        for cache in self.caches:
            cache.reset()
        super().close()

    def _make_cache(
        self,
        config: PretrainedConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        device: torch.device,
        distributed_helper: DistributedHelper,
        dtype: torch.dtype,
        model_supports_logits_to_keep: bool = False,
    ) -> PagedAttentionCache:
        """In place of the constructor of transformers' cache. Other models get that one."""
        if config is not self.model.config.get_text_config():
            return self._replaced(
                config, continuous_batching_config, device, distributed_helper, dtype, model_supports_logits_to_keep
            )
        self.caches.append(ManagedBatchCache(self, config, continuous_batching_config.max_batch_tokens or 512))
        return self.caches[-1]


def install_continuous_batching(
    model: PreTrainedModel,
    *,
    gpu_bytes: int,
    host_bytes: int = 0,
    disk: Disk | None = None,
    tokens_per_block: int = 16,
    scope_of: ScopeOf | None = None,
    configure: Configure | None = None,
    driver: Driver | None = None,
) -> ContinuousBatching:
    """Put a manager under `model.generate_batch`, until the result is closed. What is cached stays so from call to call.

    Parameters are those of `PagedStore`. `scope_of` gives the scope of a request by its id; without it all share one. Raises
    ConfigError for a model with recurrent layers, for one that is not on the CPU, and for layers of one kind that differ in size.
    """
    return ContinuousBatching(model, gpu_bytes, host_bytes, disk, tokens_per_block, configure, driver, scope_of)
