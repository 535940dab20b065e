"""Fit a configuration to other hosts: change only what their GPUs and memory require, with a reason for each change.

Batch, group, learning rate and lengths stay, so the run learns the same; only the time of a step changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from clusterkit.capacity.checks import SMALL_CHUNK, check_batch, check_gpus, check_memory
from clusterkit.capacity.memory import ROOM
from clusterkit.capacity.plan import longest_sequence
from clusterkit.capacity.shapes import shape_of
from clusterkit.common.finding import Level
from clusterkit.config.fields import setting_text
from trainer.allocation import Allocation, Dialect, Layout, Part
from trainer.config import RunConfig
from trainer.config_parts import LESS_MEMORY
from trainer.errors import UserError

_NEAREST_SPLITS = 8
_TENSOR = (1, 2, 4, 8)
"""Factors that the tensor parallelism may grow by."""
_FEWER = {kind: less for kind, less in LESS_MEMORY.items() if kind not in ("none", "selective")}
"""What takes less memory than recomputed activations; where others are kept they were chosen for their speed."""
_SHARED_FRACTION = 0.6
"""Share of a GPU's memory for an engine that takes turns with training; MemAgent's value."""


@dataclass(frozen=True)
class Target:
    """The hosts to fit; `gpu_memory`: bytes of one GPU."""

    n_nodes: int
    n_gpus_per_node: int
    gpu_memory: int

    @property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return self.n_nodes * self.n_gpus_per_node


@dataclass(frozen=True)
class Change:
    """One setting that differs from the preset's, and why."""

    key: str
    before: Any
    after: Any
    why: str

    @property
    def override(self) -> str:
        """The change as KEY=VALUE."""
        return f"{self.key}={setting_text(self.after)}"


def rescale(config: RunConfig, target: Target) -> tuple[RunConfig, tuple[Change, ...]]:
    """Return the configuration on the target, and what was changed; its checks may still fail.

    Candidates, in this order: the same split of GPUs between rollout and training, or the nearest one; less memory per
    micro-batch; more tensor parallelism for the rollout, then for the training; one set of GPUs for both. If none fits,
    the result is the one with the fewest failures.

    Raises:
        UserError: no candidate can be built at all.
    """
    original = config.allocation
    if original is None:
        raise ValueError("only a configuration with allocation_mode can be rescaled")
    best: tuple[RunConfig, tuple[Change, ...]] | None = None
    fewest = float("inf")
    for changes in _candidates(config, original, target):
        changed = _apply(config, changes)
        if (failures := _failures(changed, target)) < fewest:
            best, fewest = (changed, tuple(change for change in changes if change.before != change.after)), failures
        if not failures:
            break
    if best is None:
        raise UserError(
            f"{config.allocation_mode} cannot be put on {_gpus(target.gpus)}: a model's copy takes "
            f"{max(part.layout.per_replica for part in original.parts)}; name more hosts, or another allocation_mode"
        )
    return best


def _candidates(config: RunConfig, original: Allocation, target: Target) -> Iterator[list[Change]]:
    hosts = [
        Change("n_nodes", config.n_nodes, target.n_nodes, "asked for"),
        Change("n_gpus_per_node", config.n_gpus_per_node, target.n_gpus_per_node, "asked for"),
    ]
    for more_training, more_rollout, extra in product(_TENSOR, _TENSOR, _savings(config)):
        for allocation, why in _allocations(original, target, more_rollout, more_training):
            same = allocation == original
            mode = config.allocation_mode if same else _write(allocation, original.dialect)
            yield [*hosts, Change("allocation_mode", config.allocation_mode, mode, why), *extra]
    if not original.colocated and original.rollout is not None and original.training is not None:
        for tensor in _TENSOR:
            yield from _sharing(config, original, target, hosts, tensor)


def _savings(config: RunConfig) -> tuple[list[Change], ...]:
    """Return settings that only cost speed, the cheapest first: none, fewer logits at a time, smaller micro-batches."""
    least, tokens, chunk = longest_sequence(config), config.train.max_tokens_per_mb, config.train.logprob_chunk
    logits = Change("train.logprob_chunk", chunk, min(chunk, SMALL_CHUNK), "fewer logits at a time; the same result")
    activations = Change(
        "train.max_tokens_per_mb",
        tokens,
        min(tokens, least),
        "less memory for activations; it still holds the longest sequence",
    )
    smaller, fewer = [logits, activations], list[list[Change]]()
    kept: str = config.model.gradient_checkpointing
    kind = kept
    while kind in _FEWER:
        kind = _FEWER[kind]
        why = f"fewer activations at a time{', and in host memory' if kind == 'offloaded' else ''}; the same result"
        fewer.append([*smaller, Change("model.gradient_checkpointing", kept, kind, why)])
    return [], [logits], smaller, *fewer


