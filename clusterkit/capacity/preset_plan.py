"""`presets plan`: all checks of a preset's arithmetic, on its own or on other hosts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clusterkit.capacity import checks, timing
from clusterkit.capacity.expected import (
    ExpectedStep,
    controller_share,
    controllers_wanted,
    expected_steps,
    why_unknown,
)
from clusterkit.capacity.memory import GIB, disk_usage, reported_gib
from clusterkit.capacity.rescale import Change, Target, rescale
from clusterkit.capacity.runnable import missing_parts, require_inputs, require_local_gpus
from clusterkit.capacity.shapes import shape_of
from clusterkit.capacity.shards import check_shards
from clusterkit.capacity.speed import GPUS
from clusterkit.capacity.timing import StepTime
from clusterkit.common.finding import Finding, Level, worst
from clusterkit.common.text_plot import gpus
from clusterkit.config.fields import setting_text
from clusterkit.config.resolve import Resolved, resolve
from clusterkit.hosts import inventory
from trainer.allocation import Allocation, Dialect
from trainer.config import RunConfig
from trainer.errors import UserError

DEFAULT_GPU_MEMORY_GIB = 80.0
_INDENT = 20
_MARKS = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "FAIL"}


@dataclass(frozen=True)
class PresetPlan:
    """The plan of a preset."""

    resolved: Resolved
    config: RunConfig
    gpu_memory_gib: float  # of one GPU, as it is sold
    changes: tuple[Change, ...]  # for other hosts than the preset's
    findings: tuple[Finding, ...]
    step: StepTime | None  # time of a step; None if nobody has published one
    expected: tuple[ExpectedStep, ...] = ()
    """What a step is expected to take, on each kind of GPU; nothing if that cannot be said."""

    @property
    def fits(self) -> bool:
        """Whether no check failed."""
        return worst(self.findings) is not Level.FAIL

    @property
    def here(self) -> bool:
        """Whether this machine has enough GPUs."""
        try:
            require_local_gpus(self.config)
        except UserError:
            return False
        return True

    @property
    def cluster(self) -> str:
        """A known cluster with enough hosts, else the default name of `setup`."""
        ordered = sorted(inventory.cluster_names(), key=lambda name: name != inventory.DEFAULT)
        return next((name for name in ordered if self._has_hosts(name)), inventory.DEFAULT)

    def _has_hosts(self, name: str) -> bool:
        try:
            return len(inventory.load(name).hosts) >= self.config.n_nodes
        except UserError:
            return False

    @property
    def command(self) -> str:
        """The command that trains the preset, here or on a cluster; empty if it does not fit."""
        if not self.fits:
            return ""
        size, task = self.resolved.size, self.resolved.task
        chosen = ["--task", task] if task != size.task else []
        place = [] if self.here else ["--cluster", self.cluster]
        data = []
        if not self.config.data_path:
            data = ["task.path=FILE.jsonl"] if self.config.task.name == "sft" else []
            data += ["task.path=FOLDER"] if self.config.supervised.dataset else []
        changed = [*self.resolved.overrides, *data, *(change.override for change in self.changes)]
        return shlex.join(["clusterkit", "train", "--preset", size.name, *chosen, *place, *changed])

    @property
    def before(self) -> str:
        """What to do before that command; empty if nothing."""
        if not self.fits:
            return ""
        if not self.here:
            if self._has_hosts(self.cluster):
                return ""
            name, count = self.resolved.size.name, self.config.n_nodes
            hosts = " ".join(f"H{number}" for number in range(1, count + 1)) if count <= 4 else f"H1 … H{count}"
            return f"clusterkit setup --hostnames {hosts} --preset {name} --no-train"
        try:
            require_inputs(self.config)
        except UserError as error:
            return str(error)
        return ""

    def allocations(self) -> dict[str, str]:
        """Return allocation_mode in every dialect that can express it."""
        return dialects_of(self.config.allocation) if self.config.allocation else {}

    def as_dict(self) -> dict[str, Any]:
        """Return the shape of --json."""
        shape, config = shape_of(self.config), self.config
        seconds = self.step.seconds if self.step else None
        usage = disk_usage(config, shape, timing.saves(config, seconds)) if shape else None
        measured = timing.measured_for(config, self.resolved.task)
        return {
            "preset": self.resolved.size.name,
            "task": self.resolved.task,
            "fits": self.fits,
            "n_nodes": config.n_nodes,
            "n_gpus_per_node": config.n_gpus_per_node,
            "gpu_memory_gib": self.gpu_memory_gib,
            "allocation": self.allocations(),
            "changes": [asdict(change) for change in self.changes],
            "checks": [finding.as_dict() for finding in self.findings],
            "steps": timing.total_steps(config),
            "step_seconds": seconds,
            "step_basis": self.step.basis if self.step else "",
            "whole_run": asdict(whole) if (whole := self.resolved.size.whole_run.get(self.resolved.task)) else None,
            "expected": [one.as_dict() for one in self.expected],
            "expected_unknown": why_unknown(config),
            "controllers_wanted": controllers_wanted(config),
            "first_save_seconds": timing.first_save_seconds(config, seconds) if seconds else None,
            "convergence_steps": measured.steps if measured else None,
            "convergence_hours": measured.steps * seconds / 3600 if measured and measured.steps and seconds else None,
            "disk_bytes": {**usage.parts, "total": usage.total} if usage else None,
            "gpu_memory_reported_gib": reported_gib(self.gpu_memory_gib),
            "before": self.before,
            "command": self.command,
        }


def dialects_of(allocation: Allocation) -> dict[str, str]:
    """Return an allocation in every dialect that can express it."""
    texts = {}
    for dialect in Dialect:
        try:
            texts[str(dialect)] = allocation.convert(dialect)
        except ValueError:
            continue
    return texts


def gibibytes(text: str) -> float:
    """Parse the memory of a GPU as it is sold (`80`, `80G`, `141GiB`), or with a fraction as nvidia-smi reports it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise UserError(f"--gpu-memory {text}: give the memory of one GPU in GiB, such as 80 or 141GiB")
    return float(found[1])


