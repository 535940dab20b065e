"""Log-probs and gradients of every model class that is supported are those of the class's own forward pass; others are
refused by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rowattention
import torch
from builders import byte_tokenizer, full_logprobs, learner, small_config
from families import GEMMA, KINDS, SIZES, VOCABULARY, make
from transformers import AutoModelForCausalLM

from trainer.checkpoint.export import export
from trainer.config_parts import ModelConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.errors import UserError
from trainer.train import attention
from trainer.train.families import SUPPORTED, windows
from trainer.train.loading import fill, open_checkpoint
from trainer.train.logprobs import PolicyModel, token_logprobs
from trainer.train.model import context_window, describe, load_lm, stop_token_ids
from trainer.train.packing import pack
from trainer.types import Row, SamplingParams


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make(*KINDS[request.param]).save_pretrained(tmp_path)
    return tmp_path


def own(folder: Path) -> Any:
    """The class itself in float64, with the attention that it is written with."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def rows_of(lengths: list[tuple[int, int]]) -> list[Row]:
    rng = random.Random(3)
    rows = []
    for number, (prompt, response) in enumerate(lengths):
        ids = [rng.randrange(3, VOCABULARY) for _ in range(prompt + response)]
        rows.append(Row(ids[:prompt], ids[prompt:], [-1.0] * response, 1.0, 1.0 / 40, number))
    return rows


# Rows under the window, of its length, and far over it; the first three share a block.
LENGTHS = [(30, 10), (31, 7), (25, 12), (2, 3), (6, 2), (60, 20), (1, 1)]


@pytest.mark.parametrize("way", ["blocks", "flash"])
def test_packed_log_probs_and_gradients_are_the_class_s_own(
    folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "flash":  # the same arguments, by a stand-in for the kernel of GPUs
        rowattention.use(monkeypatch)
    lm, plain, rows = load_lm(folder, ModelConfig(), torch.float32), own(folder), rows_of(LENGTHS)
    batch = pack(rows, torch.device("cpu"))

    logp, _ = token_logprobs(PolicyModel(lm), batch, 1.0, chunk=16)
    expected = torch.cat([full_logprobs(plain, row.prompt_ids, row.response_ids) for row in rows])
    gap = float((logp.double() - expected).detach().abs().mean())

    assert gap < 2e-5
    assert float(expected.detach().std()) > 0.3  # it would show
    weights = torch.linspace(-1, 1, len(logp))
    logp.mul(weights).sum().backward()
    expected.mul(weights.double()).sum().backward()
    gradients = dict(plain.named_parameters())
    largest = max(float(p.grad.norm()) for p in gradients.values())
    for name, parameter in lm.named_parameters():
        difference = float((parameter.grad.double() - gradients[name].grad).norm())
        assert difference <= 1e-4 * max(float(gradients[name].grad.norm()), 1e-3 * largest), name


def test_what_the_embedded_engine_samples_has_the_class_s_own_log_probs(folder: Path) -> None:
    lm, plain = load_lm(folder, ModelConfig(), torch.float32), own(folder)
    prompts = [row.prompt_ids for row in rows_of(LENGTHS)]
    engine = EmbeddedEngine(lm.eval(), {2})

    requests = [(prompt, SamplingParams(12, 1.0, seed=i)) for i, prompt in enumerate(prompts)]
    for prompt, completion in zip(prompts, engine.generate_batch(requests), strict=True):
        expected = full_logprobs(plain, prompt, completion.token_ids).detach()
        assert float((torch.tensor(completion.logprobs).double() - expected).abs().max()) < 5e-4


def test_a_model_that_is_read_in_parts_is_the_one_that_is_loaded_whole(folder: Path) -> None:
    whole = load_lm(folder, ModelConfig(), torch.float32)
    lm, weights = open_checkpoint(folder, ModelConfig())
    fill(lm, weights, torch.device("cpu"))
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(whole, kind)())
        assert all(torch.equal(tensor, expected.pop(name)) for name, tensor in getattr(lm, kind)())
        assert not expected


