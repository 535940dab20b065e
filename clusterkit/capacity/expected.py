"""Expected seconds of a training step by part, on GPUs of several kinds.

Rates are those that were measured with this trainer (clusterkit/capacity/speed.py); the rest is arithmetic. How long
responses will be nobody knows before the run, so every part is a range: from short responses to long ones, and from the
better to the worse of what was measured. Other people's step times are in clusterkit/capacity/timing.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterkit.capacity.memory import GIB, cache_of, reported_gib, resting_bytes
from clusterkit.capacity.plan import remote_plan
from clusterkit.capacity.shapes import SHAPES, ModelShape, shape_of
from clusterkit.capacity.shards import between_hosts
from clusterkit.capacity.sharing import Computed, computed_tokens
from clusterkit.capacity.speed import (
    ADAPTED,
    CONTROLLER,
    GPUS,
    HOST_MEMORY,
    MEASURED_ON,
    MFU,
    MOST_MEASURED,
    MOST_RESPONSE,
    MOST_SERVERS,
    MOST_SHARED,
    MOST_TENSOR,
    NETWORK,
    RECOMPUTED,
    STEADY_STEP_SECONDS,
    STEP_SECONDS,
    TENSOR_SHARE,
    TENSOR_TRAINING,
    UNMEASURED,
    WIDTH,
    Gpu,
    decode_seconds,
    forward_flops,
    prefill_seconds,
    publishing_seconds,
)
from clusterkit.common.text_plot import duration
from trainer.allocation import Allocation
from trainer.config import RunConfig
from trainer.config_agents import ChunksAgentConfig
from trainer.config_parts import CHUNKED

MEMORIES, ANSWERS = (0.25, 0.75), (0.2, 0.5)
"""Mean length of responses over their limit, at both ends of the range: of an agent with a memory, and where one
response is all, which is worth nothing once it is cut off at its limit."""
MEASURED_MODEL = "qwen2.5-1.5b-instruct"
MANY = 1_000
"""Controllers, so many that they bound nothing."""
LEAST_PARAMETERS = 400_000_000
"""Steps of smaller models are bound by other things than the GPU: of SmolLM2-135M's by a factor of six."""


@dataclass(frozen=True)
class Range:
    """Seconds, from the better to the worse case."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __str__(self) -> str:
        low, high = duration(self.low), duration(self.high)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class ExpectedStep:
    """A step on GPUs of one kind."""

    gpu: str
    parts: dict[str, Range]  # sampling, training, publishing
    whole: Range  # parts that go on beside one another count as the longer one
    taken_over: tuple[str, ...]  # to what rates of other things are taken over, in words; nothing: they were measured
    lengths: str  # what is assumed of responses, in words

    @property
    def sure(self) -> str:
        """How sure it is, in words."""
        if not self.taken_over:
            return f"rates were measured on this GPU with this model; {self.lengths}"
        return (
            f"rates were measured on an {MEASURED_ON} with a 1.5B model and are taken over to "
            f"{', '.join(self.taken_over)} ({UNMEASURED:.0%} added at the long end); {self.lengths}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the shape of --json."""
        parts = {name: {"low_s": part.low, "high_s": part.high} for name, part in self.parts.items()}
        return {"gpu": self.gpu, "low_s": self.whole.low, "high_s": self.whole.high, "parts": parts, "sure": self.sure}


def expected_steps(
    config: RunConfig,
    gpus: Sequence[str] = tuple(GPUS),
    lengths: tuple[float, float] | None = None,
    memory_gib: float | None = None,
) -> list[ExpectedStep]:
    """Return what a step takes on each of these kinds of GPUs; nothing where `why_unknown` says why.

    lengths: mean length of responses over their limit, at both ends of the range, where that is known. memory_gib: of a
    GPU as it is sold, where that is less than the kind's.
    """
    shape, allocation = shape_of(config), config.allocation
    if shape is None or allocation is None or why_unknown(config):
        return []
    lengths = lengths or lengths_of(config)
    kinds = [GPUS[name] for name in gpus]
    kinds = [replace(kind, memory_gib=min(kind.memory_gib, memory_gib or kind.memory_gib)) for kind in kinds]
    return [_Step(config, shape, allocation, kind, lengths).expected() for kind in kinds]


def why_unknown(config: RunConfig) -> str:
    """Return why nothing can be said of a step's time; empty where something can."""
    shape, allocation = shape_of(config), config.allocation
    if allocation is None or allocation.training is None:
        return "it trains on no GPU"
    if shape is None:
        return f"the shape of {config.model.path} is not known here: name a folder that has its config.json"
    if shape.parameters < LEAST_PARAMETERS:
        return "a model as small as this is bound by other things than the GPU's speed"
    if config.trainer.type != "grpo" or not remote_plan(config).turns(1.0):
        return "how many turns a trajectory has, and how long they are, only the texts say"
    return ""


