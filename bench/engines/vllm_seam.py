"""vLLM 0.33's schedulers without a GPU, weights or kernels. The only module that imports vLLM, which has no types.

Rule: vLLM's code is used as it is; only the attribute `kv_cache_manager` of a scheduler is assigned.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast

os.environ.update(VLLM_LOGGING_LEVEL="CRITICAL", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.structured_output import StructuredOutputManager

from bench.engines.adapter import PrefixStats, Request, VllmCacheManager
from bench.engines.fingerprints import StepPlan

MAX_MODEL_LEN: Final = 32768
_HASH: Final = get_hash_fn_by_name("sha256")
_MODEL: Final = Path(__file__).resolve().parent / "model"  # a config.json alone
init_none_hash(_HASH)


class SchedulerSettings(Protocol):
    watermark: float  # share of the blocks that stay free when a request is admitted beside others


class EngineSettings(Protocol):
    max_in_flight_tokens: int  # of all steps whose output has not come back
    scheduler_config: SchedulerSettings


class Scheduler(Protocol):
    """What is used of vLLM's schedulers."""

    kv_cache_manager: object
    vllm_config: EngineSettings
    running: list[Request]

    def add_request(self, request: Request) -> None: ...
    def has_unfinished_requests(self) -> bool: ...
    def schedule(self) -> StepPlan: ...
    def update_from_output(self, scheduler_output: StepPlan, model_runner_output: object) -> object: ...


@dataclass(frozen=True)
class Setup:
    """A scheduler's sizes."""

    num_blocks: int  # the null block not included
    block_size: int = 16  # tokens
    windows: tuple[int | None, ...] = (None,)  # of each layer group, tokens; None: full attention
    max_running: int = 1000
    max_step_tokens: int = 8192
    overlapped: bool = False  # AsyncScheduler: a step is scheduled before the output of the one before it is there
    policy: str = "fcfs"


def make_scheduler(setup: Setup) -> Scheduler:
    """A scheduler over vLLM's own cache manager."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(_MODEL), dtype="float16", skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN),
        cache_config=CacheConfig(block_size=setup.block_size, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            max_num_seqs=setup.max_running,
            max_num_batched_tokens=setup.max_step_tokens,
            async_scheduling=setup.overlapped,
            policy=setup.policy,
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = setup.num_blocks + 1
    tiny = {"block_size": setup.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(
            [f"group {number}"],
            FullAttentionSpec(**tiny) if window is None else SlidingWindowSpec(sliding_window=window, **tiny),
        )
        for number, window in enumerate(setup.windows)
    ]
    kind = AsyncScheduler if setup.overlapped else SyncScheduler
    made = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=setup.num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=setup.block_size,
        log_stats=True,
    )
    return cast(Scheduler, made)


def make_cache_manager(kind: type[VllmCacheManager], scheduler: Scheduler, setup: Setup) -> VllmCacheManager:
    """A cache manager of ours for a scheduler."""
    config = scheduler.vllm_config
    return kind(
        setup.num_blocks + 1,
        setup.block_size,
        setup.windows,
        MAX_MODEL_LEN,
        config.max_in_flight_tokens,
        config.scheduler_config.watermark,
        _make_stats,
    )


def _make_stats() -> PrefixStats:
    return cast(PrefixStats, PrefixCacheStats())


def make_request(name: str, tokens: Sequence[int], new_tokens: int, hash_block_size: int = 0, priority: int = 0) -> Request:
    """A request that ends after so many tokens. vLLM's own manager needs its blocks hashed; ours does not (0)."""
    hasher = get_request_block_hasher(hash_block_size, _HASH) if hash_block_size else None
    sampling = SamplingParams(ignore_eos=True, max_tokens=new_tokens)
    return cast(Request, VllmRequest(name, list(tokens), sampling, None, block_hasher=hasher, priority=priority))


def make_output(sampled: dict[str, list[int]]) -> object:
    """What a worker returns for a step: the sampled tokens of each of its requests."""
    return cast(
        object,
        ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: number for number, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
        ),
    )
