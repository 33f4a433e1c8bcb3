# The calls of transformers that we use. Tensors and modules are torch's, which mypy reads as Any.

from collections.abc import Iterator

import torch
from transformers import logging as logging
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.generation import GenerationOutput

class PretrainedConfig:
    is_encoder_decoder: bool
    num_hidden_layers: int
    sliding_window: int | None

    def get_text_config(self, decoder: bool = False) -> PretrainedConfig: ...

class GenerationConfig:
    def __init__(self, **options: object) -> None: ...

class AutoConfig:
    @staticmethod
    def for_model(model_type: str, **options: object) -> PretrainedConfig: ...

class AutoModelForCausalLM:
    @staticmethod
    def from_config(config: PretrainedConfig, *, attn_implementation: str = ..., dtype: torch.dtype = ...) -> PreTrainedModel: ...

class ModelOutput:
    logits: torch.Tensor

class PreTrainedModel:
    config: PretrainedConfig
    device: torch.device
    dtype: torch.dtype
    generation_config: GenerationConfig

    def __call__(self, **inputs: object) -> ModelOutput: ...
    def get_decoder(self) -> torch.nn.Module: ...
    def eval(self) -> PreTrainedModel: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def generate(self, input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor: ...
    def generate_batch(self, inputs: list[list[int]], **options: object) -> dict[str, GenerationOutput]: ...
    def destroy_cached_continuous_batching_manager(self) -> None: ...
    def register_forward_pre_hook(self, hook: object, *, with_kwargs: bool = False) -> torch.utils.hooks.RemovableHandle: ...
    def register_forward_hook(self, hook: object, *, with_kwargs: bool = False) -> torch.utils.hooks.RemovableHandle: ...

class T5Config(PretrainedConfig):
    def __init__(self, **options: object) -> None: ...

class T5ForConditionalGeneration(PreTrainedModel):
    def __init__(self, config: PretrainedConfig) -> None: ...
