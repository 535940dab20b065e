"""The options that say which run a command means, the same for every command. Light, for every `--help` has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from clusterkit.cli.hostoptions import takes
from trainer.errors import UserError


@dataclass(frozen=True)
class RunOptions:
    """What the command says about the place and the run, unchecked: the options of these names."""

    experiment: str | None = None
    trial: str | None = None
    fileroot: str | None = None
    cluster: str | None = None
    here: bool = False
    user: str | None = None

    def require_no_run(self, *more: str) -> None:
        """Refuse what names a run or its place beside --log. more: further options that were typed and say nothing.

        Raises:
            UserError: with the names of the options.
        """
        named = ("experiment", "trial", "fileroot", "cluster", "user")
        if typed := [*(f"--{name}" for name in named if getattr(self, name) is not None), *more]:
            raise UserError(f"--log FILE names the log itself: leave {' and '.join(typed)} out")


_OPTIONS: dict[str, Any] = {
    "experiment": typer.Option("--experiment", help="Experiment; any when left out."),
    "trial": typer.Option("--trial", help="Trial; any when left out."),
    "fileroot": typer.Option("--fileroot", help="Folder under which runs are [./runs, or the cluster's own]."),
    "cluster": typer.Option("--cluster", metavar="NAME", help="That cluster."),
    "here": typer.Option("--here", help="This machine, whichever cluster is current."),
    "user": typer.Option("--user", metavar="NAME", help="Runs of that user, instead of your own."),
}


def takes_run(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a Typer command options of `RunOptions`, by their names; it gets them as its parameter `run`."""
    return lambda command: takes(command, "run", RunOptions, {name: _OPTIONS[name] for name in names})
