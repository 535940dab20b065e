"""FlashAttention 4's backward pass in training: operations, gradients, which rows go that way.

Its package and PyTorch's kernel have stand-ins in plain PyTorch: they need a Hopper GPU (tests/gpu/test_training.py).
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import rowattention
import torch
import torch.nn.attention.varlen
from builders import gradients, group_rows, grouped_query_lm, learner, relative_difference, small_config
from torch import Tensor

from trainer.train import flash4, layers, varlen

FREE = ("train.grad_clip=1e9", "train.max_tokens_per_mb=96")
HEAD = 16  # of the test's model
CPU = torch.device("cpu")


class Package:
    """flash_attn.cute.interface 4.0.0b19 and PyTorch's `varlen_attn`, as far as they are called: arguments, results and
    what they insist on.

    groups: takes fewer heads of keys than of queries where it is asked to, as from PyTorch 2.13 on. unasked: without
        being asked, as 2.11's forward pass does; None: it refuses; "swapped": it takes the wrong ones.
    late: tokens that the causal mask is off, as in a kernel that aligns it elsewhere.
    """

    def __init__(self) -> None:
        self.forwards, self.prefixes, self.late, self.groups = 0, 0, 0, True
        self.unasked: str | None = None
        self.key_heads = 0

    def varlen_attn(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert return_aux.lse
        assert scale
        assert window_size == (-1, 0)
        assert key.shape[1] == value.shape[1]
        if key.shape[1] != query.shape[1] and not enable_gqa:
            if self.unasked is None:
                raise ValueError("heads of key and query differ")
            if self.unasked == "swapped":
                key, value = key.flip(1), value.flip(1)
        self.key_heads = key.shape[1]
        self.forwards += 1
        self.prefixes += len(key) > len(query)
        out = rowattention.rows(query, key, value, cu_seq_q, max_q, cu_seq_k, max_k, scale, None)
        return out, query.new_full(query.shape[1::-1], 7.0, dtype=torch.float32)

    def known(self) -> frozenset[str]:
        return flash4.NEEDED | ({"enable_gqa"} if self.groups else set())

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
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", stand_in.varlen_attn)
    monkeypatch.setattr(flash4, "_known", stand_in.known)
    monkeypatch.setattr(flash4, "available", lambda: True)
    monkeypatch.setattr(flash4, "HEADS", (HEAD,))
    monkeypatch.setattr(varlen, "_FASTER", {})
    flash4.takes_groups.cache_clear()
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


@pytest.mark.parametrize(
    ("asked", "unasked", "heads"), [(True, None, 2), (False, None, 4), (False, "right", 2), (False, "swapped", 4)]
)
def test_pytorchs_kernel_gets_as_many_heads_of_keys_as_it_takes(
    asked: bool, unasked: str | None, heads: int, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainer")
    query, key, value = (torch.randn(*shape, HEAD) for shape in ((9, 4), (14, 2), (14, 2)))
    places = (torch.tensor([0, 5, 9], dtype=torch.int32), 5, torch.tensor([0, 5, 14], dtype=torch.int32), 9)
    expected = rowattention.rows(query, key, value, *places, 0.25, None)
    package.groups, package.unasked = asked, unasked

    found, sums = flash4._attention(query, key, value, *places, 0.25)

    assert package.key_heads == heads
    assert caplog.text.count("heads of keys are repeated, since PyTorch's kernel") == (heads == 4)
    assert torch.allclose(found, expected)
    assert sums.shape == (4, 9)


def test_whole_rows_through_another_kernel_keep_the_shared_ones_there(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = varlen.Flash(varlen.FLASH_ATTN, rowattention.rows, True, True, True)
    monkeypatch.setattr(varlen, "flash", lambda: kernel)

    varlen.find_faster(CPU, 4, 2, HEAD)

    assert not varlen.has_faster()
    assert not package.forwards


def test_its_operations_are_what_compiled_layers_take_them_for(package: Package) -> None:
    query, key, value = (torch.randn(*shape, HEAD, requires_grad=True) for shape in ((9, 4), (14, 2), (14, 2)))
    ends, key_ends = (torch.tensor([0, 5, end], dtype=torch.int32) for end in (9, 14))

    torch.library.opcheck(flash4._forward, (query, key, value, ends, key_ends, 16, 16, 0.25))

    assert package.forwards


def test_it_is_not_there_without_a_gpu_or_where_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(flash4.SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash4, "_package", object)
    known = [flash4.NEEDED]
    monkeypatch.setattr(flash4, "_known", lambda: known[0])
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[0])

    assert flash4.available()
    capability[0] = (8, 0)
    assert not flash4.available()
    capability[0] = (9, 0)
    known[0] = flash4.NEEDED - {"window_size"}  # PyTorch 2.10's kernel
    caplog.set_level(logging.INFO, "trainer")
    assert not flash4.available()
    assert "without FlashAttention 4 (this PyTorch's varlen_attn has no window_size)" in caplog.text
    known[0] = flash4.NEEDED
    monkeypatch.setenv(flash4.SWITCH, "0")
    assert not flash4.available()
    monkeypatch.delenv(flash4.SWITCH)
    monkeypatch.setattr(flash4, "_package", _missing)
    assert not flash4.available()
    assert "without FlashAttention 4 (no module named flash_attn.cute)" in caplog.text
    monkeypatch.setattr(flash4, "_package", _broken)
    assert not flash4.available()


def _missing() -> Any:
    raise ModuleNotFoundError("no module named flash_attn.cute")


def _broken() -> Any:
    raise KeyError("a compiler of another release")
