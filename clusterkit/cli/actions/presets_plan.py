"""`clusterkit presets plan` and `convert`: print a preset's arithmetic, and an allocation in other forms."""

from __future__ import annotations

import typer

from clusterkit.capacity.preset_plan import dialects_of, gibibytes, plan_lines, plan_preset
from clusterkit.config.aliases import translation_notes
from clusterkit.ui import output
from trainer.allocation import AllocationError
from trainer.allocation_text import parse
from trainer.errors import UserError


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
    if as_json:
        output.result_json(planned.as_dict())
    else:
        output.result("\n".join(plan_lines(planned)))
    if not planned.fits:
        raise typer.Exit(1)


def convert(allocation_mode: list[str], as_json: bool) -> None:
    """Print an allocation in every form."""
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
