"""The model classes whose log-probs are computed here, and what each of them does beside plain causal attention.

The trainer walks a model by hand: packed rows through `lm.model`, the output layer on loss positions alone, attention
of its own. What a class adds outside of that (scaled or capped logits, other masks) would be left out without a word,
so classes are known by name and every other one is refused. trainer/train/parity.py compares the result with the
model's own forward pass before the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError

SUPPORTED: dict[str, str] = {
    "LlamaForCausalLM": "Llama and SmolLM 1 and 2",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2 and Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
}
"""Class of transformers -> the models that have it."""
# These change the rotation of all positions with the longest row of a batch: packed rows would influence one another.
UNSTEADY_ROTATIONS = ("dynamic", "longrope")


def check_family(lm: Any, folder: Path) -> None:
    """Raise UserError unless the log-probs of a model, with or without its weights, are computed rightly here."""
    name = type(lm).__name__
    if name not in SUPPORTED:
        known = ", ".join(f"{family} ({cls})" for cls, family in SUPPORTED.items())
        raise UserError(
            f"model.path={folder} is a {name}, whose log-probs are not computed here: a class may scale or cap what "
            f"others do not. Known are {known}: give the folder of one of these. An engine's servers can still "
            "generate with it (clusterkit eval --engine sglang or vllm)"
        )
    if getattr(lm.lm_head, "bias", None) is not None:
        raise UserError(f"model.path={folder}: its output layer has a bias, which is not computed here")
    for kind in _rotations(lm.config):
        if kind in UNSTEADY_ROTATIONS:
            raise UserError(
                f"model.path={folder}: config.json asks for {kind} rotary positions, which change with the longest row "
                "of a batch: take a checkpoint with default, linear, llama3 or yarn positions"
            )
    if getattr(lm.config, "use_bidirectional_attention", False):
        raise UserError(f"model.path={folder} sees what comes after a token: give a causal language model's folder")


def _rotations(config: Any) -> set[str]:
    """Kinds of rotary positions that a configuration names; one for all layers or one for each kind of them."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    groups = [given, *(value for value in given.values() if isinstance(value, dict))]
    return {str(group.get("rope_type") or group.get("type")) for group in groups}


def windows(config: Any) -> list[int | None]:
    """The sliding window of every layer, in tokens; None where it sees all of its past. config: transformers'."""
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False or config.model_type == "llama":
        return [None] * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


def has_capped_attention(config: Any) -> bool:
    """Whether attention's scores are capped."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def capped(logits: Tensor, config: Any) -> Tensor:
    """What the model makes of its output layer's scores: softcap·tanh(score / softcap) in Gemma, else the same."""
    limit = getattr(config, "final_logit_softcapping", None)
    return logits if limit is None else limit * torch.tanh(logits / limit)
