"""The embedded engine's numbers: those of the plain model, whatever else is in the batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from builders import full_logprobs, grouped_query_lm, plain_copy, random_prompts, small_parts

from trainer.engines.embedded import EmbeddedEngine
from trainer.types import SamplingParams

STOP = {0}


@pytest.fixture(scope="module", params=["llama", "qwen2_grouped"])
def lm(request: pytest.FixtureRequest) -> Any:
    return small_parts().lm if request.param == "llama" else grouped_query_lm()


def requests(lm: Any, count: int = 12, temperature: float = 1.0) -> list[tuple[list[int], SamplingParams]]:
    prompts = random_prompts(count, 1, 40, lm.config.vocab_size, seed=4)
    return [(p, SamplingParams(3 + i % 7, temperature, seed=i)) for i, p in enumerate(prompts)]


def test_greedy_is_what_transformers_generates(lm: Any) -> None:
    plain = plain_copy(lm, torch.float32)
    prompts = random_prompts(6, 3, 30, lm.config.vocab_size)
    # End tokens that are met, so that some responses stop early.
    first = EmbeddedEngine(lm, STOP).generate_batch([(prompts[0], SamplingParams(10, 0.0))])[0]
    stop = {first.token_ids[4], 0}

    found = EmbeddedEngine(lm, stop).generate_batch([(p, SamplingParams(10, 0.0)) for p in prompts])

    for prompt, completion in zip(prompts, found, strict=True):
        expected = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=sorted(stop),
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert completion.token_ids == expected
        assert completion.finish_reason == ("stop" if expected[-1] in stop else "length")
    assert {c.finish_reason for c in found} == {"stop", "length"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward_pass(lm: Any, temperature: float) -> None:
    plain = plain_copy(lm)
    asked = requests(lm, temperature=temperature)

    for (prompt, _), completion in zip(asked, EmbeddedEngine(lm, STOP).generate_batch(asked), strict=True):
        expected = full_logprobs(plain, prompt, completion.token_ids, temperature)
        assert torch.allclose(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-5)


def test_a_response_does_not_depend_on_its_neighbours(lm: Any) -> None:
    asked = requests(lm, 16)
    together = EmbeddedEngine(lm, STOP).generate_batch(asked)
    shuffled = EmbeddedEngine(lm, STOP).generate_batch(asked[::-1])[::-1]

    for one, a, b in zip(asked, together, shuffled, strict=True):
        alone = EmbeddedEngine(lm, STOP).generate_batch([one])[0]
        assert a.token_ids == b.token_ids == alone.token_ids
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-5)
        assert torch.allclose(torch.tensor(b.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-5)


def test_equal_prompts_are_computed_once_and_sampled_apart(lm: Any) -> None:
    prompt, other = random_prompts(2, 20, 20, lm.config.vocab_size, seed=9)
    params = [SamplingParams(6, seed=i) for i in range(8)]
    engine = EmbeddedEngine(lm, STOP)

    found = engine.generate_batch([*((prompt, p) for p in params), (other, params[0])])

    alone = [EmbeddedEngine(lm, STOP).generate_batch([(prompt, p)])[0] for p in params]
    assert [c.token_ids for c in found[:-1]] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in found}) > 1
    assert (engine.stats.prompt_tokens, engine.stats.prefilled_tokens) == (9 * 20, 2 * 20)
    assert engine.stats.sampled_tokens == sum(len(c.token_ids) for c in found)


def test_blocks_stay_under_the_token_limit_and_change_no_result(lm: Any) -> None:
    asked = [*requests(lm, 20), (random_prompts(1, 90, 90, lm.config.vocab_size)[0], SamplingParams(3))]
    unlimited = EmbeddedEngine(lm, STOP).generate_batch(asked)
    sizes: list[tuple[int, int]] = []

    def look(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        sizes.append(tuple(inputs["input_ids"].shape))

    watched = copy.deepcopy(lm)
    watched.model.register_forward_pre_hook(look, with_kwargs=True)
    limited = EmbeddedEngine(watched, STOP, max_batch_tokens=80).generate_batch(asked)

    prefills = [(rows, length) for rows, length in sizes if length > 1]
    assert all(rows * length <= 80 or rows == 1 for rows, length in prefills)
    assert (1, 90) in prefills  # longer than the limit, so alone
    assert max(rows for rows, _ in prefills) > 1
    assert [c.token_ids for c in limited] == [c.token_ids for c in unlimited]


def test_padding_of_a_block_is_bounded(lm: Any) -> None:
    asked = [(p, SamplingParams(1)) for p in random_prompts(60, 1, 60, lm.config.vocab_size)]
    padded: list[int] = []
    watched = copy.deepcopy(lm)
    watched.model.register_forward_pre_hook(
        lambda _, __, inputs: padded.append(inputs["input_ids"].numel()), with_kwargs=True
    )

    EmbeddedEngine(watched, STOP).generate_batch(asked)

    assert sum(padded) <= sum(len(p) for p, _ in asked) / 0.75
    assert len(padded) < 30


@pytest.mark.parametrize("size", [2, 5])
def test_what_prompts_begin_with_is_computed_once_and_changes_nothing(lm: Any, size: int) -> None:
    """Two groups with tails of unequal length, and a prompt that shares nothing: each as if it were alone."""
    vocabulary = lm.config.vocab_size
    prompts = []
    for number, shared in enumerate((300, 260)):
        prefix = random_prompts(1, shared, shared, vocabulary, seed=number)[0]
        prompts += [prefix + tail for tail in random_prompts(size, 1, 30, vocabulary, seed=10 + number)]
    prompts += random_prompts(1, 280, 280, vocabulary, seed=20)
    asked = [(prompt, SamplingParams(6, seed=i)) for i, prompt in enumerate(prompts)]
    engine = EmbeddedEngine(lm, STOP)
    for (prompt, _), one, alone in zip(
        asked,
        engine.generate_batch(asked),
        EmbeddedEngine(lm, STOP, share_prefixes=False).generate_batch(asked),
        strict=True,
    ):
        assert one.token_ids == alone.token_ids
        expected = full_logprobs(plain_copy(lm), prompt, one.token_ids, 1.0)
        assert torch.allclose(torch.tensor(one.logprobs).double(), expected, rtol=0, atol=1e-5)
    assert engine.stats.prompt_tokens == sum(map(len, prompts))
    assert engine.stats.prefilled_tokens == engine.stats.prompt_tokens - (size - 1) * (300 + 260)


def test_short_prompts_are_read_in_one_pass(lm: Any) -> None:
    prompts = [[5] * 40 + [n] for n in range(4)]
    engine = EmbeddedEngine(lm, STOP)
    engine.generate_batch([(prompt, SamplingParams(2, seed=1)) for prompt in prompts])
    assert engine.stats.prefilled_tokens == engine.stats.prompt_tokens


def test_a_model_with_windows_reads_whole_prompts(lm: Any) -> None:
    """Between what is shared and what is not there may be padding, which a window would count."""
    windowed = copy.deepcopy(lm)
    windowed.config.update({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True})
    windowed.config.layer_types = ["sliding_attention"] * windowed.config.num_hidden_layers
    assert EmbeddedEngine(lm, STOP).share_prefixes
    assert not EmbeddedEngine(windowed, STOP).share_prefixes