def _allocations(
    original: Allocation, target: Target, more_rollout: int, more_training: int
) -> Iterator[tuple[Allocation, str]]:
    """Yield the same engines on target.gpus with so many times the tensor parallelism, the nearest split first."""
    rollout, training, gpus = original.rollout, original.training, target.gpus
    more, sharper = (more_rollout, more_training), ""
    if rollout and more_rollout > 1:
        sharper += f"; t{rollout.layout.tensor * more_rollout} of the rollout so that weights and KV cache fit"
    if training and more_training > 1:
        sharper += f"; t{training.layout.tensor * more_training} of the training so that activations fit"
    if rollout is None or training is None or original.colocated:
        sized = _resized(original, gpus if rollout else 0, gpus if training else 0, more, target)
        if sized is not None:
            yield sized, f"{_gpus(gpus)} instead of {original.gpus}{sharper}"
        return
    share = original.rollout_gpus / original.gpus
    splits = sorted(range(1, gpus), key=lambda count: (abs(count / gpus - share), count))
    found = 0
    for count in splits:
        sized = _resized(original, count, gpus - count, more, target)
        if sized is None:
            continue
        kept = "in the same proportion" if abs(count / gpus - share) < 1e-9 else "as near to the old proportion as fits"
        yield sized, f"{_gpus(gpus)} instead of {original.gpus}, shared between rollout and training {kept}{sharper}"
        found += 1
        if found == _NEAREST_SPLITS:
            return


def _resized(
    original: Allocation, rollout: int, training: int, more: tuple[int, int], target: Target
) -> Allocation | None:
    layouts = [
        _layout(part, gpus, times, target) if part is not None else None
        for part, gpus, times in zip((original.rollout, original.training), (rollout, training), more, strict=True)
    ]
    if any(
        part is not None and layout is None
        for part, layout in zip((original.rollout, original.training), layouts, strict=True)
    ):
        return None
    return original.resized(layouts[0], layouts[1])


def _layout(part: Part, gpus: int, more: int, target: Target) -> Layout | None:
    """Return a part's layout on some GPUs: data parallelism adapts, pipeline stages are dropped if they do not fit."""
    layout = replace(part.layout, tensor=part.layout.tensor * more)
    if more > 1 and layout.tensor > target.n_gpus_per_node:
        return None
    for candidate in (layout, replace(layout, pipeline=1)):
        if gpus % candidate.per_replica == 0:
            data = gpus // candidate.per_replica
            shard = layout.shard if layout.shard and not data % layout.shard and data > layout.shard else 0
            return replace(candidate, data=data, shard=shard)
    return None


def _sharing(
    config: RunConfig, original: Allocation, target: Target, hosts: list[Change], tensor: int
) -> Iterator[list[Change]]:
    rollout = original.rollout
    if rollout is None or target.gpus % tensor or tensor > target.n_gpus_per_node:
        return
    backend = rollout.backend or "vllm"
    parts = (Part(backend, Layout(target.gpus // tensor, tensor)), Part("fsdp", Layout(target.gpus)))
    mode = Allocation((parts,)).convert(Dialect.COLON)
    why = f"too little in {_gpus(target.gpus)} to share them out: rollout and training take turns on all of them"
    taking_turns = [
        *hosts,
        Change("allocation_mode", config.allocation_mode, mode, why),
        Change("train.offload", config.train.offload, True, "leaves the GPU to the engine while it generates"),
        Change(
            "rollout.gpu_memory_fraction",
            config.rollout.gpu_memory_fraction,
            min(config.rollout.gpu_memory_fraction, _SHARED_FRACTION),
            "MemAgent's value for GPUs that also train",
        ),
    ]
    for extra in _savings(config)[2:]:
        yield [*taking_turns, *extra]


def _write(allocation: Allocation, dialect: Dialect) -> str:
    try:
        return allocation.convert(dialect)
    except ValueError:
        return allocation.convert(Dialect.COLON)


def _apply(config: RunConfig, changes: list[Change]) -> RunConfig:
    values = config.model_dump()
    for change in changes:
        *sections, last = change.key.split(".")
        target = values
        for section in sections:
            target = target[section]
        target[last] = change.after
    return RunConfig.model_validate(values)


def _failures(config: RunConfig, target: Target) -> float:
    """Count the failures; an uneven batch and tight memory, which are only warnings, count as half a failure."""
    shape = shape_of(config)
    findings = [*check_gpus(config, shape), *check_batch(config), *check_memory(config, shape, target.gpu_memory)]
    uneven = any(finding.check == "batch" and finding.level is Level.WARN for finding in findings)
    smaller = check_memory(config, shape, int((1 - ROOM) * target.gpu_memory))
    tight = any(finding.level is Level.FAIL for finding in smaller)
    return sum(finding.level is Level.FAIL for finding in findings) + 0.5 * (uneven + tight)


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"
