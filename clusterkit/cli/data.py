"""`clusterkit data`: training and evaluation files from question-answering sets, books and problems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clusterkit.ui import output

app = typer.Typer(
    help="Make training and evaluation files.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _data() -> None:
    """Make training and evaluation files from files that you have."""


@app.command()
def prepare(
    kind: Annotated[str, typer.Argument(metavar="memagent|memalpha|math", help="What the files are for.")],
    sources: Annotated[
        list[Path],
        typer.Option(
            "--from",
            metavar="FILE",
            help="Input: JSON, JSON lines, Parquet, or a folder of HotpotQA files; repeatable.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to make.")],
    questions: int = typer.Option(10, "--questions", min=1, help="memalpha: questions about one text."),
    documents: int = typer.Option(60, "--documents", min=2, help="memalpha: documents in one text."),
    chunk_words: int = typer.Option(1500, "--chunk-words", min=20, help="memalpha: words in a chunk, at most."),
    test_share: float = typer.Option(
        0.1,
        "--test-share",
        min=0.0,
        max=0.9,
        help="memalpha, math: share of the questions, books or problems for test.",
    ),
    most: int = typer.Option(0, "--max-per-source", min=0, help="Training rows of a source, at most; 0: all."),
    seed: int = typer.Option(1, "--seed", help="Of groups and of each text's own shuffle."),
    force: bool = typer.Option(False, "--force", help="Replace a folder that was prepared from other inputs."),
    as_json: bool = typer.Option(False, "--json", help="Print the card as JSON."),
) -> None:
    """Make the files of a task, with a card that says what they were made of.

    The same inputs and settings give the same bytes. An interrupted build goes on where it was.
    """
    from clusterkit.data.datasets.build import build  # noqa: PLC0415
    from clusterkit.data.datasets.prepare import make_plan  # noqa: PLC0415
    from clusterkit.data.datasets.texts import Shape  # noqa: PLC0415
    from trainer.errors import InterruptedRunError  # noqa: PLC0415

    shape = Shape(questions, documents, chunk_words)
    target = out.expanduser().absolute()
    try:
        plan = make_plan(kind, [source.expanduser() for source in sources], shape, test_share, most, seed)
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
        output.result(f"  {name:18}{facts['rows']:>8} rows  {by_source}")
    if card["left_out"]:
        output.note(f"{card['left_out']} rows were left out (without answer or evidence, or asked twice)")
    output.result(f"next: {_next(kind, target)}")


def _next(kind: str, folder: Path) -> str:
    if kind == "memagent":
        return f"clusterkit train --preset 135M_cpu --task hotpotqa task.path={folder}"
    if kind == "memalpha":
        return f"clusterkit train --preset memalpha-4B task.path={folder}"
    return f"clusterkit train --preset 1.5B_n1 --task math task.path={folder} task.dataset=train.jsonl"
