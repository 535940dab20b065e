"""`clusterkit data`: training and evaluation files from question-answering sets, books and problems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import new_app

app = new_app("Make training and evaluation files.", no_args_is_help=True)


@app.callback(
    examples="""
clusterkit data prepare reading --from docs --out set
"""
)
def _data() -> None:
    """Make training and evaluation files from files that you have."""


@app.command(
    examples="""
clusterkit data prepare reading --from docs --out set
clusterkit data prepare math --from p.jsonl --out math
"""
)
def prepare(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="reading|memagent|memalpha|math", help="What the files are for.")],
    sources: Annotated[
        list[Path],
        typer.Option(
            "--from",
            metavar="FILE",
            help="Input: JSON, JSON lines, Parquet, or a folder of HotpotQA files; reading: also your own text files, "
            "or a folder of them; repeatable.",
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
        help="memalpha, math: share of the questions, books or problems for test; reading: of the documents for test, "
        "and as many for dev.",
    ),
    per_document: int = typer.Option(
        4, "--per-document", min=1, help="reading: questions of each kind that begin with one document, at most."
    ),
    traces: int = typer.Option(
        20000, "--traces", min=0, help="reading: examples for trainer.type=sft, at most; 40 a question."
    ),
    trace_mix: str = typer.Option(
        "cloze=10,chain=20,comparison=10,fact=30,real=10,final=20",
        "--trace-mix",
        help="reading: parts of the examples: questions made by rule, real ones, the answer from a whole memory alone.",
    ),
    trace_documents: str = typer.Option(
        "2,4,8,16", "--trace-documents", help="reading: documents of an example, drawn at random."
    ),
    trace_distractors: float = typer.Option(
        1.0,
        "--trace-distractors",
        metavar="SHARE",
        min=0.0,
        max=1.0,
        help="reading: of the examples those that have documents like their question, and are shown memories with "
        "sentences that mislead.",
    ),
    trace_sentences: int = typer.Option(
        2, "--trace-sentences", min=1, help="reading: sentences of such a memory, at most; more need a longer memory."
    ),
    traced_share: float = typer.Option(
        1.0,
        "--traced-share",
        min=0.0,
        max=1.0,
        help="reading: of the real training questions those that examples are made of; the others are left to "
        "reinforcement.",
    ),
    max_per_source: int = typer.Option(
        0, "--max-per-source", min=0, help="memagent, memalpha, math: training rows of a source, at most; 0: all."
    ),
    seed: int = typer.Option(1, "--seed", help="memalpha, math, reading: of what is drawn and shuffled."),
    force: bool = typer.Option(False, "--force", help="Replace a folder that was prepared from other inputs."),
    as_json: bool = typer.Option(False, "--json", help="Print the card as JSON."),
) -> None:
    """Make the files of a task, with a card that says what they were made of.

    The same inputs and settings give the same bytes. An interrupted build goes on where it was.
    """
    shape = (questions, documents, chunk_words)
    reading = (per_document, traces, trace_mix, trace_documents, traced_share, trace_distractors, trace_sentences)
    sources_of = {name: context.get_parameter_source(name) for name in context.params}
    typed = [name for name, source in sources_of.items() if source is not None and source.name == "COMMANDLINE"]
    actions.data.prepare(
        kind, sources, out, shape, reading, test_share, max_per_source, seed, typed, force=force, as_json=as_json
    )
