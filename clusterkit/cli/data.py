"""`clusterkit data`: training and evaluation files from question-answering sets, books and problems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import new_app

app = new_app("Make training and evaluation files.", no_args_is_help=True)


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
    shape = (questions, documents, chunk_words)
    actions.data.prepare(kind, sources, out, shape, test_share, most, seed, force=force, as_json=as_json)
