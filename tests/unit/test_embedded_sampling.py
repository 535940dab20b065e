"""The embedded engine's draws, and its behaviour as an engine: seeds, ends, bans, pausing, versions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from builders import full_logprobs, grouped_query_lm, plain_copy, random_prompts

from trainer.engines.embedded import EmbeddedEngine, GenerationCancelledError
from trainer.types import Completion, SamplingParams

LM = grouped_query_lm()
VOCABULARY = LM.config.vocab_size
PROMPT = random_prompts(1, 12, 12, VOCABULARY)[0]


def draws(count: int, tokens: int = 1, **settings: Any) -> list[Completion]:
    params = [SamplingParams(tokens, seed=seed, **settings) for seed in range(count)]
    return EmbeddedEngine(LM, set()).generate_batch([(PROMPT, p) for p in params])


def next_token(temperature: float = 1.0, banned: tuple[int, ...] = ()) -> torch.Tensor:
    """The model's distribution after PROMPT, by transformers' own forward pass."""
    with torch.no_grad():
        logits = plain_copy(LM)(torch.tensor([PROMPT])).logits[0, -1] / temperature
    logits[list(banned)] = -torch.inf
    return logits.softmax(-1)


def chi_square(tokens: list[int], expected: torch.Tensor) -> tuple[float, float]:
    """Statistic over tokens that are expected five times or more (the rest pooled), and the value that is passed by
    chance once in ten thousand times (Wilson and Hilferty's approximation).
    """
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    wanted = expected * len(tokens)
    large = wanted >= 5
    pairs = [*zip(counts[large].tolist(), wanted[large].tolist(), strict=True)]
    if float(wanted[~large].sum()):
        pairs.append((float(counts[~large].sum()), float(wanted[~large].sum())))
    freedom = len(pairs) - 1
    critical = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    return sum((found - want) ** 2 / want for found, want in pairs), critical


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_are_drawn_from_the_models_distribution(temperature: float) -> None:
    tokens = [c.token_ids[0] for c in draws(6000, temperature=temperature)]

    found, critical = chi_square(tokens, next_token(temperature))
    wrong, _ = chi_square(tokens, next_token(temperature * 1.25))

    assert found < critical
    assert wrong > 2 * critical  # the test sees a wrong temperature


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, -1), (1.0, 5), (0.9, 12), (1.0, 1000)])
def test_top_p_and_top_k_cut_the_distribution_and_nothing_else(top_p: float, top_k: int) -> None:
    whole = next_token(temperature=2.0)
    ranked, order = whole.sort(descending=True)
    kept = ranked[:top_k] if top_k > 0 else ranked
    share = kept.cumsum(0) / kept.sum()
    number = next(n for n in range(1, len(kept) + 1) if n == len(kept) or share[n - 1] >= top_p)
    expected = torch.zeros_like(whole)
    expected[order[:number]] = ranked[:number] / ranked[:number].sum()

    drawn = draws(3000, temperature=2.0, top_p=top_p, top_k=top_k)

    tokens = [c.token_ids[0] for c in drawn]
    assert set(tokens) <= set(order[:number].tolist())
    found, critical = chi_square(tokens, expected)
    assert found < critical
    assert all(abs(c.logprobs[0] - float(expected[c.token_ids[0]].log())) < 1e-4 for c in drawn[:50])


def test_every_token_of_a_response_has_randomness_of_its_own() -> None:
    """Second tokens, where the first was the commonest, follow the model's distribution too."""
    pairs = [c.token_ids for c in draws(12000, tokens=2)]
    first = int(next_token().argmax())
    with torch.no_grad():
        expected = plain_copy(LM)(torch.tensor([[*PROMPT, first]])).logits[0, -1].softmax(-1)

    found, critical = chi_square([second for token, second in pairs if token == first], expected)

    assert found < critical


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_banned_tokens_are_never_drawn_and_the_rest_is_renormalised(temperature: float) -> None:
    banned = tuple(next_token().topk(3).indices.tolist())
    allowed = next_token(banned=banned)

    found = draws(1500, temperature=temperature, banned_token_ids=banned)

    assert not {c.token_ids[0] for c in found} & set(banned)
    for completion in found[:50]:
        assert completion.logprobs[0] == pytest.approx(float(allowed[completion.token_ids[0]].log()), abs=1e-5)
    if temperature:
        statistic, critical = chi_square([c.token_ids[0] for c in found], allowed)
        assert statistic < critical
    else:
        assert {c.token_ids[0] for c in found} == {int(allowed.argmax())}


def test_bans_concern_one_response_only() -> None:
    best = int(next_token().argmax())
    free, bound = EmbeddedEngine(LM, set()).generate_batch(
        [(PROMPT, SamplingParams(1, 0.0)), (PROMPT, SamplingParams(1, 0.0, banned_token_ids=(best,)))]
    )

    assert free.token_ids == [best]
    assert bound.token_ids != [best]


def test_seeds_decide() -> None:
    once, again = draws(8, tokens=10), draws(8, tokens=10)

    assert once == again
    assert len({tuple(c.token_ids) for c in once}) == 8


def test_a_stop_token_ends_a_response_and_is_part_of_it() -> None:
    stop = int(next_token().argmax())
    ends = {stop, 5, 6, 7}
    params = [SamplingParams(9, seed=seed) for seed in range(60)]

    found = EmbeddedEngine(LM, ends).generate_batch([(PROMPT, p) for p in params])

    plain = plain_copy(LM)
    assert {c.finish_reason for c in found} == {"stop", "length"}
    for completion in found:
        *body, last = completion.token_ids
        assert not set(body) & ends
        assert completion.finish_reason == ("stop" if last in ends else "length")
        assert len(completion.token_ids) == 9 or last in ends
        assert len(completion.logprobs) == len(completion.token_ids)
    # Rows leave the block one by one; those that stay must not be mixed up.
    longest = max(found, key=lambda c: len(c.token_ids))
    expected = full_logprobs(plain, PROMPT, longest.token_ids)
    assert torch.allclose(torch.tensor(longest.logprobs).double(), expected, rtol=0, atol=1e-5)


def test_limits_hold_for_each_response() -> None:
    params = [SamplingParams(limit, seed=limit) for limit in (1, 2, 3, 17)]

    found = EmbeddedEngine(LM, set()).generate_batch([(PROMPT, p) for p in params])

    assert [len(c.token_ids) for c in found] == [1, 2, 3, 17]


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        asyncio.run(EmbeddedEngine(LM, set()).generate([], SamplingParams(1)))


def test_the_weight_version_is_recorded() -> None:
    async def main() -> list[int]:
        engine = EmbeddedEngine(LM, set())
        before = await engine.generate(PROMPT, SamplingParams(1))
        engine.version = 7
        after = await engine.generate(PROMPT, SamplingParams(1))
        assert engine.version == 7
        return [before.version, after.version]

    assert asyncio.run(main()) == [0, 7]


def test_requests_that_wait_together_form_one_batch() -> None:
    async def main() -> EmbeddedEngine:
        engine = EmbeddedEngine(LM, set())
        await asyncio.gather(*(engine.generate(PROMPT, SamplingParams(2, seed=i)) for i in range(5)))
        return engine

    stats = asyncio.run(main()).stats
    assert (stats.batches, stats.prefilled_tokens) == (1, len(PROMPT))


def test_cancelling_gives_the_batch_up() -> None:
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > 3

    async def main() -> list[Any]:
        engine = EmbeddedEngine(LM, set(), cancelled=cancelled)
        jobs = (engine.generate(PROMPT, SamplingParams(50, seed=i)) for i in range(3))
        return await asyncio.gather(*jobs, return_exceptions=True)

    assert [type(result) for result in asyncio.run(main())] == [GenerationCancelledError] * 3
    assert len(asked) == 4


def test_requests_that_were_given_up_are_not_sampled_and_leave_the_engine_usable() -> None:
    engine = EmbeddedEngine(LM, set())

    async def give_up() -> None:
        kept = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(1)))
        lost = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(40)))
        await asyncio.sleep(0)
        lost.cancel()
        await kept

    asyncio.run(give_up())
    assert engine.stats.sampled_tokens == 1

    async def leave_at_once() -> None:
        asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(1)))  # noqa: RUF006
        await asyncio.sleep(0)

    asyncio.run(leave_at_once())  # the loop is closed before the batch began
    completion = asyncio.run(asyncio.wait_for(engine.generate(PROMPT, SamplingParams(2)), timeout=60))
    assert len(completion.token_ids) == 2
