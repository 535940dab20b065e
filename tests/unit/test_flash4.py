"""FlashAttention 4 in training, with a stand-in for its package in plain PyTorch: the kernels themselves need a Hopper
GPU (tests/gpu/test_training.py). What is ours is shown: operations, gradients, which rows go that way.
"""

from __future__ import annotations

from typing import Any

import pytest
import rowattention
import torch
from builders import gradients, group_rows, grouped_query_lm, learner, relative_difference, small_config
from torch import Tensor

from trainer.train import flash4, layers, varlen

FREE = ("train.grad_clip=1e9", "train.max_tokens_per_mb=96")
HEAD = 16  # of the test's model


class Package:
    """flash_attn.cute.interface, as far as it is called."""

    def __init__(self) -> None:
        self.forwards, self.prefixes = 0, 0

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, return_lse: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert causal
        assert return_lse
        self.forwards += 1
        self.prefixes += len(k) > len(q)
        places = (cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k)
        return rowattention.rows(q, k, v, *places, softmax_scale, None), q.new_full(q.shape[1::-1], 7.0)

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert causal
        assert out.shape == dout.shape == q.shape
        assert (lse == 7.0).all()
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        assert max_seqlen_k >= int(cu_seqlens_k.diff().max())
        return rowattention.rows_backward(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, None)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    rowattention.use(monkeypatch)
    stand_in = Package()
    monkeypatch.setattr(flash4, "_package", lambda: stand_in)
    monkeypatch.setitem(varlen._FASTER, HEAD, flash4.run)
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    return stand_in


@pytest.mark.parametrize(
    ("checkpointing", "compiled"), [("none", False), ("selective", False), ("selective", True), ("full", True)]
)
def test_rows_that_share_a_prefix_get_the_gradients_of_whole_rows(
    checkpointing: str, compiled: bool, package: Package
) -> None:
    lm = grouped_query_lm()
    rows = group_rows(lm, [(40, [(3, 5), (9, 2), (1, 8)]), (24, [(5, 5), (1, 7)]), (31, [(2, 6), (4, 4)])])
    settings = (*FREE, f"model.gradient_checkpointing={checkpointing}")
    whole_rows = learner(lm, small_config(*settings, "train.share_prefixes=false"))
    expected, _ = gradients(whole_rows, rows)
    assert not package.forwards  # whole rows go through the other kernel

    found, stats = gradients(learner(lm, small_config(*settings, f"train.compile={str(compiled).lower()}")), rows)

    assert relative_difference(found, expected) <= 1e-5
    assert package.forwards == package.prefixes > 0
    passes = stats.values["micro_batches"] * len(lm.model.layers)
    assert package.forwards == passes * (2 if checkpointing == "full" else 1)  # selective keeps what attention returns


def test_it_is_not_there_without_a_gpu_or_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash4, "_package", object)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[0])

    assert flash4.available()
    capability[0] = (8, 0)
    assert not flash4.available()
    capability[0] = (9, 0)
    monkeypatch.setenv(flash4.SWITCH, "0")
    assert not flash4.available()
    monkeypatch.delenv(flash4.SWITCH)
    monkeypatch.setattr(flash4, "_package", _missing)
    assert not flash4.available()


def _missing() -> Any:
    raise ModuleNotFoundError("no module named flash_attn.cute")
