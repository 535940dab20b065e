"""Layers in training: rows through a flash kernel, recomputed activations, compiled code."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import families
import pytest
import rowattention
import torch
from builders import (
    gradients,
    group_rows,
    grouped_query_lm,
    learner,
    relative_difference,
    sampled_rows,
    small_config,
    small_parts,
)
from transformers import Lfm2Config, Lfm2ForCausalLM

from trainer.errors import UserError
from trainer.train import attention, chunks, layers
from trainer.train.layout import PackedLayout
from trainer.train.logprobs import PolicyModel, token_logprobs
from trainer.train.packing import pack
from trainer.types import Row

FREE = ("train.grad_clip=1e9", "train.max_tokens_per_mb=64")


@pytest.fixture(scope="module", params=["llama", "qwen2_grouped"])
def lm(request: pytest.FixtureRequest) -> Any:
    return small_parts().lm if request.param == "llama" else grouped_query_lm()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Traced and differentiated as for a GPU, but run by PyTorch's own operations: quick, and of the same values."""
    rowattention.use(monkeypatch)
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.long
def test_compiled_layers_look_through_their_own_windows(compiled: Any) -> None:
    lm = families.make(*families.KINDS["gemma3"])
    lm.config._attn_implementation = attention.IMPLEMENTATION
    expected, _ = gradients(learner(lm, small_config(*FREE)), rows_of(lm))

    found, _ = gradients(learner(lm, small_config(*FREE, "train.compile=true")), rows_of(lm))

    assert relative_difference(found, expected) <= 1e-5
    assert not compiled["graph_break"]
    assert 2 <= compiled["stats"]["unique_graphs"] <= 4  # one for each window


def rows_of(lm: Any) -> list[Row]:
    return sampled_rows(lm, 9, lm.config.vocab_size)


def test_rows_through_a_flash_kernel_give_the_gradients_of_padded_blocks(
    lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = gradients(learner(lm, small_config(*FREE)), rows_of(lm))
    rowattention.use(monkeypatch)
    monkeypatch.setattr(PackedLayout, "blocks", property(lambda _: pytest.fail("blocks were made")))

    found, stats = gradients(learner(lm, small_config(*FREE)), rows_of(lm))

    assert stats.values["micro_batches"] > 2
    assert relative_difference(found, expected) <= 1e-5


@pytest.mark.parametrize(
    ("lm", "checkpointing"),
    [("llama", "none"), ("qwen2_grouped", "selective"), ("qwen2_grouped", "full")],
    indirect=["lm"],
)
def test_compiled_layers_give_the_same_gradients_and_are_compiled_once(
    lm: Any, checkpointing: str, compiled: Any
) -> None:
    settings = (*FREE, f"model.gradient_checkpointing={checkpointing}")
    expected, _ = gradients(learner(lm, small_config(*settings)), rows_of(lm))
    one = learner(lm, small_config(*settings, "train.compile=true"))

    found, stats = gradients(one, rows_of(lm))
    graphs = compiled["stats"]["unique_graphs"]
    more = sampled_rows(lm, 17, lm.config.vocab_size, seed=9)
    longer = [stats.values["micro_batches"], one.step(more).values["micro_batches"]]

    assert relative_difference(found, expected) <= 1e-5
    assert not compiled["graph_break"]
    assert longer[1] > longer[0] > 2  # micro-batches of many lengths and numbers of rows …
    assert 2 <= graphs <= 4  # layers and scores, the first micro-batch sometimes apart
    assert compiled["stats"]["unique_graphs"] == graphs  # … and no compilation for each of them


def test_pieces_are_compiled_once_for_any_number_of_them(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 16)
    lm, settings = grouped_query_lm(), (*FREE, "train.compile=true", "model.gradient_checkpointing=chunked")
    rows = group_rows(lm, [(40, [(3, 5), (9, 2), (1, 8)]), (24, [(5, 5), (1, 7)])])
    expected, _ = gradients(learner(lm, small_config(*FREE)), rows)
    one = learner(lm, small_config(*settings))

    found, _ = gradients(one, rows)
    graphs = compiled["stats"]["unique_graphs"]
    one.step(sampled_rows(lm, 17, lm.config.vocab_size, seed=9))

    assert relative_difference(found, expected) <= 1e-5
    assert compiled["stats"]["unique_graphs"] == graphs <= 8  # the two sides of a piece, and each with and without grad


def test_layers_without_a_part_for_pieces_are_refused() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    lm = Lfm2ForCausalLM(Lfm2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    with pytest.raises(
        UserError, match=r"=chunked: layers of Lfm2ForCausalLM .*: set model\.gradient_checkpointing=full"
    ):
        layers.prepare_layers(lm, "chunked", compiled=False)


def test_sampling_does_not_go_through_what_training_compiled(compiled: Any) -> None:
    parts = small_parts()
    one = learner(parts.lm, small_config("train.compile=true", "model.gradient_checkpointing=full"))
    parts.lm = one.policy.lm

    parts.rollouts(2)

    assert not compiled["stats"]["unique_graphs"]


def test_what_is_compiled_of_the_scores_has_inputs_of_their_device_alone(
    lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler would make C++ code for any other, beside the GPU's: nearly a minute on a new machine."""
    devices = []

    def look(graph: Any, inputs: list[Any]) -> Any:
        devices.extend(one.device.type for one in inputs if isinstance(one, torch.Tensor))
        return graph.forward

    monkeypatch.setattr(layers, "BACKEND", look)
    torch._dynamo.reset()
    policy = PolicyModel(copy.deepcopy(lm).to("meta"), compiled=True)
    batch = pack(rows_of(lm), torch.device("meta"))
    hidden = torch.zeros(1, batch.input_ids.shape[1], lm.config.hidden_size, device="meta")
    monkeypatch.setattr(policy.lm.model, "forward", lambda **_: SimpleNamespace(last_hidden_state=hidden))
    for temperature in (1.0, 0.7):
        token_logprobs(policy, batch, temperature)
    torch._dynamo.reset()

    assert devices
    assert set(devices) == {"meta"}
