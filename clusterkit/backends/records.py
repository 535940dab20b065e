"""A place's runs as files of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from clusterkit.runs.choose import choose_runs
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.status import find_run
from trainer.checkpoint.slots import look
from trainer.errors import UserError

T = TypeVar("T")


class Runs:
    """A place's runs as files of this machine: here those of a folder that it sees itself.

    A subclass copies those of other machines; its methods raise RunError where they cannot be seen.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def index(self) -> None:
        """Have a folder for every run."""

    def fetch_overviews(self, user: str | None = None) -> None:
        """Have what `clusterkit.runs.overview` reads of all runs of a user (None: ours), and a folder for others' runs.

        Of a long metrics.jsonl that is only the end.
        """

    def fetch(self, run: RunDirectory, *, logs: bool = False) -> None:
        """Bring a run up to date. logs: with its logs."""

    def find(self, experiment: str | None, trial: str | None, *, logs: bool = False) -> RunDirectory:
        """The newest run that fits, up to date. logs: with its logs."""
        self.index()
        with errors_with_original_paths(self):
            run = find_run(self.folder, experiment, trial)
        self.fetch(run, logs=logs)
        return run

    def choose(self, experiment: str | None, trial: str | None, compare: Sequence[str] = ()) -> list[RunDirectory]:
        """The run that is meant and those beside it, up to date; see `choose_runs`."""
        self.index()
        with errors_with_original_paths(self):
            chosen = choose_runs(self.folder, experiment, trial, compare)
        for run in chosen:
            self.fetch(run)
        return chosen

    def index_steps(self, run: RunDirectory) -> None:
        """Have a file, be it empty, for every recorded step."""

    def fetch_step(self, file: Path) -> None:
        """Bring the trajectories of a recorded step."""

    def fetch_heldout(self, run: RunDirectory) -> None:
        """Bring the held-out trajectories of a run that is up to date; those that are here already stay."""

    def put(self, run: RunDirectory, name: str, text: str) -> None:
        """Have a file beside the run itself that was written beside it here."""

    def look(self, run: RunDirectory) -> dict[str, Any]:
        """What `trainer.checkpoint.slots.look` finds of a run."""
        return self.look_at(str(run.recover))

    def look_at(self, folder: str) -> dict[str, Any]:
        """The same of any folder of the place."""
        return look(Path(folder))

    def checkpoint_folder(self, typed: str) -> str:
        """The folder of the place that --recover-from names. Raises UserError where it has no such folder."""
        folder = Path(typed).expanduser().absolute()
        if not folder.is_dir():
            raise UserError(f"--recover-from {typed}: there is no such folder; a run is named EXPERIMENT/TRIAL")
        return str(folder)

    def original(self, run: RunDirectory) -> RunDirectory:
        """The run itself, of its copy."""
        return run

    def with_original_paths(self, value: T) -> T:
        """Text, or what holds text, with the places and commands of the run itself."""
        return value


@contextmanager
def errors_with_original_paths(runs: Runs) -> Iterator[None]:
    """Name the places of the runs themselves in errors about their copies."""
    try:
        yield
    except UserError as error:
        if (message := runs.with_original_paths(str(error))) == str(error):
            raise
        raise type(error)(message) from None
