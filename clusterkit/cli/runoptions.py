"""The options that say which run a command means, the same for every command. Light, for every `--help` has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import typer

from clusterkit.cli.hostoptions import takes
from trainer.errors import UserError


@dataclass(frozen=True)
class RunOptions:
    """What the command says about the place and the run, unchecked: the options of these names.

    A `name`, the run as one word, is split into `experiment` and `trial` at once.
    """

    name: str | None = None
    experiment: str | None = None
    trial: str | None = None
    fileroot: str | None = None
    cluster: str | None = None
    here: bool = False
    user: str | None = None

    def __post_init__(self) -> None:
        """Take the run's name apart."""
        if not self.name:
            return
        experiment, _, trial = self.name.rpartition("/")
        for option, value in (("experiment", experiment), ("trial", trial)):
            if value and getattr(self, option) not in (None, value):
                raise UserError(f"{self.name} and --experiment or --trial name the run twice: leave one of them out")
            if value:
                object.__setattr__(self, option, value)

    def with_name_among(self, words: Sequence[str]) -> tuple[RunOptions, list[str]]:
        """Return these options with the run that a first word without `=` names, and the words that are settings."""
        if words and "=" not in words[0]:
            return replace(self, name=words[0]), list(words[1:])
        return self, list(words)

    def require_no_run(self, *more: str) -> None:
        """Refuse what names a run or its place beside --log. more: further options that were typed and say nothing."""
        named = ("experiment", "trial", "fileroot", "cluster", "user")
        options = [f"--{name}" for name in named if getattr(self, name) is not None]
        if typed := [*([self.name] if self.name else options), *more]:
            raise UserError(f"--log FILE names the log itself: leave {' and '.join(typed)} out")


_OPTIONS: dict[str, Any] = {
    "name": typer.Argument(
        metavar="EXPERIMENT/TRIAL",
        help="The run, in one word; TRIAL alone, too.",
        show_default=False,
    ),
    "experiment": typer.Option("--experiment", metavar="NAME", help="Experiment; any when left out."),
    "trial": typer.Option("--trial", metavar="NAME", help="Trial; any when left out."),
    "fileroot": typer.Option(
        "--fileroot", metavar="FOLDER", help="Folder under which runs are [./runs, or the cluster's own]."
    ),
    "cluster": typer.Option("--cluster", metavar="NAME", help="That cluster."),
    "here": typer.Option("--here", help="This machine, whichever cluster is current."),
    "user": typer.Option("--user", metavar="NAME", help="Runs of that user, instead of your own."),
}


def takes_run(*names: str, hidden: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a Typer command options of `RunOptions`, by their names; it gets them as its parameter `run`.

    Args:
        hidden: further ones, which work but are not in --help.
    """
    options = {name: _OPTIONS[name] for name in names}
    for name in hidden:
        options[name] = copy(_OPTIONS[name])
        options[name].hidden = True
    return lambda command: takes(command, "run", RunOptions, options)
