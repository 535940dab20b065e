"""Small random models of every supported class, with what is special about it set, and of any other one."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 89
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": MIXED}
# What is special about a class is set, and small beside the rows.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False, "attention_bias": True}),
    "llama_yarn": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "original_max_position_embeddings": 16}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 8, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", GEMMA),
}  # fmt: skip


def make(family: str, settings: dict[str, Any]) -> Any:
    """A small random model of a class, with next-token distributions that are far from uniform."""
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, name)(**SIZES | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        lm = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter_name, parameter in lm.named_parameters():
                if parameter_name.endswith(("bias", "norm.weight")):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
            lm.model.norm.weight.mul_(3.0)
    return lm.eval()