def storage_of(config: RunConfig, task: str, most_saves: int) -> int:
    """Return the bytes that a run writes with at most `most_saves` checkpoints, without trajectories; 0 if unknown."""
    shape, step = shape_of(config), timing.step_time(config, task, config.gpus)
    if shape is None:
        return 0
    saves = timing.saves(config, step.seconds if step else None)
    return disk_usage(config, shape, min(saves, most_saves)).total


def plan_preset(
    preset: str,
    task: str | None = None,
    overrides: Sequence[str] = (),
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu_memory_gib: float | None = None,
    gpu: str | None = None,
) -> PresetPlan:
    """Plan a preset; with nodes, gpus_per_node or gpu_memory_gib (of one GPU), on those, with few changes.

    gpu: kind of GPU, one of `GPUS`; has its memory unless gpu_memory_gib is given. None: as the preset's, and the
    expected time of a step for all kinds.

    Raises:
        UserError: an unknown preset, key or kind, or hosts that the preset cannot be fitted to.
    """
    resolved = resolve(preset, task, overrides)
    gpu = gpu and gpu.upper()
    if gpu is not None and gpu not in GPUS:
        raise UserError(f"--gpu {gpu}: rates are known for {', '.join(GPUS)}; for another kind give --gpu-memory alone")
    if gpu is not None and gpu_memory_gib is None:
        gpu_memory_gib = GPUS[gpu].memory_gib
    memory_gib = gpu_memory_gib or resolved.size.gpu_memory_gib or DEFAULT_GPU_MEMORY_GIB
    memory = int(reported_gib(memory_gib) * GIB)
    config: RunConfig = resolved.config
    changes: tuple[Change, ...] = ()
    if config.allocation is None and (nodes is not None or gpus_per_node is not None):
        raise UserError(f"preset {preset} takes no GPUs, so there is nothing to spread over other hosts")
    if config.allocation is not None and (nodes, gpus_per_node, gpu_memory_gib) != (None, None, None):
        target = Target(nodes or config.n_nodes, gpus_per_node or config.n_gpus_per_node, memory)
        config, changes = rescale(config, target)
    step = timing.step_time(config, resolved.task, config.gpus, memory_gib)
    whole = resolved.size.whole_run.get(resolved.task)
    shape = shape_of(config)
    findings = [
        *(Finding("", "trainer", Level.FAIL, f"it cannot run {part}", "") for part in missing_parts(config)),
        *checks.check_gpus(config, shape),
        *checks.check_tokens(config, shape),
        *checks.check_batch(config),
        *checks.check_prefixes(config, shape, memory),
        *checks.check_data(config),
        *checks.check_memory(config, shape, memory),
        *check_shards(config, shape, memory),
        *checks.check_adapters(config, resolve(preset, task).config.train.learning_rate, shape),
        *checks.check_judge(config, memory),
        *checks.check_disk(config, shape, step),
        *checks.check_saves(config, step, whole),
        *checks.check_hours(config, resolved.task, step, whole),
    ]
    expected = tuple(expected_steps(config, [gpu] if gpu else list(GPUS), memory_gib=gpu_memory_gib))
    return PresetPlan(resolved, config, memory_gib, changes, tuple(findings), step, expected)


