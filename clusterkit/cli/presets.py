"""`clusterkit presets`: list, show, explain, compare and plan presets."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import JSON_OPTION, new_app

app = new_app("List, show, explain, compare and plan presets.")

_NAME = typer.Argument(..., help="Preset, such as tiny.", metavar="NAME")
_TASK = typer.Option(None, "--task", metavar="NAME", help="Task; the preset's default when left out.")
_ALLOCATION_MODE = typer.Argument(
    ...,
    metavar="ALLOCATION_MODE",
    help="In any form: sglang.d4p1m1+d2p2m1, sglang:d4+fsdp:d4, rollout.backend=sglang:d4 actor.backend=fsdp:d4.",
)
_OVERRIDES = typer.Argument(None, metavar="KEY=VALUE", help="Settings that differ from the preset's.")


@app.callback(
    invoke_without_command=True,
    examples="""
clusterkit presets
clusterkit presets explain tiny train.learning_rate
clusterkit presets plan 7B_n4 --nodes 2
""",
)
def _presets(ctx: typer.Context, as_json: bool = JSON_OPTION) -> None:
    if ctx.invoked_subcommand is None:
        actions.presets.list_all(as_json)


@app.command(
    "list",
    examples="""
clusterkit presets list
clusterkit presets list --json
""",
)
def list_presets(as_json: bool = JSON_OPTION) -> None:
    """List the presets, what each is for and what it needs."""
    actions.presets.list_all(as_json)


@app.command(
    "show",
    examples="""
clusterkit presets show tiny
clusterkit presets show 7B_n4 --task memagent > run.yaml
""",
)
def show(name: str = _NAME, task: str | None = _TASK, as_json: bool = JSON_OPTION) -> None:
    """Print every setting that applies to a preset, as YAML."""
    actions.presets.show(name, task, as_json)


@app.command(
    "explain",
    examples="""
clusterkit presets explain tiny
clusterkit presets explain tiny train --all
""",
)
def explain(
    name: str = _NAME,
    key: str | None = typer.Argument(
        None, metavar="KEY", help="One field or section, such as train.learning_rate or train."
    ),
    task: str | None = _TASK,
    everything: bool = typer.Option(False, "--all", help="Also the fields that the preset leaves at their default."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Say what each setting of a preset means, where it comes from and why it has its value."""
    actions.presets.explain(name, key, task, everything=everything, as_json=as_json)


@app.command(
    "diff",
    examples="""
clusterkit presets diff 7B_n4 7B_n16
clusterkit presets diff tiny 135M_cpu --json
""",
)
def diff(
    first: str = typer.Argument(..., metavar="NAME", help="A preset."),
    second: str = typer.Argument(..., metavar="NAME2", help="The preset to compare it with."),
    task: str | None = typer.Option(
        None, "--task", metavar="NAME", help="Task of both; each preset's default when left out."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Show what two presets set differently."""
    actions.presets.diff(first, second, task, as_json)


@app.command(
    "plan",
    examples="""
clusterkit presets plan 7B_n4
clusterkit presets plan 7B_n4 --nodes 2 --gpu H100
clusterkit presets plan tiny rollout.group_size=8
""",
)
def plan(
    name: str = _NAME,
    overrides: list[str] = _OVERRIDES,
    task: str | None = _TASK,
    nodes: int | None = typer.Option(None, "--nodes", min=1, help="Put it on so many hosts; says what has to change."),
    gpus_per_node: int | None = typer.Option(None, "--gpus-per-node", min=1, help="GPUs of a host, if not as many."),
    gpu_memory: str | None = typer.Option(
        None, "--gpu-memory", metavar="GIB", help="Memory of a GPU, such as 80 or 141GiB; else what the preset is for."
    ),
    gpu: str | None = typer.Option(
        None,
        "--gpu",
        metavar="KIND",
        help="H200, H100 or A100: plan for its memory, and tell its time of a step alone.",
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Check a preset's arithmetic before any GPU is touched: GPUs, tokens, batch, memory, disk, hours.

    Exit code: 0 it fits, 1 it does not, 2 bad usage.
    """
    actions.presets.plan(name, overrides or [], task, nodes, gpus_per_node, gpu_memory, gpu, as_json=as_json)


@app.command(
    "convert",
    examples="""
clusterkit presets convert sglang.d4p1m1+d2p2m1
clusterkit presets convert sglang:d4+fsdp:d4 --json
""",
)
def convert(
    allocation_mode: list[str] = _ALLOCATION_MODE,
    as_json: bool = JSON_OPTION,
) -> None:
    """Write an allocation_mode in the other forms; a mistake in it is shown with a caret."""
    actions.presets.convert(allocation_mode, as_json)
