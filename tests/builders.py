"""Small real models, tokenizers, engines and rows that the tests of the trainer's core build on."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from clusterkit.config.resolve import resolve
from trainer.agents.memagent import MemAgent
from trainer.config import RunConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.rollout.controller import RolloutController, SamplingPlan
from trainer.tasks.recall import Recall
from trainer.train import attention
from trainer.train.distributed import World, single_world
from trainer.train.learner import Learner, StepStats
from trainer.types import Completion, Group, Row, SamplingParams
from trainer.warmup.tiny import make_lm, make_tokenizer

SMALL = (
    "model.tiny.hidden_size=32",
    "model.tiny.intermediate_size=64",
    "task.num_keys=16",
    "task.num_values=96",
    "rollout.batch_size=4",
    "rollout.group_size=4",
    "train.weight_decay=0.0",
    "train.warmup_steps=0",
)


def small_config(*overrides: str) -> RunConfig:
    """The tiny preset, much smaller still: random weights, nothing is warmed up. A later override wins."""
    given = {override.partition("=")[0]: override for override in (*SMALL, *overrides)}
    return resolve("tiny", None, tuple(given.values())).config


@dataclass
class Parts:
    """What a run is made of. stop_ids holds some ordinary words too, so that random weights end their responses."""

    config: RunConfig
    source: Recall
    tokenizer: Any
    lm: Any
    agent: MemAgent
    stop_ids: set[int]

    def engine(self) -> EmbeddedEngine:
        return EmbeddedEngine(self.lm, self.stop_ids, self.config.rollout.max_batch_tokens)

    def rollouts(self, count: int | None = None, engine: Any = None) -> list[Group]:
        """Real rollouts of training tasks; rewards are drawn by lot, as random weights would never earn one."""
        c = self.config
        controller = RolloutController(self.agent, engine or self.engine(), c.seed)
        tasks = [self.source.train(i) for i in range(count or c.rollout.batch_size)]
        groups = controller.run(tasks, SamplingPlan("train-1", c.rollout.group_size, c.rollout.temperature))
        rng = random.Random(5)
        for group in groups:
            for number, trajectory in enumerate(group.trajectories):
                # The first two differ, so that every group has something to learn from.
                trajectory.reward = float(number) if number < 2 else rng.choice((0.0, 1.0))
        return groups


def small_parts(*overrides: str) -> Parts:
    config = small_config(*overrides)
    source = Recall(config.task, config.seed)
    tokenizer = make_tokenizer(source.vocabulary())
    lm = sharpen(make_lm(config.model, tokenizer, 0), 6.0)
    stop_ids = {tokenizer.eos_token_id, *range(20, 50)}
    return Parts(config, source, tokenizer, lm, MemAgent(config.agent, tokenizer), stop_ids)


@torch.no_grad()
def sharpen(lm: Any, factor: float) -> Any:
    """Make next-token distributions far from uniform: ties and flat distributions would hide mistakes."""
    lm.model.norm.weight.mul_(factor)
    return lm.eval()


@torch.no_grad()
def grouped_query_lm(vocabulary: int = 97) -> Any:
    """A Qwen2 with four query and two key/value heads, untied output weights, random biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        lm = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=vocabulary,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                initializer_range=0.1,
                tie_word_embeddings=False,
                attn_implementation=attention.IMPLEMENTATION,
            )
        )
        for name, parameter in lm.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return sharpen(lm, 3.0)


