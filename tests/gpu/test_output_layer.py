"""The float32 output layer that servers get (trainer/engines/sglang_side), beside SGLang's own and float64.

    python3 -m pytest tests/gpu/test_output_layer.py -m gpu

needs SGLang in the same Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.realparts import require
from trainer.engines.sglang_setting import SGLANG_SIDE

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

TOKENS, WIDTH, VOCABULARY = 256, 1536, 151_936


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    require(torch.cuda.is_available(), "a GPU")
    pytest.importorskip("sglang")
    monkeypatch.syspath_prepend(str(SGLANG_SIDE))
    import clusterkit_sglang  # noqa: PLC0415 (found by the path above)

    layer: Callable[..., Any] = clusterkit_sglang.output_layer
    yield layer
    sys.modules.pop("clusterkit_sglang", None)


def sglang_own(self: Any, hidden: Any, head: Any, bias: Any = None) -> Any:
    """As SGLang 0.5.17 has it."""
    return torch.matmul(hidden.float(), head.weight.float().T)


def test_its_scores_are_as_near_to_the_true_ones_as_sglangs_in_tf32(
    layer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)  # as servers are started
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    head = SimpleNamespace(weight=torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16) / 8)
    mine = layer(sglang_own, SimpleNamespace(use_fp32_lm_head=True), hidden, head)
    assert mine.dtype == torch.float32
    true = torch.cat([part.double() @ head.weight.double().T for part in hidden.split(64)])

    def off(scores: Any) -> float:
        return ((scores - true).abs().max() / true.std()).item()

    assert off(mine) < 1.5 * off(sglang_own(None, hidden, head))
    assert off(torch.matmul(hidden, head.weight.T)) > 100 * off(mine), "scores in bfloat16"


def test_layers_that_are_not_plain_ones_are_left_to_sglang(layer: Callable[..., Any]) -> None:
    def own(*_: Any) -> str:
        return "SGLang's"

    here, there = (torch.zeros(4, 8, dtype=torch.bfloat16, device=device) for device in ("cuda", "cpu"))
    wanted, not_wanted = SimpleNamespace(use_fp32_lm_head=True), SimpleNamespace(use_fp32_lm_head=False)
    plain = SimpleNamespace(weight=here)
    assert layer(own, wanted, here, plain).shape == (4, 4)
    for processor, hidden, head in (
        (not_wanted, here, plain),
        (wanted, there, SimpleNamespace(weight=there)),
        (wanted, here.float(), SimpleNamespace(weight=here.float())),
        (wanted, here, SimpleNamespace(weight=here, set_lora=False, apply_lora=None)),
        (wanted, here, SimpleNamespace(qweight=here)),
        (wanted, here, SimpleNamespace(weight=here, quant_method=SimpleNamespace(apply=own))),
    ):
        assert layer(own, processor, hidden, head) == "SGLang's"
