"""The feed-forward part of a layer by pieces: the values and gradients of the whole, whatever is trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from clusterkit.capacity import memory
from trainer.train import chunks
from trainer.train.chunks import by_chunks


def feed_forward() -> nn.Module:
    torch.manual_seed(0)
    return LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=24, num_attention_heads=1)).double()


def found(module: nn.Module, part: Callable[[Tensor], Tensor], hidden: Tensor) -> list[Tensor]:
    """Output, and gradients of the input, where it has one, and of the weights that learn."""
    wanted = [*(x for x in (hidden,) if x.requires_grad), *(p for p in module.parameters() if p.requires_grad)]
    out = checkpoint(part, hidden, use_reentrant=False)
    factors = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * factors).sum(), wanted)]


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 41), st.booleans(), st.sampled_from(["all", "one", "none"]))
def test_pieces_give_what_the_whole_gives(tokens: int, piece: int, input_learns: bool, weights: str) -> None:
    """Every border of pieces; frozen weights, one that learns among them, an input that nothing before it moves."""
    module = feed_forward()
    for name, weight in module.named_parameters():
        weight.requires_grad_(weights == "all" or (weights == "one" and name.startswith("up_proj")))
    input_learns = input_learns or weights == "none"
    hidden = torch.randn(1, tokens, 8, dtype=torch.float64, requires_grad=input_learns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", piece)
        mine = found(module, by_chunks(module, module.forward), hidden)
        with torch.no_grad():
            silent = by_chunks(module, module.forward)(hidden)

    for one, other in zip(mine, found(module, module.forward, hidden), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # gradients of weights are summed in float32
    torch.testing.assert_close(silent, mine[0])


def test_no_piece_is_longer_than_asked_and_rectangles_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = feed_forward(), list[tuple[int, ...]]()
    monkeypatch.setattr(chunks, "CHUNK", 10)

    def part(hidden: Tensor) -> Tensor:
        seen.append(tuple(hidden.shape))
        return module(hidden)

    with torch.no_grad():
        for shape in ((1, 41, 8), (2, 41, 8), (1, 10, 8)):
            by_chunks(module, part)(torch.zeros(shape, dtype=torch.float64))

    assert seen == [*[(1, 9, 8)] * 4, (1, 5, 8), (2, 41, 8), (1, 10, 8)]


def test_the_plan_counts_pieces_of_the_size_that_is_computed() -> None:
    assert memory.PIECE == chunks.CHUNK
