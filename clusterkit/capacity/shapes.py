"""Dimensions of the models that presets name, and the parameters and KV cache that follow from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from trainer.config import RunConfig
from trainer.config_lora import ALL_LINEAR, LoraConfig

_TINY_VOCABULARY = 1024
"""Tokens of a model built from scratch, rounded up."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder like Llama and Qwen."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool  # input and output share the embedding
    context: int = 0  # in tokens; 0 if unknown
    attention_bias: bool = False  # on queries, keys and values (Qwen2)
    head_norm: bool = False  # of queries and keys (Qwen3)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, the three matrices of the gated feed-forward, two norms."""
        projected = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = self.hidden * (projected + self.heads * self.head_dim)
        extra = projected * self.attention_bias + 2 * self.head_dim * self.head_norm
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden + extra

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and of the output head if it is another matrix."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def matrices(self) -> list[int]:
        """Parameters of every matrix of the model."""
        layer = [inputs * outputs for inputs, outputs in self.linear.values()]
        return [self.vocabulary * self.hidden] * (1 if self.tied else 2) + layer * self.layers

    def adapter_matrices(self, lora: LoraConfig) -> list[int]:
        """Parameters of every matrix of low-rank adapters: rank x inputs and rank x outputs of each targeted one."""
        chosen = self.linear if lora.targets == [ALL_LINEAR] else lora.targets
        sides = [lora.rank * side for name in chosen for side in self.linear.get(name, ())]
        return sides * self.layers if lora.rank else []

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Parameters of low-rank adapters."""
        return sum(self.adapter_matrices(lora))

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of a decoder layer, by name."""
        heads, kv_heads = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, heads),
            "k_proj": (self.hidden, kv_heads),
            "v_proj": (self.hidden, kv_heads),
            "o_proj": (heads, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def kv_bytes_per_token(self) -> int:
        """A key and a value of 2 bytes per number, for each layer and key/value head."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


def _qwen2(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, tied: bool, context: int
) -> ModelShape:
    vocabulary = 152064 if hidden >= 3584 else 151936
    return ModelShape(
        layers, hidden, heads, kv_heads, hidden // heads, intermediate, vocabulary, tied, context, attention_bias=True
    )


SHAPES = {
    "smollm2-135m-instruct": ModelShape(30, 576, 9, 3, 64, 1536, 49152, tied=True, context=8192),
    "qwen2.5-0.5b-instruct": _qwen2(24, 896, 14, 2, 4864, tied=True, context=32768),
    "qwen2.5-1.5b-instruct": _qwen2(28, 1536, 12, 2, 8960, tied=True, context=32768),
    "qwen2.5-7b-instruct": _qwen2(28, 3584, 28, 4, 18944, tied=False, context=32768),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, tied=False, context=131072),
    "qwen2.5-32b-instruct": _qwen2(64, 5120, 40, 8, 27648, tied=False, context=32768),
    "deepseek-r1-distill-qwen-1.5b": _qwen2(28, 1536, 12, 2, 8960, tied=False, context=131072),
    "deepseek-r1-distill-qwen-7b": _qwen2(28, 3584, 28, 4, 18944, tied=False, context=131072),
    "deepseek-r1-distill-qwen-32b": _qwen2(64, 5120, 40, 8, 27648, tied=False, context=131072),
    "qwen3-14b": ModelShape(40, 5120, 40, 8, 128, 17408, 151936, tied=False, context=40960, head_norm=True),
    "qwen3-32b": ModelShape(64, 5120, 64, 8, 128, 25600, 151936, tied=False, context=40960, head_norm=True),
    "qwen3-4b": ModelShape(36, 2560, 32, 8, 128, 9728, 151936, tied=True, context=40960, head_norm=True),
}
"""By the last part of the repository's name, in lower case; from each model's config.json."""
_ALIASES = {"smollm2-135m": "smollm2-135m-instruct"}


def shape_of(config: RunConfig) -> ModelShape | None:
    """Return the shape of a run's model; None if unknown."""
    if config.model.path is None:
        tiny = config.model.tiny
        return ModelShape(
            tiny.num_layers,
            tiny.hidden_size,
            tiny.num_heads,
            tiny.num_heads,
            tiny.hidden_size // tiny.num_heads,
            tiny.intermediate_size,
            _TINY_VOCABULARY,
            tied=True,
            context=tiny.max_position_embeddings,
        )
    return shape_named(config.model.path)


def shape_named(path: str) -> ModelShape | None:
    """Return the shape of a model from its folder's config.json or by its name; None if unknown."""
    name = path.rstrip("/").rpartition("/")[2].partition("@")[0].lower()
    return _read(Path(path).expanduser() / "config.json") or SHAPES.get(_ALIASES.get(name, name))


def _read(path: Path) -> ModelShape | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        heads = int(values["num_attention_heads"])
        return ModelShape(
            layers=int(values["num_hidden_layers"]),
            hidden=int(values["hidden_size"]),
            heads=heads,
            kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or values["hidden_size"] // heads),
            intermediate=int(values["intermediate_size"]),
            vocabulary=int(values["vocab_size"]),
            tied=bool(values.get("tie_word_embeddings")),
            context=int(values.get("max_position_embeddings") or 0),
            attention_bias=values.get("model_type") == "qwen2",
            head_norm=values.get("model_type") == "qwen3",
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