def plan_lines(plan: PresetPlan) -> list[str]:
    """Return the plan as text: the changes, all findings, the allocation in every dialect, and the train command."""
    size, config = plan.resolved.size, plan.config
    memory = f"{plan.gpu_memory_gib:g} GB ({reported_gib(plan.gpu_memory_gib):g} GiB usable)"
    taken = f", {config.n_nodes} x {gpus(config.n_gpus_per_node)} of {memory}" if config.gpus else ""
    lines = [f"{size.name} on {plan.resolved.task}{taken}", ""]
    if plan.changes:
        lines += ["Changed"]
        for change in plan.changes:
            lines += [
                f"  {change.key}  {setting_text(change.before)} -> {setting_text(change.after)}",
                f"      {change.why}",
            ]
        lines += ["  Batch, group, lengths and learning rate stay, so the same is learned; only the time differs.", ""]
    for finding in plan.findings:
        lines.append(f"  {_MARKS[finding.level]:<4}  {finding.check:<10}  {finding.message}")
        if finding.fix:
            lines.append(f"{'':<{_INDENT}}-> {finding.fix}")
    if config.gpus:
        lines += ["", *_expected_lines(plan)]
    if allocations := plan.allocations():
        lines += ["", "allocation_mode in every form"]
        lines += [f"  {dialect:<8}  {text}" for dialect, text in allocations.items()]
    if not plan.fits:
        return [*lines, "", "It does not fit: change what is marked FAIL, and plan it again."]
    before = [f"First: {plan.before}"] if plan.before else []
    return [*lines, "", *before, f"Train it: {plan.command}"]


def _expected_lines(plan: PresetPlan) -> list[str]:
    if not plan.expected:
        return [f"The time of a step cannot be told beforehand: {why_unknown(plan.config)}."]
    beside = "; sampling and training beside one another" if plan.config.rollout.max_staleness else ""
    typed = len(plan.expected) > 1 and plan.gpu_memory_gib != plan.resolved.size.gpu_memory_gib
    memory = f", on GPUs with {plan.gpu_memory_gib:g} GB at most" if typed else ""
    lines = [f"Expected time of a step, evaluations and checkpoints apart{memory}{beside}"]
    for one in plan.expected:
        parts = " + ".join(f"{name} {part}" for name, part in one.parts.items())
        lines.append(f"  {one.gpu:<8}  {one.whole}: {parts}")
    first = plan.expected[0]
    said = [f"How sure: {first.sure}."]
    for one in plan.expected[1:]:
        if not first.taken_over:
            said.append(f"{one.gpu}: {one.sure}.")
            continue
        more = [source for source in one.taken_over if source not in first.taken_over]
        said += [f"{one.gpu}: also to {', '.join(more)}."] if more else []
    if wanted := controllers_wanted(plan.config):
        said.append(
            f"Requests take rank 0 up to {controller_share(plan.config):.0%} of the time that sampling takes: "
            f"rollout.controllers={wanted} has processes of their own make them (docs/scale.md)."
        )
    return [*lines, *(f"  {sentence}" for sentence in said)]
