"""`clusterkit presets`: list, show and explain presets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from clusterkit.cli import output

if TYPE_CHECKING:
    from clusterkit.explain import Explanation

app = typer.Typer(
    help="List, show and explain presets.",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_JSON = typer.Option(False, "--json", help="Print JSON.")
_NAME = typer.Argument(..., help="Preset, such as tiny.", metavar="NAME")
_TASK = typer.Option(None, "--task", help="Task; the preset's default when left out.")


@app.callback(invoke_without_command=True)
def _presets(ctx: typer.Context, as_json: bool = _JSON) -> None:
    if ctx.invoked_subcommand is None:
        _list(as_json)


@app.command("list")
def list_presets(as_json: bool = _JSON) -> None:
    """List the presets, what each is for and what it needs."""
    _list(as_json)


@app.command("show")
def show(name: str = _NAME, task: str | None = _TASK, as_json: bool = _JSON) -> None:
    """Print the whole configuration that a preset resolves to, as YAML."""
    import yaml  # noqa: PLC0415

    from clusterkit.resolve import resolve  # noqa: PLC0415

    config = resolve(name, task).config.model_dump()
    # Placeholders of this machine, not of the preset.
    config.pop("fileroot")
    if as_json:
        output.result_json(config)
    else:
        output.result(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


@app.command("explain")
def explain(
    name: str = _NAME,
    key: str | None = typer.Argument(None, help="One field or section, such as train.learning_rate or train."),
    task: str | None = _TASK,
    everything: bool = typer.Option(False, "--all", help="Also the fields that the preset leaves at their default."),
    as_json: bool = _JSON,
) -> None:
    """Say what each setting of a preset means, where it comes from and why it has its value."""
    from clusterkit.explain import explain as explain_preset  # noqa: PLC0415

    explanations = explain_preset(name, task, key, everything)
    if as_json:
        output.result_json([explanation.as_dict() for explanation in explanations])
    else:
        output.result("\n".join(_paragraph(explanation) for explanation in explanations))


def _list(as_json: bool) -> None:
    from clusterkit import presets  # noqa: PLC0415

    sizes = [presets.load_size(name) for name in presets.size_names()]
    tasks = [presets.load_task(name) for name in presets.task_names()]
    if as_json:
        output.result_json(
            {
                "presets": [
                    {
                        "name": size.name,
                        "description": size.description,
                        "needs": size.needs,
                        "task": size.task,
                        "tasks": list(size.tasks),
                    }
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
    lines += ["", "Next: clusterkit presets explain tiny    or    clusterkit train --preset tiny --dry-run"]
    output.result("\n".join(lines))


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
