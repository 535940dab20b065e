"""`clusterkit completion`: the script that has a shell complete command lines."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import new_app

app = new_app()


@app.command(
    examples="""
eval "$(clusterkit completion bash)"
clusterkit completion bash >> ~/.bashrc
clusterkit completion zsh > ~/.zfunc/_clusterkit
clusterkit completion fish \\
  > ~/.config/fish/completions/clusterkit.fish
"""
)
def completion(
    shell: Annotated[
        str,
        typer.Argument(metavar="bash|zsh|fish", help="The shell; that of $SHELL when left out.", show_default=False),
    ] = "",
    words: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="WORD")] = None,
    complete: bool = typer.Option(False, "--complete", hidden=True, help="Print what may follow the words."),
) -> None:
    """Print a script for bash, zsh or fish that completes commands, options, presets, clusters, runs and settings."""
    if complete:
        actions.completion.complete([shell, *(words or [])])
    else:
        actions.completion.script(shell)
