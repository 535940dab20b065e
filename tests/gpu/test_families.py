"""On a GPU: log-probs and gradients of every supported class, its windows among them, through the flash kernel.

python3 -m pytest tests/gpu/test_families.py -m gpu
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import trainingranks  # noqa: E402
from families import KINDS, VOCABULARY, make  # noqa: E402

from trainer.train import attention, parity, varlen  # noqa: E402
from trainer.train.distributed import whole  # noqa: E402
from trainer.train.layers import can_compile, prepare_layers  # noqa: E402
from trainer.train.layout import PackedLayout  # noqa: E402
from trainer.train.logprobs import PolicyModel, token_logprobs  # noqa: E402
from trainer.train.model import copy_in  # noqa: E402
from trainer.train.packing import pack  # noqa: E402
from trainer.types import Row  # noqa: E402

DEVICE = torch.device("cuda", 0)
LENGTHS = (400, 37, 5, 1100, 8, 64)


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        found.append(Row(ids[: length // 2], ids[length // 2 :], [0.0] * (length - length // 2), 1.0, 1.0, number))
    return found


def test_the_kernel_knows_windows() -> None:
    kernel = varlen.flash()
    assert kernel is not None
    assert kernel.windowed
    print(kernel.name, torch.__version__, "grouped", kernel.grouped)


def test_a_window_of_the_kernel_is_that_of_transformers() -> None:
    """Query i sees the keys i - window + 1 … i, values and gradients, heads grouped or not."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((300, 8, 64), (300, 2, 64), (300, 2, 64))
    given = [torch.randn(s, generator=generator, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for s in shapes]
    layout = PackedLayout.of([170, 1, 129], DEVICE)
    blocks = [x.transpose(0, 1)[None] for x in given]
    for window in (1, 2, 64, 128, 299, None):
        flash = varlen.attend(*given, layout.ends, layout.longest, None, window)
        expected = attention._blocks(*blocks, layout, None, window, None)[0]
        assert float((flash - expected).detach().float().abs().max()) < 0.03, window
        weights = torch.randn(flash.shape, generator=generator, device=DEVICE, dtype=flash.dtype)
        pairs = zip(*(torch.autograd.grad((out * weights).sum(), given) for out in (flash, expected)), strict=True)
        for mine, its in pairs:
            # A query that sees itself alone has no gradient, nor has its key: nothing but rounding is left to compare.
            assert float((mine - its).float().norm()) < 0.02 * float(its.float().norm()) + 1e-3, window


@pytest.mark.parametrize(
    ("kind", "compiled"), [*((kind, False) for kind in KINDS), ("qwen2_window", True), ("gemma3", True)]
)
def test_log_probs_and_gradients_are_the_class_s_own(kind: str, compiled: bool) -> None:
    if compiled and not can_compile(DEVICE):
        pytest.skip("torch.compile needs Triton and a C compiler")
    family, settings = KINDS[kind]
    single = make(family, settings | {"max_position_embeddings": 2048}).to(DEVICE)  # by the book, in float32
    lm = copy_in(single, torch.bfloat16).requires_grad_(True)
    single.config._attn_implementation = "eager"
    lm.config._attn_implementation = attention.IMPLEMENTATION
    prepare_layers(lm, "selective" if compiled else "none", compiled)
    batch = pack(rows(), DEVICE)
    head = lm.model.layers[0].self_attn.head_dim
    flash = "row_ends" in batch.layout.arguments(torch.bfloat16, head, lm.config)
    assert flash == (kind != "gemma2")  # its capped scores are computed by blocks

    found, _ = token_logprobs(PolicyModel(lm), batch, 1.0, 4096)
    expected = torch.cat([by_the_book(single, row) for row in rows()])
    gap = float((found - expected).abs().mean())
    print(kind, "gap", gap, "spread", float(expected.std()))
    assert gap < 0.1
    assert float(expected.std()) > 0.5

    weights = torch.linspace(-1, 1, len(found), device=DEVICE)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    ours = torch.cat([p.grad.float().flatten() for p in lm.parameters()])
    theirs = torch.cat([p.grad.flatten() for p in single.parameters()])
    angle = torch.nn.functional.cosine_similarity(ours, theirs, 0)
    print(kind, "gradients' cosine", float(angle))
    assert float(angle) > 0.98


@pytest.mark.parametrize(("dtype", "compiled"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_what_is_trained_on_agrees_before_the_first_step(dtype: str, compiled: bool) -> None:
    if compiled and not can_compile(DEVICE):
        pytest.skip("torch.compile needs Triton and a C compiler")
    one = trainingranks.make_learner(dtype, compile=compiled, checkpointing="selective" if compiled else "none")
    before = {name: whole(p).clone() for name, p in one.policy.lm.named_parameters()}

    found = parity.require_parity(one, 3000, trainingranks.VOCABULARY)

    print(dtype, compiled, found)
    assert found.gap < parity.BOUNDS[getattr(torch, dtype)] / 2
    assert all(torch.equal(whole(p), before[name]) for name, p in one.policy.lm.named_parameters())
    assert one.step(trainingranks.make_rows()).stepped


def by_the_book(lm: Any, row: Row) -> Any:
    ids = torch.tensor([row.prompt_ids + row.response_ids], device=DEVICE)
    logp = torch.log_softmax(lm(ids).logits[0], -1)[len(row.prompt_ids) - 1 : -1]
    return logp.gather(1, ids[0, len(row.prompt_ids) :, None])[:, 0]
