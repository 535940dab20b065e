"""The float32 output layer that servers get (trainer/engines/sglang_side), beside SGLang's own and float64.

    python3 -m pytest tests/gpu/test_output_layer.py -m gpu

needs SGLang in the same Python.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tests.realparts import require
from trainer.engines.sglang_setting import SGLANG_SIDE

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

TOKENS, WIDTH, VOCABULARY = 256, 1536, 151_936
WANTED = SimpleNamespace(use_fp32_lm_head=True, rl_on_policy_target=None)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Any:
    require(torch.cuda.is_available(), "a GPU")
    pytest.importorskip("sglang")
    monkeypatch.syspath_prepend(str(SGLANG_SIDE))
    return importlib.import_module("clusterkit_sglang")


def sglangs(side: Any, answer: Any) -> Any:
    """A function that passes for SGLang's own layer and calls another."""

    def own(*given: Any) -> Any:
        return answer(*given)

    own.__module__ = side.PROCESSOR
    return own


def test_its_scores_are_as_near_to_the_true_ones_as_sglangs_in_tf32(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)  # as servers are started
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    head = SimpleNamespace(weight=torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16) / 8)
    own = importlib.import_module(side.PROCESSOR).LogitsProcessor._compute_lm_head
    mine = side.output_layer(sglangs(side, lambda *_: pytest.fail("SGLang's was asked")), WANTED, hidden, head)
    assert mine.dtype == torch.float32
    true = torch.cat([part.double() @ head.weight.double().T for part in hidden.split(64)])

    def off(scores: Any) -> float:
        return ((scores - true).abs().max() / true.std()).item()

    assert off(mine) < 1.5 * off(own(WANTED, hidden, head))
    assert off(torch.matmul(hidden, head.weight.T)) > 100 * off(mine), "scores in bfloat16"


def test_layers_that_are_not_plain_ones_are_left_to_sglang(side: Any) -> None:
    own = sglangs(side, lambda *_: "SGLang's")
    here, there = (torch.zeros(4, 8, dtype=torch.bfloat16, device=device) for device in ("cuda", "cpu"))
    plain = SimpleNamespace(weight=here)
    assert side.output_layer(own, WANTED, here, plain).shape == (4, 4)
    assert side.output_layer(lambda *_: "others'", WANTED, here, plain) == "others'", "somebody else's plugin"
    for processor, hidden, head in (
        (SimpleNamespace(use_fp32_lm_head=False), here, plain),
        (WANTED, there, SimpleNamespace(weight=there)),
        (WANTED, here.float(), SimpleNamespace(weight=here.float())),
        (WANTED, here[:0], plain),
        (WANTED, here, SimpleNamespace(weight=here, set_lora=False, apply_lora=None)),
        (WANTED, here, SimpleNamespace(qweight=here)),
        (WANTED, here, SimpleNamespace(weight=here, quant_method=SimpleNamespace(apply=own))),
    ):
        assert side.output_layer(own, processor, hidden, head) == "SGLang's"
