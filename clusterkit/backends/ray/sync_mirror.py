"""The copy of a cluster's runs for code that waits and does not await: one thread keeps the connections."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clusterkit.backends.ray.files import localise_paths
from clusterkit.backends.ray.mirror import Copies
from clusterkit.backends.ray.storage import fileroot_of
from clusterkit.runs.choose import choose_runs
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.status import find_run
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from trainer.errors import RunError, UserError

if TYPE_CHECKING:
    from clusterkit.ssh.selection import Selection

HERE = "runs"
"""What --fileroot is when nobody typed it."""

T = TypeVar("T")


class Mirror:
    """Runs of a cluster below `folder`. Safe for threads. All methods raise RunError where no host shows the runs."""

    def __init__(self, selection: Selection, folder: Path, fileroot: str) -> None:
        self.folder, self.fileroot, self.cluster = folder, fileroot, selection.cluster
        self._copies = Copies(selection, folder, fileroot)
        self._loop = asyncio.new_event_loop()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def index(self) -> None:
        """Have a folder for every run, so that one can be chosen among them."""
        self._do(self._copies.index())

    def find(self, experiment: str | None, trial: str | None, *, logs: bool = False) -> RunDirectory:
        """The copy of the newest run that fits, up to date."""
        self.index()
        try:
            run = find_run(self.folder, experiment, trial)
        except RunError as error:
            raise RunError(self.told(str(error))) from None
        self.fetch(run, logs=logs)
        return run

    def choose(self, experiment: str | None, trial: str | None, compare: str | None) -> list[RunDirectory]:
        """The copies of the run that is meant and of the one beside it, up to date; see `report.choose`."""
        self.index()
        try:
            chosen = choose_runs(self.folder, experiment, trial, compare)
        except RunError as error:
            raise RunError(self.told(str(error))) from None
        for run in chosen:
            self.fetch(run)
        return chosen

    def fetch(self, run: RunDirectory, *, logs: bool = False) -> None:
        """Bring the copy of a run up to date; with its logs, where they are wanted."""
        self._do(self._copies.fetch(run, logs=logs))

    def put(self, run: RunDirectory, name: str, text: str) -> None:
        """Write a file beside the run on the cluster."""
        self._do(self._copies.put(run, name, text))

    def look(self, run: RunDirectory) -> dict[str, Any]:
        """What `trainer.checkpoint.slots.look` finds of a run; every file is read there, not brought here."""
        return self.look_at(str(self._copies.there(run).recover))

    def look_at(self, folder: str) -> dict[str, Any]:
        """The same of any folder there."""
        found: dict[str, Any] = self._do(self._copies.look(folder))
        return found

    def told(self, value: T) -> T:
        """Text, or what holds text, with the places and commands of the cluster instead of those of the copy."""
        return localise_paths(value, self.folder, self.fileroot, self.cluster.name)

    def close(self) -> None:
        """Close the connections and remove the copy."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._copies.close(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        with self._turn:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            try:
                return future.result()
            except BaseException:
                future.cancel()
                raise


@contextmanager
def mirror_of(cluster: str, fileroot: str = HERE) -> Iterator[Mirror]:
    """The runs of a cluster for the length of a block. fileroot: where they lie there, if not where dispatch puts them.

    Raises:
        UserError: there is no such cluster, or the folder is none of its.

    """
    selection = select(HostOptions(cluster=cluster))
    if fileroot != HERE and not fileroot.startswith("/"):
        raise UserError(f"--fileroot {fileroot}: with --cluster it is a folder there, so a path that begins with /")
    place = fileroot_of(selection.cluster) if fileroot == HERE else fileroot.rstrip("/")
    mirror = Mirror(selection, Path(tempfile.mkdtemp(prefix="clusterkit-")), place)
    try:
        yield mirror
    finally:
        mirror.close()
