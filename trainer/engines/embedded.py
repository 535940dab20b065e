"""The embedded engine: the trainer's own transformers model, in process, batched, with a KV cache.

It shares the weights, so publishing a version is free. Requests that are waiting at the same moment form a batch:
identical prompts are computed once, prompts of similar length are padded on the left into one block, what several of
its prompts begin with is computed once as well, finished rows leave the block. Log-probs come from the very
distribution that the token was drawn from.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from trainer.engines.sharing import common_beginnings
from trainer.train.families import capped, windows
from trainer.types import Completion, FinishReason, SamplingParams

# Prompts share a block while padding stays under this share of it.
PADDING_LIMIT = 0.25
# So many of the likeliest tokens are looked at first for top_p: sorting a whole vocabulary takes longer than a layer.
LIKELIEST = 256
# Prompts are read in two passes, what they share first, where that computes at most so much of what one pass does, and
# so many tokens less at least: each pass has a price of its own.
TWO_PASSES = 0.75
LEAST_SAVED = 256


@dataclass(slots=True)
class _Request:
    prompt_ids: list[int]
    params: SamplingParams
    future: asyncio.Future[Completion]


@dataclass(slots=True)
class EngineStats:
    """Running totals, in tokens and seconds; `prefilled_tokens`: computed of the prompt tokens."""

    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    sampled_tokens: int = 0
    batches: int = 0


class EmbeddedEngine:
    """Engine protocol over a causal language model in this process.

    Args:
        model: transformers model whose attention implementation is `trainer.train.attention.IMPLEMENTATION`.
        max_batch_tokens: most (padded) prompt tokens of one forward pass.
        cancelled: asked before every token; True gives the batch up with `GenerationCancelledError`.
        share_prefixes: compute once what prompts of a block begin with.
    """

    def __init__(
        self,
        model: Any,
        stop_ids: set[int],
        max_batch_tokens: int = 16384,
        cancelled: Callable[[], bool] = lambda: False,
        share_prefixes: bool = True,
    ) -> None:
        self.model = model
        # A window counts the padding that may stand between what is shared and what is not.
        self.share_prefixes = share_prefixes and not any(windows(model.config))
        self.cancelled = cancelled
        self.stop_ids = stop_ids
        self.max_batch_tokens = max_batch_tokens
        self.stats = EngineStats()
        self.version = 0
        """Of the weights; they are shared, so that an update changes nothing but this number."""
        self._cache_name: str | None = None
        self._waiting: list[_Request] = []
        self._flush_loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:  # noqa: ARG002
        """Wait for a place in the next batch. Raises ValueError for an empty prompt."""
        if not prompt_ids:
            raise ValueError("the prompt has no tokens")
        request = _Request(prompt_ids, params, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._schedule_flush()
        return await request.future

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        """Nothing: sampling takes the whole machine, and a batch reads what its prompts share once anyway."""

    def _schedule_flush(self) -> None:
        loop = asyncio.get_running_loop()
        # A loop that was closed before its flush ran (an interrupted batch) must not keep the next one waiting.
        if self._waiting and self._flush_loop is not loop:
            self._flush_loop = loop
            # One turn of the event loop later every trajectory that is ready has sent its request.
            loop.call_soon(lambda: loop.call_soon(self._flush))

    def _flush(self) -> None:
        self._flush_loop = None
        requests = [r for r in self._waiting if not r.future.done()]  # the others were cancelled
        self._waiting = []
        try:
            for request, completion in zip(
                requests, self.generate_batch([(r.prompt_ids, r.params) for r in requests]), strict=True
            ):
                if not request.future.done():
                    request.future.set_result(completion)
        except BaseException as error:
            for request in requests:
                if not request.future.done():
                    request.future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            if not isinstance(error, Exception):
                raise

    def generate_batch(self, requests: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
        """Sample one response to each prompt; the order of the results is that of the requests."""
        results: list[Completion | None] = [None] * len(requests)
        self.model.eval()
        for members in self._blocks([len(prompt) for prompt, _ in requests]):
            for member, completion in zip(members, self._generate_block([requests[i] for i in members]), strict=True):
                results[member] = completion
        self.stats.batches += 1
        return [r for r in results if r is not None]

    def _blocks(self, lengths: list[int]) -> list[list[int]]:
        """Split requests into blocks of similar prompt length under the token limit; longest first, stable."""
        order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        blocks: list[list[int]] = []
        for i in order:
            if blocks:
                longest = lengths[blocks[-1][0]]
                fits = longest * (len(blocks[-1]) + 1) <= self.max_batch_tokens
                if fits and lengths[i] >= (1 - PADDING_LIMIT) * longest:
                    blocks[-1].append(i)
                    continue
            blocks.append([i])
        return blocks

    @torch.inference_mode()
    def _generate_block(self, requests: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
        device = next(self.model.parameters()).device
        unique: dict[tuple[int, ...], int] = {}
        which = [unique.setdefault(tuple(prompt), len(unique)) for prompt, _ in requests]
        cache, valid, logits = self._prefill([list(p) for p in unique], device)
        rows = torch.tensor(which, device=device)
        if len(unique) < len(requests):
            cache.batch_select_indices(rows)
            valid, logits = valid[rows], logits[rows]
        self.stats.prompt_tokens += sum(len(p) for p, _ in requests)

        sampler = _Sampler([params for _, params in requests], self.stop_ids)
        positions = torch.tensor([len(p) for p, _ in requests], device=device)
        while True:
            tokens = sampler.draw(logits)
            keep = sampler.active_rows()
            if not keep:
                break
            if self.cancelled():
                raise GenerationCancelledError
            if len(keep) < len(tokens):
                index = torch.tensor(keep, device=device)
                cache.batch_select_indices(index)
                valid, positions = valid[index], positions[index]
            valid = torch.cat([valid, valid.new_ones(len(keep), 1)], dim=1)
            hidden = self.model.model(
                input_ids=torch.tensor([[tokens[i]] for i in keep], device=device),
                attention_mask=valid[:, None, None, :],
                position_ids=positions[:, None],
                use_cache=True,
                **self._cached(cache),
            ).last_hidden_state
            logits = self._logits(hidden)
            positions = positions + 1
        completions = sampler.completions(self.version)
        self.stats.sampled_tokens += sum(len(c.token_ids) for c in completions)
        return completions

    def _prefill(self, prompts: list[list[int]], device: torch.device) -> tuple[DynamicCache, Tensor, Tensor]:
        """Cache, mask of real tokens [prompts, length] and next-token logits [prompts, vocabulary] of the prompts."""
        cache = DynamicCache()  # all keys are kept: attention itself looks through a layer's sliding window
        nothing = torch.ones(len(prompts), 0, dtype=torch.bool, device=device)
        shared = _two_passes(prompts) if self.share_prefixes else None
        if shared is None:
            valid, hidden = self._read(prompts, cache, nothing)
            return cache, valid, self._logits(hidden)
        prefixes, which = shared
        valid, _ = self._read(prefixes, cache, nothing[: len(prefixes)])
        rows = torch.tensor(which, device=device)
        cache.batch_select_indices(rows)
        rest = [prompt[len(prefixes[row]) :] for prompt, row in zip(prompts, which, strict=True)]
        valid, hidden = self._read(rest, cache, valid[rows])
        return cache, valid, self._logits(hidden)

    def _read(self, pieces: list[list[int]], cache: DynamicCache, before: Tensor) -> tuple[Tensor, Tensor]:
        """Compute pieces of prompts, each behind what the cache has of its row.

        before: [rows, length] bool, the real tokens in the cache. Returns the same of the cache afterwards, and the
        hidden states [rows, longest piece, width].
        """
        device, longest = before.device, max(map(len, pieces))
        ids = torch.zeros(len(pieces), longest, dtype=torch.long)
        valid = torch.zeros(len(pieces), longest, dtype=torch.bool)
        for row, piece in enumerate(pieces):
            ids[row, longest - len(piece) :] = torch.tensor(piece)
            valid[row, longest - len(piece) :] = True
        ids, valid = ids.to(device), valid.to(device)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        # A padding token sees itself, else its softmax would be over nothing and NaN.
        own = (causal & valid[:, None, :]) | torch.eye(longest, dtype=torch.bool, device=device)
        mask = torch.cat([before[:, None, :].expand(-1, longest, -1), own], dim=2)
        hidden = self.model.model(
            input_ids=ids,
            attention_mask=mask[:, None],
            position_ids=before.sum(1, keepdim=True) + (valid.long().cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            **self._cached(cache),
        ).last_hidden_state
        self.stats.prefilled_tokens += sum(map(len, pieces))
        return torch.cat([before, valid], dim=1), hidden

    def _cached(self, cache: DynamicCache) -> dict[str, DynamicCache]:
        """The argument that hands the model its KV cache: transformers 5.24 has another name for it."""
        if self._cache_name is None:
            names = inspect.signature(self.model.model.forward).parameters
            self._cache_name = "cache" if "cache" in names else "past_key_values"
        return {self._cache_name: cache}

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of the next token, [rows, vocabulary] float32, from hidden states [rows, tokens, width]."""
        return capped(self.model.lm_head(hidden[:, -1]).float(), self.model.config)