def controller_seconds(config: RunConfig, length: float) -> float:
    """Return the processor time for a step's requests; one process has a second of it in a second.

    length: mean of responses, over their limit.
    """
    turns = remote_plan(config).turns(length)
    each = CONTROLLER.request_seconds * len(turns) + CONTROLLER.token_seconds * sum(turn[2] for turn in turns)
    return config.rollout.batch_size * config.rollout.group_size * each


def controller_share(config: RunConfig) -> float:
    """Return how much of sampling's shortest time on the fastest GPUs one process is busy with requests; 0: unknown."""
    many = config.rollout.model_copy(update={"controllers": MANY})
    steps = expected_steps(config.model_copy(update={"rollout": many}), [MEASURED_ON])
    if not steps or "sampling" not in steps[0].parts:
        return 0.0
    return controller_seconds(config, lengths_of(config)[0]) / steps[0].parts["sampling"].low


def controllers_wanted(config: RunConfig) -> int:
    """Return the controller processes (rollout.controllers) of which none is busy for more than half of sampling.

    0 where rank 0 is none, or the run has as many.
    """
    needed = math.ceil(2 * controller_share(config))
    return needed if needed > 1 and config.rollout.controllers < needed else 0


def lengths_of(config: RunConfig) -> tuple[float, float]:
    """Return the mean length of responses over their limit, at both ends of the range."""
    return MEMORIES if isinstance(config.agent, ChunksAgentConfig) else ANSWERS


