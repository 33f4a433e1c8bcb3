"""What the layers of a transformers model keep, and where in the manager's pages it lies.

The names of a configuration differ by model. So one token is passed through the model with transformers' own cache, and the sizes
are read from what each layer has kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kv_cache_manager_v2.arguments import instance
from kv_cache_manager_v2.config import AttentionLayerConfig, BufferConfig, LayerConfig, SsmLayerConfig
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.extras.torch import pool_tensor
from kv_cache_manager_v2.ids import DataRole, LayerGroupId, LayerId
from kv_cache_manager_v2.layout.page_index import PageIndexConverter
from kv_cache_manager_v2.manager import KVCacheManager

CONV: Final = "conv"
RECURRENT: Final = "recurrent"
_KNOWN: Final = (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

Addressing: TypeAlias = tuple[LayerGroupId, int]  # buffers of one layer group with equal page indices: the group, and their scale


@dataclass(frozen=True)
class BufferPlan:
    """One buffer of a layer, as tensors."""

    role: DataRole
    shape: tuple[int, ...]  # of one token, (heads, head_dim), or of one request's state
    dtype: torch.dtype

    def nbytes(self) -> int:
        """Bytes of one token, or of one state."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True)
class StatePlan(BufferPlan):
    """One state of a recurrent layer. The roles are "conv0", "recurrent0", ..."""

    kind: str  # CONV or RECURRENT
    number: int  # of several states of the kind in one layer


@dataclass(frozen=True)
class LayerPlan:
    """What one layer of the model keeps: keys and values, states, both, or nothing."""

    index: int
    attention: tuple[BufferPlan, ...] = ()  # the keys and the values
    window: int | None = None  # tokens that a query sees, itself included; None: all
    states: tuple[StatePlan, ...] = ()


def learn_layers(model: PreTrainedModel) -> list[LayerPlan]:
    """Pass one token through the model, and read what each layer keeps of it.

    Raises ConfigError for a model that has no such cache, keeps other things, or lies on several devices.
    """
    config = instance(model, PreTrainedModel, "model").config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{type(model).__name__} has an encoder: give a decoder-only model")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ConfigError(f"the model lies on {sorted(map(str, devices))}: its keys and values must lie on one device")
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), cache=cache)
    plans = [_plan(index, layer) for index, layer in enumerate(cache.layers)]
    if not any(plan.attention or plan.states for plan in plans):
        raise ConfigError(f"{type(model).__name__} has kept nothing in a DynamicCache: it must take the argument `cache`")
    return plans


def uses_states(model: PreTrainedModel, plans: Sequence[LayerPlan]) -> bool:
    """Whether a pass of several tokens goes on from the recurrent states in the cache. Some models begin at zero again.

    The states of each kind are changed before such a pass: its logits differ if they are used.
    """
    start, rest = torch.tensor([[0, 1, 2]], device=model.device), torch.tensor([[3, 4, 5]], device=model.device)
    logits: list[torch.Tensor] = []
    for changed in ("", *sorted({state.kind for plan in plans for state in plan.states})):
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        with torch.no_grad():
            model(input_ids=start, cache=cache)
            for layer in cache.layers:
                if changed and isinstance(layer, LinearAttentionCacheLayerMixin):
                    for state in (layer.conv_states if changed == CONV else layer.recurrent_states).values():
                        if state is not None:
                            state.add_(1)
            logits.append(model(input_ids=rest, cache=cache).logits)
    return not any(torch.equal(logits[0], other) for other in logits[1:])


def _plan(index: int, layer: object) -> LayerPlan:
    if type(layer) not in _KNOWN:
        raise ConfigError(
            f"layer {index} keeps a {type(layer).__name__}; supported are full and sliding attention, recurrent states, and both"
        )
    attention: tuple[BufferPlan, ...] = ()
    window: int | None = None
    if isinstance(layer, CacheLayerMixin) and layer.keys is not None and layer.values is not None and layer.keys.numel():
        buffers = (("key", layer.keys), ("value", layer.values))
        attention = tuple([BufferPlan(DataRole(role), (kept.shape[1], kept.shape[3]), kept.dtype) for role, kept in buffers])
        if isinstance(layer, DynamicSlidingWindowLayer):
            window = layer.sliding_window
    states: list[StatePlan] = []
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind, kept_by_number in ((CONV, layer.conv_states), (RECURRENT, layer.recurrent_states)):
            for number, kept in kept_by_number.items():
                if kept is not None:
                    states.append(StatePlan(DataRole(f"{kind}{number}"), tuple(kept.shape[1:]), kept.dtype, kind, number))
    return LayerPlan(index, attention, window, tuple(states))


def layer_configs(plans: Sequence[LayerPlan], tokens_per_block: int) -> list[LayerConfig]:
    """The layers as the manager's configuration takes them."""
    configs: list[LayerConfig] = []
    for plan in plans:
        layer = LayerId(plan.index)
        buffers = [BufferConfig(buffer.role, tokens_per_block * buffer.nbytes()) for buffer in plan.attention]
        states = [BufferConfig(state.role, state.nbytes()) for state in plan.states]
        if buffers:
            configs.append(AttentionLayerConfig(layer, buffers, plan.window, states=states))
        elif states:
            configs.append(SsmLayerConfig(layer, states))
    return configs


class Buffer:
    """All pages of one buffer as a tensor, and how token slots or page indices address it."""

    def __init__(self, manager: KVCacheManager, layer: LayerId, plan: BufferPlan, tokens_per_block: int | None) -> None:
        self.plan: Final = plan
        self.converter: Final[PageIndexConverter] = manager.get_page_index_converter(layer, plan.role)
        self.addressing: Final[Addressing] = (manager.get_layer_group_id(layer, plan.role), self.converter.scale)
        if tokens_per_block is None:  # a state: (pages, *shape)
            self.memory = pool_tensor(manager, layer, plan.role, plan.dtype, plan.shape)
        else:  # (tokens of all pages, heads, head_dim)
            pages = pool_tensor(manager, layer, plan.role, plan.dtype, (tokens_per_block, *plan.shape))
            self.memory = pages.view(-1, *plan.shape)


class LayerBuffers:
    """The buffers of one layer of the model."""

    def __init__(self, manager: KVCacheManager, plan: LayerPlan) -> None:
        size = manager.tokens_per_block
        self.plan: Final = plan
        layer = LayerId(plan.index)
        self.attention: Final = [Buffer(manager, layer, buffer, size) for buffer in plan.attention]
        self.states: Final = [(state, Buffer(manager, layer, state, None)) for state in plan.states]
