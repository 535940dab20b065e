"""`clusterkit ask`: have a checkpoint read text files with a memory, and answer a question."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import CACHE_OPTION, ENGINE_OPTION, SERVER_PYTHON_OPTION, SERVER_URL_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run
from trainer.errors import UserError

app = new_app()


@app.command(
    examples="""
clusterkit ask -q "Who signed it?" contract.txt
clusterkit ask -q "Who?" --model-path tiny-recall/run1 -
clusterkit ask -q "Who?" agent.chunk_tokens=512 a.txt
"""
)
@takes_run("fileroot")
def ask(
    *,
    run: RunOptions,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Text files in UTF-8; - or none: standard input.", show_default=False),
    ] = None,
    question: Annotated[
        list[str], typer.Option("--question", "-q", metavar="TEXT", help="What is asked about the texts.")
    ],
    model_path: str | None = typer.Option(
        None,
        "--model-path",
        metavar="MODEL",
        help="Checkpoint: a folder, EXPERIMENT/TRIAL (its newest) or an asset; the newest run's newest when left out.",
    ),
    plain: bool = typer.Option(
        False,
        "--plain",
        help="Leave the text as it stands; else a checkpoint that has learned from titled documents gets such ones.",
    ),
    preset: str | None = typer.Option(
        None, "--preset", metavar="NAME", help="Preset whose agent settings hold, for a checkpoint from elsewhere."
    ),
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, such as agent.chunk_tokens=512."),
    ] = None,
    engine: str = ENGINE_OPTION,
    server_url: str = SERVER_URL_OPTION,
    server_python: str = SERVER_PYTHON_OPTION,
    tensor_parallel: int = typer.Option(1, "--tensor-parallel", help="GPUs of the server."),
    cache_dir: str = CACHE_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print every section's memory and the answer as lines of JSON."),
    no_progress: bool = typer.Option(False, "--no-progress", help="Print the answer alone."),
) -> None:
    """Read text files section by section with a memory, show the memory as it changes, and answer a question.

    It runs on this machine, with or without a GPU. The memory goes to stderr, the answer to stdout. A checkpoint of a
    run reads with the settings of that run.
    """
    if len(question) > 1:
        raise UserError(
            f"{len(question)} questions were given, and a text is read for one of them: ask the others anew"
        )
    server = {"engine": engine, "url": server_url, "python": server_python, "tensor_parallel": tensor_parallel}
    actions.ask.ask(
        {
            "question": question[0],
            "files": tuple(files or ()),
            "plain": plain,
            "model_path": model_path,
            "preset": preset,
            "settings": tuple(setting or ()),
            "server": server,
            "cache_dir": cache_dir,
            "fileroot": run.fileroot,
        },
        as_json=as_json,
        shown=not no_progress,
    )