@dataclass(frozen=True)
class _Step:
    """A run's step on one kind of GPU. lengths: see `expected_steps`; the better case is number 0, the worse 1."""

    config: RunConfig
    shape: ModelShape
    allocation: Allocation
    gpu: Gpu
    lengths: tuple[float, float]

    def expected(self) -> ExpectedStep:
        unmeasured = self._unmeasured()
        margin = 1 + UNMEASURED if unmeasured else 1.0
        parts = {}
        if self.allocation.rollout is not None:
            beyond = 1 + CONTROLLER.wait_share
            parts["sampling"] = Range(self._sampling(0) * beyond, self._sampling(1) * beyond * margin)
        parts["training"] = Range(self._training(0), self._training(1) * margin)
        parts["publishing"] = Range(*publishing_seconds(self.config, self.shape, self.allocation, self.gpu.name))
        whole = sum(parts.values(), start=Range(0.0, 0.0))
        if self.config.rollout.max_staleness and "sampling" in parts:
            beside = (parts["sampling"], parts["training"])
            longer = Range(max(part.low for part in beside), max(part.high for part in beside))
            whole = longer + parts["publishing"]
        low, high = self.lengths
        assumed = f"{low:.0%} to {high:.0%} of their limit" if low != high else f"{low:.0%} of their limit"
        lengths = f"responses of {assumed} on average are assumed"
        return ExpectedStep(self.gpu.name, parts, whole, tuple(unmeasured), lengths)

    def _sampling(self, case: int) -> float:
        """Seconds until the slowest trajectory of a step has ended.

        A server reads the prompts of its sequences, of a group's shared beginnings one, and samples for as many at a
        time as its cache holds. After the average response has ended the slowest go on among few others.
        """
        assert self.allocation.rollout is not None
        config, rollout, layout = self.config, self.config.rollout, self.allocation.rollout.layout
        turns, each = remote_plan(config).turns(self.lengths[case]), float(layout.per_replica)
        if layout.per_replica > 1:
            each *= TENSOR_SHARE[case]
        count = max(1.0, rollout.batch_size * rollout.group_size / layout.data)
        shared = 1 - 1 / rollout.group_size if rollout.share_prefixes else 0.0
        memory = int(reported_gib(self.gpu.memory_gib) * GIB)
        step = STEADY_STEP_SECONDS if case == 0 and len(turns) == 1 else STEP_SECONDS
        room = cache_of(config, self.shape, layout, memory, 1).tokens
        seconds = 0.0
        for prompt, common, response in turns:
            seconds += prefill_seconds(self.shape, self.gpu, count * (prompt - shared * common), prompt / 2, each)
            at_once = min(count, max(1.0, room / (prompt + response)))
            weights, cached = decode_seconds(self.shape, self.gpu, prompt + response / 2, each, case, step)
            seconds += response * count / at_once * (weights + at_once * cached)
        # The sum of a trajectory's responses, two standard deviations over the mean if lengths are exponential.
        mean, limit = (
            sum(turn[2] for turn in remote_plan(config).turns(length)) for length in (self.lengths[case], 1.0)
        )
        weights, cached = decode_seconds(self.shape, self.gpu, max(p + r for p, _, r in turns), each, case, step)
        seconds += min(limit - mean, 2 * mean / math.sqrt(len(turns))) * (weights + cached)
        return max(seconds, controller_seconds(config, self.lengths[case]) / max(1, rollout.controllers))

    def _tokens(self, case: int) -> Computed:
        return computed_tokens(self.config, remote_plan(self.config).turns(self.lengths[case]))

    def _training(self, case: int) -> float:
        """Seconds of a step's forward and backward passes, of other passes, and of the network between hosts."""
        assert self.allocation.training is not None
        config, shape, layout = self.config, self.shape, self.allocation.training.layout
        turns, rollout, train = remote_plan(config).turns(self.lengths[case]), config.rollout, config.train
        rows, ranks = rollout.batch_size * rollout.group_size, layout.gpus
        computed = self._tokens(case).waited_for
        sampled = rows * sum(response for _, _, response in turns)
        context = max(prompt + response for prompt, _, response in turns) / 2
        forward = computed * forward_flops(shape, context) + 2 * sampled * shape.vocabulary * shape.hidden
        products = 2 if config.model.lora.rank else 3  # weights that stay as they are get no gradients
        kept = config.model.gradient_checkpointing
        backward = products * forward / (RECOMPUTED if kept in ("full", *CHUNKED) else 1.0)
        others = forward * (config.algorithm.kl_coef > 0)
        others += forward * (1 - 1 / train.minibatches) * config.recomputes_old
        seconds = (backward + others) / (ranks * self.gpu.flops * MFU[case])
        seconds /= ADAPTED if config.model.lora.rank else 1.0
        seconds /= TENSOR_TRAINING[case] if layout.tensor > 1 else 1.0
        if kept == "offloaded":  # every layer's input goes to host memory and comes back
            inputs = computed / ranks * shape.hidden * shape.layers
            seconds += 2 * WIDTH * inputs / HOST_MEMORY
        if config.n_nodes > 1:
            passes = max(computed / ranks * layout.tensor / train.max_tokens_per_mb, train.minibatches)
            each, once = between_hosts(config, shape, layout)
            moved = each * passes + once * train.minibatches
            network = moved / config.n_gpus_per_node / NETWORK[self.gpu.name]
            seconds = (max(seconds, network), seconds + network)[case]
        if self.allocation.colocated and train.offload:  # a rank's state goes to host memory and comes back
            seconds += 2 * resting_bytes(config, shape) / layout.sharded_over / HOST_MEMORY
        return seconds

    def _unmeasured(self) -> list[str]:
        """To what the rates are taken over."""
        measured, found = SHAPES[MEASURED_MODEL], []
        if self.gpu.name != MEASURED_ON:
            found.append("another GPU, by the data sheets' FLOP/s and bytes/s")
        if (self.shape.layers, self.shape.hidden) != (measured.layers, measured.hidden):
            found.append("another model, as the same share of a GPU's speed")
        servers = self.allocation.rollout.layout if self.allocation.rollout is not None else None
        limit = self.config.agent.max_final_tokens
        if not isinstance(self.config.agent, ChunksAgentConfig) and limit > MOST_RESPONSE:
            found.append(f"responses of up to {limit:,} tokens ({MOST_RESPONSE:,} were measured)")
        if servers is not None and servers.per_replica > 1:
            found.append(f"servers on several GPUs ({TENSOR_SHARE[1]:.0%} to {TENSOR_SHARE[0]:.0%} of their speed)")
        if servers is not None and servers.data > MOST_SERVERS:
            found.append(f"more than {MOST_SERVERS} servers (only their control was simulated)")
        training = self.allocation.training.layout if self.allocation.training is not None else None
        if training is not None and training.tensor > 1:
            worst, best = (f"{share:.0%}" for share in reversed(TENSOR_TRAINING))
            compiled = self.config.train.compile and training.tensor == MOST_TENSOR
            other = "" if compiled else ", which this run's are not"
            found.append(
                f"layers that training GPUs share ({worst} to {best} of their speed: compiled and two GPUs each{other})"
            )
        if training is not None and training.gpus > MOST_MEASURED:
            found.append(f"training on more than {MOST_MEASURED} GPUs")
        tokens = self._tokens(0)
        if (once := tokens.whole / tokens.computed) > MOST_SHARED:
            found.append(
                f"training that computes one in {once:.1f} of the rows' tokens (one in {MOST_SHARED:g} was measured)"
            )
        if self.config.n_nodes > 1:
            found.append(f"several hosts with {NETWORK[self.gpu.name] * 8 / 1e9:.0f} Gbit/s for every GPU")
        return found
