"""The pages of one transformers model: its manager, sized for what its layers keep, and views of every buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, TypeAlias, TypeVar

import torch
from transformers import PreTrainedModel

from kv_cache_manager_v2.arguments import at_least, function, instance, shown
from kv_cache_manager_v2.config import (
    BatchDesc,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
)
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.emulated.driver import EmulatedDriver
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.extras.cuda import CudaDriver
from kv_cache_manager_v2.extras.transformers.model_layers import LayerBuffers, LayerPlan, layer_configs
from kv_cache_manager_v2.ids import Stream
from kv_cache_manager_v2.manager import KVCacheManager

Disk: TypeAlias = tuple[str, int]  # an existing directory, and bytes in it
Configure: TypeAlias = Callable[[KVCacheManagerConfig], KVCacheManagerConfig]
_Pages = TypeVar("_Pages", bound="ModelPages")


class ModelPages:
    """One model, its manager, and its buffers as tensors."""

    def __init__(
        self,
        model: PreTrainedModel,
        plans: Sequence[LayerPlan],
        gpu_bytes: int,
        host_bytes: int,
        disk: Disk | None,
        tokens_per_block: int,
        configure: Configure | None,
        driver: Driver | None,
    ) -> None:
        if configure is not None:
            function(configure, "configure")
        if disk is not None and len(instance(disk, tuple, "disk")) != 2:
            raise ConfigError(f"disk is {shown(disk)}; it must be a directory and the bytes in it")
        at_least(tokens_per_block, "tokens_per_block", 1)
        self.model: Final = model
        self.is_recurrent: Final = any(plan.states for plan in plans)
        tiers: list[CacheTierConfig] = [GpuCacheTierConfig(gpu_bytes)]
        if host_bytes:
            tiers.append(HostCacheTierConfig(host_bytes))
        if disk is not None:
            tiers.append(DiskCacheTierConfig(disk[1], disk[0]))
        config = KVCacheManagerConfig(
            tokens_per_block,
            tiers,
            layer_configs(plans, tokens_per_block),
            max_util_for_resume=1.0,
            typical_step=BatchDesc([KVCacheDesc(2048, 0)] + 3 * [KVCacheDesc(2048, 2047)]),
            commit_min_snapshot=self.is_recurrent,
            commit_stats_on_close=True,
        )
        self._own_driver: Final = driver is None
        self.driver: Final[Driver] = _driver_of(model.device) if driver is None else driver
        self.manager: Final = KVCacheManager(config if configure is None else configure(config), driver=self.driver)
        self.buffers: Final = [LayerBuffers(self.manager, plan) for plan in plans]
        self._stream: Final = self.driver.create_stream() if model.device.type == "cpu" else None

    def __enter__(self: _Pages) -> _Pages:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def stream(self) -> Stream:
        """The stream that the model computes on."""
        return Stream(torch.cuda.current_stream(self.model.device).cuda_stream) if self._stream is None else self._stream

    def close(self) -> None:
        """Free all memory. Idempotent. Raises LogicError while a request is open."""
        if not self.buffers:
            return
        self.manager.shutdown()
        self.buffers.clear()
        if self._stream is not None:
            self.driver.destroy_stream(self._stream)
        if self._own_driver:
            self.driver.close()


def _driver_of(device: torch.device) -> Driver:
    """A driver of the device on which a model is: a GPU, or for a model on the CPU the emulated device."""
    if device.type == "cpu":
        return EmulatedDriver()
    if device.type == "cuda":
        return CudaDriver(device.index or 0)
    raise ConfigError(f"the model is on {device}; pages can be on a CUDA device, or for a model on the CPU on the emulated device")
