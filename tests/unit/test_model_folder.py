"""Model folders that cannot be trained are refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from trainer.config_parts import ModelConfig
from trainer.errors import UserError
from trainer.train.loading import open_checkpoint
from trainer.train.model import load_lm

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}


def load_whole(folder: Path) -> None:
    load_lm(folder, ModelConfig(), torch.float32)


def open_for_parts(folder: Path) -> None:
    open_checkpoint(folder, ModelConfig())


@pytest.fixture(params=[load_whole, open_for_parts])
def refused(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    """What is said of a folder, loaded whole as for one rank, and opened as for several."""

    def said(folder: Path) -> str:
        with pytest.raises(UserError) as caught:
            request.param(folder)
        return str(caught.value)

    return said


def test_another_architecture(tmp_path: Path, refused: Callable[[Path], str]) -> None:
    BertForMaskedLM(BertConfig(**SMALL)).save_pretrained(tmp_path)
    assert "is a BertForMaskedLM, and what is trained here is a causal language model" in refused(tmp_path)


def test_weights_that_are_missing(tmp_path: Path, refused: Callable[[Path], str]) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: t for name, t in tensors.items() if "norm" not in name}, file, {"format": "pt"})
    assert "lacks 3 weights, model.layers.0.input_layernorm.weight first: the checkpoint is incomplete" in refused(
        tmp_path
    )
    file.unlink()
    assert "cannot be loaded as a causal language model" in refused(tmp_path)


def test_weights_of_another_shape(tmp_path: Path, refused: Callable[[Path], str]) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 32', '"intermediate_size": 48'))
    assert (
        "model.layers.0.mlp.down_proj.weight has the shape [32, 32], and by its config.json it should have [32, 48]: "
        "weights and config.json are of different models"
    ) in refused(tmp_path)


def test_quantised_weights(tmp_path: Path, refused: Callable[[Path], str]) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantised}))
    assert "its weights are quantised, which is not computed here, as the base of adapters" in refused(tmp_path)


def test_a_file_that_is_no_safetensors(tmp_path: Path, refused: Callable[[Path], str]) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"<html>" * 100)
    assert "cannot be loaded as a causal language model: " in refused(tmp_path)