def _two_passes(prompts: list[list[int]]) -> tuple[list[list[int]], list[int]] | None:
    """What to compute of the prompts in a first pass: beginnings, and which of them each prompt has; None: nothing.

    A prompt that shares nothing is cut where it evens the second pass out, which is padded to its longest piece.
    """
    lengths = common_beginnings(prompts)
    if not any(lengths):
        return None
    longest_rest = max(len(prompt) - length for prompt, length in zip(prompts, lengths, strict=True) if length)
    beginnings: dict[tuple[int, ...], int] = {}
    which = []
    for prompt, length in zip(prompts, lengths, strict=True):
        cut = length or max(0, len(prompt) - longest_rest)
        which.append(beginnings.setdefault(tuple(prompt[:cut]), len(beginnings)))
    prefixes = [list(ids) for ids in beginnings]
    whole = len(prompts) * max(map(len, prompts))
    parts = len(prefixes) * max(map(len, prefixes)) + len(prompts) * longest_rest
    return (prefixes, which) if parts <= min(TWO_PASSES * whole, whole - LEAST_SAVED) else None


class GenerationCancelledError(Exception):
    """The batch was given up because the run is to stop."""


class _Sampler:
    """Draws tokens for a block of responses. Every response has its own counter-based random numbers, so what it
    draws does not depend on its neighbours.
    """

    def __init__(self, params: list[SamplingParams], stop_ids: set[int]) -> None:
        self.params = params
        self.stop_ids = stop_ids
        self.ids: list[list[int]] = [[] for _ in params]
        self.logprobs: list[list[float]] = [[] for _ in params]
        self.finish: list[FinishReason | None] = [None] * len(params)
        self.active = list(range(len(params)))
        self.uniform = [
            np.random.Generator(np.random.Philox(key=p.seed)).random(p.max_new_tokens) if p.temperature else np.empty(0)
            for p in params
        ]

    def draw(self, logits: Tensor) -> list[int]:
        """Next token of every active response from logits [active, vocabulary]; remembers ids and log-probs."""
        members = self.active
        temperature = torch.tensor([self.params[i].temperature or 1.0 for i in members], device=logits.device)
        logits = logits / temperature[:, None]
        for row, i in enumerate(members):
            if self.params[i].banned_token_ids:
                logits[row, list(self.params[i].banned_token_ids)] = -torch.inf
            if self.params[i].temperature and (self.params[i].top_p < 1 or self.params[i].top_k > 0):
                logits[row] = keep_likely(logits[row], self.params[i].top_p, self.params[i].top_k)
        logprobs = torch.log_softmax(logits, dim=-1)
        greedy = logprobs.argmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        step = [len(self.ids[i]) for i in members]
        uniform = torch.tensor(
            [self.uniform[i][s] if self.params[i].temperature else 0.0 for i, s in zip(members, step, strict=True)],
            dtype=torch.float64,
            device=logits.device,
        )
        # right=True skips tokens of probability zero; the clamp covers a draw at the rounded end of the sum.
        drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
        drawn = torch.minimum(drawn, (cumulative < cumulative[:, -1:]).sum(-1))
        is_greedy = torch.tensor([not self.params[i].temperature for i in members], device=logits.device)
        tokens = torch.where(is_greedy, greedy, drawn)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        token_list: list[int] = tokens.tolist()
        for i, token, logprob in zip(members, token_list, chosen, strict=True):
            self.ids[i].append(token)
            self.logprobs[i].append(logprob)
            if token in self.stop_ids:
                self.finish[i] = "stop"
            elif len(self.ids[i]) == self.params[i].max_new_tokens:
                self.finish[i] = "length"
        return token_list

    def active_rows(self) -> list[int]:
        """Rows of the last draw that go on; the others have finished and leave the block."""
        rows = [row for row, i in enumerate(self.active) if self.finish[i] is None]
        self.active = [self.active[row] for row in rows]
        return rows

    def completions(self, version: int) -> list[Completion]:
        """The finished responses, in the order of the requests."""
        return [
            Completion(ids, logprobs, finish, version)
            for ids, logprobs, finish in zip(self.ids, self.logprobs, self.finish, strict=True)
            if finish is not None
        ]


def keep_likely(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits [vocabulary] of the `top_k` likeliest tokens, and of those only as many as it takes to reach `top_p`.

    The others become -inf. The token with which the share reaches top_p stays, so there is always one (nucleus
    sampling, Holtzman et al. 2020). The share is that of all tokens where top_k is off, of the top_k ones otherwise.
    """
    size = len(logits)
    for count in (min(top_k, size),) if top_k > 0 else (min(LIKELIEST, size), size):
        ranked, order = logits.topk(count)
        total = ranked.double().logsumexp(0) if top_k > 0 else logits.double().logsumexp(0)
        share = (ranked.double() - total).exp().cumsum(0)
        if share[-1] >= top_p or count == size:
            break
    kept = order[: 1 + int((share < top_p).sum())]
    return torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
