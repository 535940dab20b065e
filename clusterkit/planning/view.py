"""A plan as text for people."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from clusterkit.check.finding import Level
from clusterkit.planning.preset_plan import PresetPlan

_WIDTH = 116
_MARKS = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "FAIL"}
_INDENT = 20


def lines_of(plan: PresetPlan) -> list[str]:
    """What was changed and why, every verdict, the allocation in all dialects, and the command that trains it."""
    size, config = plan.resolved.size, plan.config
    gpus = f", {config.n_nodes} x {config.n_gpus_per_node} GPUs of {plan.gpu_memory_gib:g} GiB" if config.gpus else ""
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
    verdict = "Train it: " if plan.fits else "It does not fit. With these settings it would be: "
    return [*lines, "", f"{verdict}{plan.command}"]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
