"""Shapes of models and random weights for them: speed and memory do not depend on the values."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trainer.config import RunConfig
from trainer.train import attention
from trainer.train.distributed import World
from trainer.train.learner import Learner
from trainer.train.lora import AdaptedWeights, add_adapters
from trainer.train.model import empty_lm, prepare_lm
from trainer.train.weightfiles import Region

SHAPES: dict[str, Any] = {
    "tiny": LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "135M": LlamaConfig(  # SmolLM2-135M
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "1.5B": Qwen2Config(  # Qwen2.5-1.5B
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "7B": Qwen2Config(  # Qwen2.5-7B
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=False,
    ),
    "32B": Qwen2Config(  # Qwen2.5-32B
        vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40,
        num_key_value_heads=8, max_position_embeddings=32768, tie_word_embeddings=False,
    ),
}  # fmt: skip
NOISE = 1 << 22
"""Random numbers that are made; longer tensors repeat them."""


class RandomWeights:
    """Values of a model on the meta device, as `trainer.train.weightfiles.Weights` has them."""

    def __init__(self, lm: Any) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(one.shape) for name, one in lm.named_parameters()}
        self._noise = 0.02 * torch.randn(NOISE, generator=torch.Generator().manual_seed(0))

    def read(self, name: str, region: Region) -> Tensor:
        """Part of a tensor: ones for norms, else noise."""
        shape = [one.stop - one.start for one in region]
        if len(self.shapes[name]) == 1:
            return torch.ones(shape)
        count = torch.Size(shape).numel()
        return self._noise.repeat(-(-count // NOISE))[:count].view(shape)

    def place(self, name: str) -> str:  # noqa: ARG002 (all are in one place)
        """See Weights."""
        return ""

    def close(self) -> None:
        """Nothing is open."""


def config_of(shape: str, layers: int = 0) -> Any:
    """A shape's configuration. layers: in place of its own number."""
    config = copy.deepcopy(SHAPES[shape])
    if layers:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def make_lm(shape: str, device: torch.device, layers: int = 0) -> Any:
    """A whole model with random weights, made on the device. layers: see `config_of`."""
    config = config_of(shape, layers)
    config._attn_implementation = attention.IMPLEMENTATION
    torch.manual_seed(0)
    with device:
        lm = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}[config.model_type](config)
    return prepare_lm(lm.float())


def make_learner(shape: str, config: RunConfig, world: World, layers: int = 0) -> Learner:
    """A learner of a shape, with adapters where the configuration has them; of several ranks each makes its own part
    of the weights alone, as a run's ranks read theirs.
    """
    if world.size == 1:
        lm = make_lm(shape, world.device, layers)
        return Learner(add_adapters(lm, config.model.lora, world.dtype, 1), config, world, 1000)
    with tempfile.TemporaryDirectory(prefix="shape-") as folder:
        config_of(shape, layers).save_pretrained(folder)
        lm = empty_lm(Path(folder))
    weights = RandomWeights(lm)
    add_adapters(lm, config.model.lora, world.dtype, 1)
    return Learner(lm, config, world, 1000, AdaptedWeights(weights, lm, 1) if config.model.lora.rank else weights)
