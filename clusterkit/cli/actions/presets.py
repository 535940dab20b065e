"""`clusterkit presets`: print what presets are and mean, their arithmetic, and an allocation in other forms."""

from __future__ import annotations

from typing import Any

import typer
import yaml

from clusterkit.capacity.preset_plan import dialects_of, gibibytes, plan_lines, plan_preset
from clusterkit.common.text_plot import columns
from clusterkit.config import presets
from clusterkit.config.aliases import translation_notes
from clusterkit.config.explain import Explanation, compare
from clusterkit.config.explain import explain as explain_preset
from clusterkit.config.resolve import applicable_values, resolve
from clusterkit.ui import output
from clusterkit.ui.width import fitted
from trainer.allocation import AllocationError
from trainer.allocation_text import parse
from trainer.errors import UserError

PROSE_COLUMNS = 116
"""Width where stdout is no terminal."""


def list_all(as_json: bool) -> None:
    """Print the presets, what each is for and what it needs."""
    sizes = [presets.load_size(name) for name in presets.size_names()]
    tasks = [presets.load_task(name) for name in presets.task_names()]
    if as_json:
        output.result_json(
            {
                "presets": [
                    {key: getattr(size, key) for key in ("name", "description", "needs", "task", "tasks")}
                    for size in sizes
                ],
                "tasks": [{"name": task.name, "description": task.description} for task in tasks],
            }
        )
        return
    width = max(map(len, [*presets.size_names(), *presets.task_names()]))
    lines = ["Presets (--preset NAME)"]
    for size in sizes:
        lines += [
            f"  {size.name:<{width}}  {size.description}",
            f"  {'':<{width}}  needs {size.needs}",
            f"  {'':<{width}}  tasks: {', '.join(size.tasks)}",
        ]
    lines += ["", "Tasks (--task NAME)"]
    lines += [f"  {task.name:<{width}}  {task.description}" for task in tasks]
    lines += [
        "",
        "Next",
        "  clusterkit presets explain tiny",
        "  clusterkit train --preset tiny --dry-run",
        "  clusterkit presets plan 1.5B_n4 --nodes 2",
    ]
    output.lines(lines, PROSE_COLUMNS)


def show(name: str, task: str | None, as_json: bool) -> None:
    """Print the settings that apply to a preset's run."""
    config = applicable_values(resolve(name, task).config)
    # Placeholders of this machine, not of the preset.
    config.pop("fileroot")
    if as_json:
        output.result_json(config)
    else:
        output.exact(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def explain(name: str, key: str | None, task: str | None, *, everything: bool, as_json: bool) -> None:
    """Print what the settings mean, and why each has its value."""
    explanations = explain_preset(name, task, key, everything)
    text = fitted((_paragraph(explanation) for explanation in explanations), PROSE_COLUMNS)
    output.outcome(text, explanations, as_json=as_json)


def diff(first: str, second: str, task: str | None, as_json: bool) -> None:
    """Print what two presets set differently."""
    differences = compare(first, second, task)
    rows = [(item.key, _plain(item.first), _plain(item.second)) for item in differences]
    lines = columns([("", first, second), *rows])
    text = "\n".join(lines) if rows else f"{first} and {second} are the same"
    output.outcome(text, differences, as_json=as_json)


def _paragraph(item: Explanation) -> str:
    lines = [f"{item.key} = {_plain(item.value)}"]
    lines.append(f"    {item.meaning}" if item.meaning else "")
    source = item.origin if item.origin == "default" else f"{item.origin}; default {_plain(item.default)}"
    lines.append(f"    from: {source}")
    if item.note:
        lines.append(f"    why: {item.note}")
    lines.append(f"    allowed: {item.allowed}")
    return "\n".join(line for line in lines if line)


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) or "(empty)"


def plan(
    name: str,
    overrides: list[str],
    task: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    gpu_memory: str | None,
    gpu: str | None,
    *,
    as_json: bool,
) -> None:
    """Print the arithmetic of a preset; the exit code says whether it fits."""
    output.notes(translation_notes(overrides))
    memory = gibibytes(gpu_memory) if gpu_memory is not None else None
    planned = plan_preset(name, task, overrides, nodes, gpus_per_node, memory, gpu)
    output.outcome(fitted(plan_lines(planned), PROSE_COLUMNS), planned.as_dict(), as_json=as_json)
    if not planned.fits:
        raise typer.Exit(1)


def convert(allocation_mode: list[str], as_json: bool) -> None:
    """Print an allocation in every form."""
    try:
        parsed = parse(" ".join(allocation_mode))
    except AllocationError as error:
        raise UserError(str(error)) from None
    texts = dialects_of(parsed)
    lines = [*(f"{dialect:<8} {text}" for dialect, text in texts.items()), f"GPUs     {parsed.gpus}"]
    facts = {"written_in": str(parsed.dialect), "gpus": parsed.gpus, **texts}
    output.outcome("\n".join(lines), facts, as_json=as_json)
