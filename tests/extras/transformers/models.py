"""Small random models of each family, made from configurations: nothing is downloaded."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 256
WINDOW = 40
SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,  # so that greedy output is not constant
}
MAMBA: dict[str, object] = {"mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_chunk_size": 32}
EXPERTS: dict[str, object] = {"num_experts_per_tok": 1}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {  # by family: transformers' name of the model, and further options
    "llama": ("llama", {}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "granite": (
        "granitemoehybrid",
        {
            **MAMBA,
            **EXPERTS,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_expand": 2,
            "num_local_experts": 2,
            "shared_intermediate_size": 64,
        },
    ),
    "falcon_h1": ("falcon_h1", {**MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_ff_dim": 64, "conv_L_cache": 3},
    ),
    "jamba": (
        "jamba",
        {
            **EXPERTS,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
}


@cache
def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A model with random weights. Equal arguments give the same model."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    name, options = FAMILIES[family]
    config = AutoConfig.for_model(name, **{**SIZES, **options})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if family == "gemma2" else "sdpa", dtype=torch.float32
    )
    return model.eval()


def random_tokens(count: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """Token ids of shape (rows, count)."""
    return torch.randint(2, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))
