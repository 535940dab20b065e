"""`clusterkit data`: make the files of a task."""

from __future__ import annotations

from pathlib import Path

from clusterkit.data.datasets.build import build
from clusterkit.data.datasets.prepare import make_plan
from clusterkit.data.datasets.reading import ReadingShape, parse_mix, parse_sizes
from clusterkit.data.datasets.texts import Shape
from clusterkit.ui import output
from trainer.errors import InterruptedRunError


def prepare(
    kind: str,
    sources: list[Path],
    out: Path,
    shape: tuple[int, int, int],
    reading: tuple[int, int, str, str],
    test_share: float,
    most: int,
    seed: int,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Make the files, with their card.

    Args:
        kind: reading, memagent, memalpha or math.
        sources: input files.
        out: the folder to make.
        shape: questions and documents of a text, words of a chunk.
        reading: questions of a document, number, mix and documents of traces, the last two as typed.
        test_share: share of the rows that is for test.
        most: training rows of a source, at most; 0 for all.
        seed: of groups and shuffles.
        force: replace a folder that was prepared from other inputs.
        as_json: print the card as JSON.
    """
    target = out.expanduser().absolute()
    try:
        files = [source.expanduser() for source in sources]
        per_document, traces, mix, sizes = reading
        amounts = ReadingShape(per_document, traces, parse_mix(mix), parse_sizes(sizes))
        plan = make_plan(kind, files, Shape(*shape), test_share, most, seed, amounts)
        card = build(plan, target, output.note, force)
    except KeyboardInterrupt as error:
        raise InterruptedRunError(
            "interrupted: what is finished is kept; the same command goes on from there"
        ) from error
    if as_json:
        output.result_json({**card, "folder": str(target)})
        return
    what = "is there already, unchanged" if card["outcome"] == "present" else "is ready"
    output.result(f"{target} {what}")
    for name, facts in card["files"].items():
        by_source = ", ".join(f"{source} {count}" for source, count in facts["by_source"].items())
        output.result(f"  {name:22}{facts['rows']:>8} rows  {by_source}")
    if card["left_out"]:
        output.note(f"{card['left_out']} rows were left out (without answer or evidence, or asked twice)")
    output.result(f"next: {_next(kind, target)}")


def _next(kind: str, folder: Path) -> str:
    if kind == "reading":
        gpu, cpu = (f"clusterkit train --preset {name} task.path={folder}" for name in ("135M_read", "135M_read_cpu"))
        return f"{gpu}\n      {cpu}  (in miniature, without a GPU)"
    if kind == "memagent":
        return f"clusterkit train --preset 135M_cpu --task hotpotqa task.path={folder}"
    if kind == "memalpha":
        return f"clusterkit train --preset memalpha-4B task.path={folder}"
    return f"clusterkit train --preset 1.5B_n1 --task math task.path={folder} task.dataset=train.jsonl"