def plain_copy(lm: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The same weights under transformers' own attention, in float64: what the trainer's numbers are judged by."""
    plain = copy.deepcopy(lm)
    plain.set_attn_implementation("sdpa")
    return plain.to(dtype).eval()


def full_logprobs(plain: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """Log-softmax over [T, vocabulary] of one unpacked conversation, at its response."""
    logits = plain(torch.tensor([prompt + response])).logits[0] / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(response)[:, None])[:, 0]


def random_prompts(count: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, vocabulary) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def sampled_rows(lm: Any, count: int, vocabulary: int, seed: int = 0, temperature: float = 1.0) -> list[Row]:
    """Rows of very unequal length, sampled by the embedded engine, with advantages and weights of both sizes."""
    rng = random.Random(seed)
    prompts = random_prompts(count, 2, 40, vocabulary, seed)
    requests = [(p, SamplingParams(rng.randint(1, 12), temperature, seed=i)) for i, p in enumerate(prompts)]
    engine = EmbeddedEngine(lm, {0})
    total = 0
    rows = []
    for number, (prompt, completion) in enumerate(zip(prompts, engine.generate_batch(requests), strict=True)):
        total += len(completion.token_ids)
        advantage = rng.choice((-1.0, -0.25, 0.5, 1.0))
        rows.append(Row(prompt, completion.token_ids, completion.logprobs, advantage, 1.0, number))
    for row in rows:
        row.weight = 1.0 / total
    return rows


def group_rows(lm: Any, groups: list[tuple[int, list[tuple[int, int]]]], seed: int = 0) -> list[Row]:
    """Rows that begin alike, mixed: of each group the tokens that they share, and for each row the prompt's further
    tokens and those of its response, which the model did not sample.
    """
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, lm.config.vocab_size) for _ in range(count)]

    rows = []
    for number, (shared, members) in enumerate(groups):
        prefix = ids(shared)
        for more, response in members:
            old = [rng.uniform(-5, -2) for _ in range(response)]
            rows.append(Row(prefix + ids(more), ids(response), old, rng.choice((-1.0, 0.5, 1.0)), 1.0, number))
    total = sum(len(row.response_ids) for row in rows)
    for row in rows:
        row.weight = 1.0 / total
    rng.shuffle(rows)
    return rows


def learner(lm: Any, config: RunConfig, world: World | None = None) -> Learner:
    """A learner on a copy of the weights."""
    return Learner(copy.deepcopy(lm), config, world or single_world(), total_optimizer_steps=10)


def whole(value: Tensor) -> Tensor:
    """A tensor or a sharded one as an ordinary tensor. Collective where it is sharded."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def parameters(one: Learner) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in one.policy.lm.named_parameters()}


def gradients(one: Learner, rows: list[Row]) -> tuple[dict[str, Tensor], StepStats]:
    """One real step, and the gradients that its optimizer saw."""
    seen: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        # A parameter that nothing reaches (the output bias of a masked batch, say) counts as gradient zero.
        seen.update({n: whole(torch.zeros_like(p) if p.grad is None else p.grad) for n, p in named})

    named = list(one.policy.lm.named_parameters())
    handle = one.optimizer.register_step_pre_hook(keep)
    stats = one.step(rows)
    handle.remove()
    return seen, stats


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest ‖found - expected‖ / ‖expected‖ over the tensors; one that is negligible beside the rest is measured
    against a thousandth of the largest.
    """
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(e.norm()) for e in expected.values())
    return max(float((found[n] - e).double().norm()) / max(float(e.norm()), floor) for n, e in expected.items())


class ScriptedEngine:
    """A fake: answers with the given responses in turn, and remembers what it was asked. For responses that a real
    model cannot be made to give, such as an empty one.
    """

    version = 0

    def __init__(self, responses: list[list[int]], stop_id: int) -> None:
        self.responses = iter(responses)
        self.stop_id = stop_id
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.keys: set[str] = set()

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        self.keys.add(key)
        ids = next(self.responses)
        return Completion(ids, [-1.0] * len(ids), "stop" if ids[-1] == self.stop_id else "length", 0)


class RecordingEngine:
    """The real engine, and beside it a list of every prompt it got and every completion it gave."""

    def __init__(self, inner: EmbeddedEngine) -> None:
        self.inner = inner
        self.seen: list[tuple[list[int], Completion]] = []

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        sent = list(prompt_ids)
        completion = await self.inner.generate(prompt_ids, params, key=key)
        self.seen.append((sent, copy.deepcopy(completion)))
        return completion

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        self.inner.prefetch(prefix_ids, key=key)


def byte_tokenizer(merges: list[tuple[str, str]] | None = None) -> Any:
    """Byte-level BPE with a chat template: any text can be encoded, and merges make encodings ambiguous."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<eos>", *alphabet, *(a + b for a, b in merges or [])]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    wrapped.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return wrapped