@pytest.mark.parametrize("kind", ["mistral_window", "qwen2_window", "gemma3"])
def test_what_a_step_leaves_is_exported_as_the_same_model(kind: str, tmp_path: Path) -> None:
    make(*KINDS[kind]).save_pretrained(tmp_path / "start")
    one = learner(load_lm(tmp_path / "start", ModelConfig(), torch.float32), small_config("train.learning_rate=0.01"))
    rows = rows_of(LENGTHS)
    assert one.step(rows).stepped

    export(one, byte_tokenizer(), tmp_path / "out")

    plain = own(tmp_path / "out")
    for row, found in zip(rows, one.logprobs(rows), strict=True):
        expected = full_logprobs(plain, row.prompt_ids, row.response_ids).detach()
        assert float((torch.tensor(found).double() - expected).abs().mean()) < 1e-4


def test_the_windows_of_a_model_s_layers() -> None:
    found = {name: windows(make(*kind).config) for name, kind in KINDS.items()}
    assert {name: value for name, value in found.items() if any(value)} == {
        "mistral_window": [8, 8, 8],
        "qwen2_window": [None, 8, 8],
        "qwen3_window": [None, None, 5],
        "gemma2": [8, None, 8],
        "gemma3": [8, None, 8],
    }


def refusal(folder: Path, load: Callable[[Path], Any]) -> str:
    with pytest.raises(UserError) as caught:
        load(folder)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("load", [lambda f: load_lm(f, ModelConfig()), lambda f: open_checkpoint(f, ModelConfig())])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Granite", {"logits_scaling": 8.0}),
        ("Cohere", {}),
        ("Phi3", {}),
        ("Olmo2", {}),
        ("Gemma", {"head_dim": 16}),
        ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    ],
)
def test_any_other_class_is_refused_by_name(
    family: str, settings: dict[str, Any], load: Callable[[Path], Any], tmp_path: Path
) -> None:
    make(family, settings).save_pretrained(tmp_path)
    said = refusal(tmp_path, load)
    assert f"is a {family}ForCausalLM, whose log-probs are not computed here" in said
    assert all(name in said for name in SUPPORTED)


def test_what_servers_generate_with_may_be_of_any_class(tmp_path: Path) -> None:
    make("Granite", {"logits_scaling": 8.0}).save_pretrained(tmp_path)
    lm = describe(tmp_path)
    assert context_window(lm, ModelConfig()) == SIZES["max_position_embeddings"]
    assert stop_token_ids(lm, None) == {SIZES["eos_token_id"]}


def test_rotary_positions_that_change_with_the_longest_row_are_refused(tmp_path: Path) -> None:
    rotation = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    make("Llama", {"rope_parameters": rotation}).save_pretrained(tmp_path)
    assert "asks for dynamic rotary positions" in refusal(tmp_path, lambda f: load_lm(f, ModelConfig()))


def test_a_model_that_sees_what_comes_after_a_token_is_refused(tmp_path: Path) -> None:
    make("Gemma3", GEMMA | {"use_bidirectional_attention": True}).save_pretrained(tmp_path)
    assert "sees what comes after a token" in refusal(tmp_path, lambda f: load_lm(f, ModelConfig()))


@pytest.mark.parametrize(("name", "value"), [("s_aux", 1.0), ("position_bias", torch.zeros(1)), ("is_causal", False)])
def test_no_keyword_that_changes_attention_is_passed_over(name: str, value: Any) -> None:
    lm = load_tiny()
    batch = pack(rows_of([(4, 2)]), torch.device("cpu"))
    arguments = batch.layout.arguments(torch.float32, 16, lm.config)
    with pytest.raises(UserError):
        lm.model(batch.input_ids, position_ids=batch.position_ids, **arguments, **{name: value})
    lm.model(batch.input_ids, position_ids=batch.position_ids, **arguments, **{name: None})


def test_a_pass_without_rows_and_without_a_mask_is_an_error() -> None:
    with pytest.raises(ValueError, match="rows or a mask"):
        load_tiny()(torch.tensor([[3, 4, 5]]))


def load_tiny() -> Any:
    lm = make(*KINDS["llama"])
    lm.set_attn_implementation(attention.IMPLEMENTATION)
    return lm
