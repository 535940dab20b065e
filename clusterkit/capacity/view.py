"""A plan as text for people."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from clusterkit.capacity.memory import reported_gib
from clusterkit.capacity.preset_plan import PresetPlan
from clusterkit.common.finding import Level

_WIDTH = 116
_MARKS = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "FAIL"}
_INDENT = 20


def lines_of(plan: PresetPlan) -> list[str]:
    """What was changed and why, every verdict, the allocation in all dialects, and the command that trains it."""
    size, config = plan.resolved.size, plan.config
    memory = f"{plan.gpu_memory_gib:g} GB ({reported_gib(plan.gpu_memory_gib):g} GiB usable)"
    gpus = f", {config.n_nodes} x {config.n_gpus_per_node} GPUs of {memory}" if config.gpus else ""
    lines = [f"{size.name} on {plan.resolved.task}{gpus}", ""]
    if plan.changes:
        lines += ["Changed"]
        for change in plan.changes:
            lines += [f"  {change.key}  {_plain(change.before)} -> {_plain(change.after)}", f"      {change.why}"]
        lines += ["  Batch, group, lengths and learning rate stay, so the same is learned; only the time differs.", ""]
    for finding in plan.findings:
        first, *rest = wrap(finding.message, _WIDTH - _INDENT, break_on_hyphens=False)
        lines.append(f"  {_MARKS[finding.level]:<4}  {finding.check:<10}  {first}")
        lines += [f"{'':<{_INDENT}}{line}" for line in rest]
        if finding.fix:
            fix = wrap(f"-> {finding.fix}", _WIDTH - _INDENT, break_on_hyphens=False, subsequent_indent="   ")
            lines += [f"{'':<{_INDENT}}{line}" for line in fix]
    if allocations := plan.allocations():
        lines += ["", "allocation_mode in every form"]
        lines += [f"  {dialect:<8}  {text}" for dialect, text in allocations.items()]
    if not plan.fits:
        return [*lines, "", "It does not fit: change what is marked FAIL, and plan it again."]
    before = [f"First: {plan.before}"] if plan.before else []
    return [*lines, "", *before, f"Train it: {plan.command}"]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
