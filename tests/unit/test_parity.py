"""Before the first step, log-probs as they are trained on are compared with the model's own forward pass."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import learner, parameters, sampled_rows, small_config
from families import KINDS, make

from trainer.base_run import Attempt, SteppedRun
from trainer.checkpoint.start import Start
from trainer.config_parts import ModelConfig
from trainer.errors import UserError
from trainer.metrics import Monitor
from trainer.train import families, parity
from trainer.train.distributed import single_world
from trainer.train.layout import PackedLayout
from trainer.train.learner import Learner
from trainer.train.model import load_lm


def loaded(folder: Path, kind: tuple[str, dict[str, Any]]) -> Any:
    make(*kind).save_pretrained(folder)
    return load_lm(folder, ModelConfig(), torch.float32)


def compared(lm: Any, *settings: str, tokens: int = 90) -> parity.Parity:
    return parity.require_parity(learner(lm, small_config(*settings)), tokens, lm.config.vocab_size)


@pytest.mark.parametrize("kind", ["llama", "mistral_window", "smollm3", "gemma2"])
def test_a_supported_model_agrees_and_is_left_as_it_was(kind: str, tmp_path: Path) -> None:
    one = learner(loaded(tmp_path, KINDS[kind]), small_config())
    before, random_state = parameters(one), torch.random.get_rng_state()
    implementation = one.policy.lm.config._attn_implementation

    found = parity.require_parity(one, 90, 89)

    assert (found.tokens, found.compared) == (90, 45)
    assert found.gap < 1e-4 < abs(found.ours)
    assert all(torch.equal(value, before[name]) for name, value in parameters(one).items())
    assert all(p.grad is None for p in one.policy.parameters())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert one.policy.lm.config._attn_implementation == implementation
    assert one.policy.training


# What the class does is not known: the list of those that are is a promise, and this is what holds it.
@pytest.mark.parametrize(
    ("family", "settings"), [("Granite", {"logits_scaling": 8.0}), ("Cohere", {"logit_scale": 0.25})]
)
def test_a_class_that_scales_its_logits_ends_the_run(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.SUPPORTED, f"{family}ForCausalLM", family)
    lm = loaded(tmp_path, (family, settings))

    with pytest.raises(UserError, match=rf"by {family}ForCausalLM's own forward pass, .* of a row of 90") as caught:
        compared(lm)

    assert caught.value.exit_code == 2
    assert "0.001 is the most that is taken for rounding" in str(caught.value)
    assert compared(lm, "train.max_logprob_gap=50").gap > 0.3


def test_a_window_that_is_left_out_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded(tmp_path, KINDS["mistral_window"])
    band = PackedLayout.band
    monkeypatch.setattr(PackedLayout, "band", lambda layout, length, _: band(layout, length, None))

    assert compared(lm, tokens=8).gap < 1e-4  # a row that the window holds tells nothing
    with pytest.raises(UserError):
        compared(lm)


def test_rows_that_see_one_another_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded(tmp_path, KINDS["llama"])
    of = PackedLayout.of.__func__  # type: ignore[attr-defined]

    def one_row(cls: type, lengths: list[int], device: torch.device, _: object) -> PackedLayout:
        return of(cls, [sum(lengths)], device)

    monkeypatch.setattr(PackedLayout, "of", classmethod(one_row))

    with pytest.raises(UserError):
        compared(lm)


def test_rows_that_do_not_see_the_prefix_that_they_share_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = loaded(tmp_path, KINDS["llama"])
    of = PackedLayout.of.__func__  # type: ignore[attr-defined]

    def blind(cls: type, lengths: list[int], device: torch.device, _: object) -> PackedLayout:
        return of(cls, lengths, device)

    monkeypatch.setattr(PackedLayout, "of", classmethod(blind))

    compared(lm, "train.share_prefixes=false")
    with pytest.raises(UserError):
        compared(lm)


def test_weights_that_are_not_numbers_end_the_run(tmp_path: Path) -> None:
    lm = loaded(tmp_path, KINDS["llama"])
    with torch.no_grad():
        lm.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="nan apart"):
        compared(lm)


def test_on_a_cpu_a_row_is_as_long_as_it_takes_to_pass_the_window() -> None:
    lengths = {
        name: parity._length(9000, make(*KINDS[name][:1], KINDS[name][1] | {"sliding_window": window}), device)
        for name, window, device in (
            ("mistral", None, torch.device("cpu")),
            ("mistral_window", 4096, torch.device("cpu")),
        )
    }
    assert lengths == {"mistral": 1024, "mistral_window": 4608}
    assert parity._length(9000, make(*KINDS["mistral"]), torch.device("cuda")) == 9000


class Run(SteppedRun):
    """The part of a run that makes optimizer steps."""

    def __init__(self, folder: Path, lm: Any, *settings: str) -> None:
        folder.mkdir()
        config = small_config(f"fileroot={folder}", *settings)
        super().__init__(Attempt(config, folder, single_world(), Monitor(folder, 1), lambda: False, Start(None)))
        self.learner = Learner(lm, config, self.world, 10)
        self.tokenizer = range(lm.config.vocab_size)
        self.longest_row = 60

    def run(self) -> None:
        raise NotImplementedError

    def _publish(self, version: int) -> None:
        raise NotImplementedError


def test_a_run_compares_once_before_its_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainer")
    lm = loaded(tmp_path / "model", KINDS["llama"])
    rows = sampled_rows(lm, 4, lm.config.vocab_size)
    refused = Run(tmp_path / "refused", copy.deepcopy(lm), "train.max_logprob_gap=1e-12")
    with pytest.raises(UserError):
        refused._optimize([rows], 1)
    assert refused.learner.optimizer_steps == 0

    run = Run(tmp_path / "run", copy.deepcopy(lm))
    run._optimize([rows], 1)
    run._optimize([rows], 2)
    off = Run(tmp_path / "off", copy.deepcopy(lm), "train.max_logprob_gap=0")
    off._optimize([rows], 1)
    off._optimize([rows], 2)

    assert caplog.text.count("Log-probs are the model's own") == 1
    ours, theirs = parameters(run.learner), parameters(off.learner)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())  # to the last bit
