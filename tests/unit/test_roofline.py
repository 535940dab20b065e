"""The decode roofline on a case that is worked out by hand; the GPU's name stands for one that is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.rollout.roofline import DecodeRoofline

CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.mark.parametrize(("tied", "weights"), [(True, 2 * (640 + 100)), (False, 2 * 100)])
def test_share_of_what_memory_allows(tmp_path: Path, tied: bool, weights: float) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 64), "model.layers.0.x": torch.zeros(10, 10)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    one = DecodeRoofline.of(tmp_path, "NVIDIA H200", gpus=4, servers=2)
    assert one == DecodeRoofline(weights, 2 * 3 * 2 * 16 * 2, 4.8e12, 4, 2)
    # 8 requests at a time on each server for 5 s: the weights are read 1000 / 8 times on each.
    share = one.share(tokens=1000, context=50_000, request_seconds=80.0, seconds=5.0)
    assert share == pytest.approx((weights * 1000 / 8 + 384 * 50_000) / (4.8e12 * 4 * 5))
    assert DecodeRoofline.of(tmp_path, "a GPU that nobody knows", 1, 1) is None
