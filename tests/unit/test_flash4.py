"""FlashAttention 4's backward pass in training: operations, gradients, which rows go that way.

Its package and PyTorch's kernel have stand-ins in plain PyTorch: they need a Hopper GPU (tests/gpu/test_training.py).
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import rowattention
import torch
from builders import gradients, group_rows, grouped_query_lm, learner, relative_difference, small_config
from torch import Tensor

from trainer.train import flash4, layers, varlen

FREE = ("train.grad_clip=1e9", "train.max_tokens_per_mb=96")
HEAD = 16  # of the test's model
CPU = torch.device("cpu")


class Package:
    """flash_attn.cute.interface 4.0.0b19 and PyTorch's kernel, as far as they are called: arguments, results and what
    they insist on.

    late: tokens that the causal mask is off, as in a kernel that aligns it elsewhere.
    """

    def __init__(self) -> None:
        self.forwards, self.prefixes, self.late = 0, 0, 0

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, key_ends: Tensor, longest_keys: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.forwards += 1
        self.prefixes += len(k) > len(q)
        out = rowattention.rows(q, k, v, ends, longest, key_ends, longest_keys, scale, None)
        return out, q.new_full(q.shape[1::-1], 7.0, dtype=torch.float32)

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert causal
        assert out.shape == dout.shape == q.shape
        assert all(t.is_contiguous() for t in (q, k, v, out, dout, lse))
        assert lse.shape == q.shape[1::-1]
        assert (lse == 7.0).all()
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        assert max_seqlen_k >= int(cu_seqlens_k.diff().max())
        if self.late:
            k, v = k.roll(self.late, 0), v.roll(self.late, 0)
        return rowattention.rows_backward(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, None)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    """A machine that has it, and for whole rows the stand-in for PyTorch's kernel."""
    rowattention.use(monkeypatch)
    stand_in = Package()
    monkeypatch.setattr(flash4, "_package", lambda: stand_in)
    monkeypatch.setattr(flash4, "_attention", stand_in.attention)
    monkeypatch.setattr(flash4, "available", lambda: True)
    monkeypatch.setattr(flash4, "HEADS", (HEAD,))
    monkeypatch.setattr(varlen, "_FASTER", {})
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
    varlen.find_faster(CPU, 4, 2, HEAD)
    package.forwards = package.prefixes = 0

    found, stats = gradients(learner(lm, small_config(*settings, f"train.compile={str(compiled).lower()}")), rows)

    assert relative_difference(found, expected) <= 1e-5
    assert package.forwards == package.prefixes > 0
    passes = stats.values["micro_batches"] * len(lm.model.layers)
    assert package.forwards == passes * (2 if checkpointing == "full" else 1)  # selective keeps what attention returns


def test_a_run_looks_for_it_by_itself_and_once(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainer")
    lm = grouped_query_lm()
    one = learner(lm, small_config(*FREE))

    for _ in range(2):
        one.step(group_rows(lm, [(40, [(3, 5), (9, 2)])]))

    assert package.forwards > 1
    assert [r.getMessage() for r in caplog.records].count(
        "attention of rows that share a prefix: backward pass by FlashAttention 4"
    ) == 1


def test_a_kernel_that_is_wrong_or_fails_is_left_out_with_the_reason(
    package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = grouped_query_lm()
    rows = group_rows(lm, [(40, [(3, 5), (9, 2)])])

    package.late = 1
    one = learner(lm, small_config(*FREE))
    one.step(rows)
    one.step(rows)
    assert package.forwards == 1  # the trial
    assert "it differs from the other kernel by" in caplog.text

    varlen._FASTER.clear()
    monkeypatch.setattr(flash4, "_package", _missing)
    one.step(rows)
    assert "it failed with ModuleNotFoundError: no module named flash_attn.cute" in caplog.text


def test_other_sizes_of_heads_and_windows_go_through_the_other_kernel(package: Package) -> None:
    varlen.find_faster(CPU, 4, 2, 2 * HEAD)
    assert not package.forwards
    varlen.find_faster(CPU, 4, 2, HEAD)
    package.forwards = 0
    query, key = torch.randn(9, 4, HEAD), torch.randn(9, 2, HEAD)
    ends = torch.tensor([0, 9], dtype=torch.int32)
    keys = varlen.Keys(torch.arange(9), ends, 9)

    for window, count in ((3, 0), (None, 1)):
        varlen.attend(query, key, key, ends, 9, 0.25, window, keys)
        assert package.forwards == count


def test_its_operations_are_what_compiled_layers_take_them_for(package: Package) -> None:
    query, key, value = (torch.randn(*shape, HEAD, requires_grad=True) for shape in ((9, 4), (14, 2), (14, 2)))
    ends, key_ends = (torch.tensor([0, 5, end], dtype=torch.int32) for end in (9, 14))

    torch.library.opcheck(flash4._forward, (query, key, value, ends, key_ends, 16, 16, 0.25))

    assert package.forwards


def test_it_is_not_there_without_a_gpu_or_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flash4.SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash4, "_package", object)
    known = ["return_aux", "scale", "window_size"]
    monkeypatch.setattr(flash4, "_known", lambda: frozenset(known))
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[0])

    assert flash4.available()
    capability[0] = (8, 0)
    assert not flash4.available()
    capability[0] = (9, 0)
    known.pop()  # PyTorch 2.10's kernel
    assert not flash4.available()
    known.append("window_size")
    monkeypatch.setenv(flash4.SWITCH, "0")
    assert not flash4.available()
    monkeypatch.delenv(flash4.SWITCH)
    monkeypatch.setattr(flash4, "_package", _missing)
    assert not flash4.available()
    monkeypatch.setattr(flash4, "_package", _broken)
    assert not flash4.available()


def _missing() -> Any:
    raise ModuleNotFoundError("no module named flash_attn.cute")


def _broken() -> Any:
    raise KeyError("a compiler of another release")
