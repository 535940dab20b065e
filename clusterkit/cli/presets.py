"""`clusterkit presets`: list, show, explain, compare and plan presets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.config.explain import Explanation

app = typer.Typer(
    help="List, show, explain, compare and plan presets.",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_JSON = typer.Option(False, "--json", help="Print JSON.")
_NAME = typer.Argument(..., help="Preset, such as tiny.", metavar="NAME")
_TASK = typer.Option(None, "--task", help="Task; the preset's default when left out.")
_ALLOCATION_MODE = typer.Argument(
    ..., help="In any form: sglang.d4p1m1+d2p2m1, sglang:d4+fsdp:d4, rollout.backend=sglang:d4 actor.backend=fsdp:d4."
)
_OVERRIDES = typer.Argument(None, metavar="KEY=VALUE", help="Settings that differ from the preset's.")


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

    from clusterkit.config.resolve import resolve, shown_values  # noqa: PLC0415

    config = shown_values(resolve(name, task).config)
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
    from clusterkit.config.explain import explain as explain_preset  # noqa: PLC0415

    explanations = explain_preset(name, task, key, everything)
    if as_json:
        output.result_json([explanation.as_dict() for explanation in explanations])
    else:
        output.result("\n".join(_paragraph(explanation) for explanation in explanations))


@app.command("diff")
def diff(
    first: str = typer.Argument(..., help="A preset.", metavar="NAME"),
    second: str = typer.Argument(..., help="The preset to compare it with.", metavar="NAME"),
    task: str | None = typer.Option(None, "--task", help="Task of both; each preset's default when left out."),
    as_json: bool = _JSON,
) -> None:
    """Show what two presets set differently."""
    from clusterkit.config.explain import compare  # noqa: PLC0415

    differences = compare(first, second, task)
    if as_json:
        output.result_json([difference.as_dict() for difference in differences])
        return
    rows = [(item.key, _plain(item.first), _plain(item.second)) for item in differences]
    widths = [max(map(len, column)) for column in zip(("", first, second), *rows, strict=True)]
    table = [("", first, second), *rows]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    output.result("\n".join(lines) if rows else f"{first} and {second} are the same")


@app.command("plan")
def plan(
    name: str = _NAME,
    overrides: list[str] = _OVERRIDES,
    task: str | None = _TASK,
    nodes: int | None = typer.Option(None, "--nodes", min=1, help="Put it on so many hosts; says what has to change."),
    gpus_per_node: int | None = typer.Option(None, "--gpus-per-node", min=1, help="GPUs of a host, if not as many."),
    gpu_memory: str | None = typer.Option(
        None, "--gpu-memory", metavar="GIB", help="Memory of a GPU, such as 80 or 141GiB; else what the preset is for."
    ),
    as_json: bool = _JSON,
) -> None:
    """Check a preset's arithmetic before any GPU is touched: GPUs, tokens, batch, memory, disk, hours.

    Exit code: 0 it fits, 1 it does not, 2 bad usage.
    """
    from clusterkit.capacity.preset_plan import gibibytes, plan_preset  # noqa: PLC0415
    from clusterkit.capacity.view import lines_of  # noqa: PLC0415
    from clusterkit.config.aliases import notes_of  # noqa: PLC0415

    output.notes(notes_of(overrides or ()))
    memory = gibibytes(gpu_memory) if gpu_memory is not None else None
    planned = plan_preset(name, task, overrides or (), nodes, gpus_per_node, memory)
    if as_json:
        output.result_json(planned.as_dict())
    else:
        output.result("\n".join(lines_of(planned)))
    if not planned.fits:
        raise typer.Exit(1)


@app.command("convert")
def convert(
    allocation_mode: list[str] = _ALLOCATION_MODE,
    as_json: bool = _JSON,
) -> None:
    """Write an allocation_mode in the other forms; a mistake in it is shown with a caret."""
    from clusterkit.capacity.preset_plan import dialects_of  # noqa: PLC0415
    from trainer.allocation import AllocationError  # noqa: PLC0415
    from trainer.allocation_text import parse  # noqa: PLC0415
    from trainer.errors import UserError  # noqa: PLC0415

    try:
        parsed = parse(" ".join(allocation_mode))
    except AllocationError as error:
        raise UserError(str(error)) from None
    texts = dialects_of(parsed)
    if as_json:
        output.result_json({"written_in": str(parsed.dialect), "gpus": parsed.gpus, **texts})
    else:
        output.result(
            "\n".join([*(f"{dialect:<8} {text}" for dialect, text in texts.items()), f"GPUs     {parsed.gpus}"])
        )


def _list(as_json: bool) -> None:
    from clusterkit.config import presets  # noqa: PLC0415

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
    lines += [
        "",
        "Next: clusterkit presets explain tiny    or    clusterkit train --preset tiny --dry-run",
        "On your hosts: clusterkit presets plan 1.5B_n4 --nodes 2",
    ]
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
