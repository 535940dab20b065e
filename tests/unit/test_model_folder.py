"""Model folders that cannot be trained are refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from trainer.config import ModelConfig
from trainer.errors import UserError
from trainer.train.model import load_lm

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_lm(folder, ModelConfig(), torch.float32)
    return str(caught.value)


def test_another_architecture(tmp_path: Path) -> None:
    BertForMaskedLM(BertConfig(**SMALL)).save_pretrained(tmp_path)
    assert "is a BertForMaskedLM, and what is trained here is a causal language model" in refused(tmp_path)


def test_weights_that_are_missing(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: t for name, t in tensors.items() if "norm" not in name}, file, {"format": "pt"})
    assert "lacks 3 weights, model.layers.0.input_layernorm.weight first: the checkpoint is incomplete" in refused(
        tmp_path
    )
    file.unlink()
    assert "cannot be loaded as a causal language model" in refused(tmp_path)
