# The calls of transformers that we use. Tensors and modules are torch's, which mypy reads as Any.

from collections.abc import Iterator

import torch
from transformers.cache_utils import DynamicCache as DynamicCache

class PretrainedConfig:
    is_encoder_decoder: bool
    num_hidden_layers: int
    sliding_window: int | None

    def get_text_config(self, decoder: bool = False) -> PretrainedConfig: ...

class GenerationConfig: ...

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
    def eval(self) -> PreTrainedModel: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def generate(self, input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor: ...
    def register_forward_pre_hook(self, hook: object, *, with_kwargs: bool = False) -> torch.utils.hooks.RemovableHandle: ...
    def register_forward_hook(self, hook: object, *, with_kwargs: bool = False) -> torch.utils.hooks.RemovableHandle: ...
