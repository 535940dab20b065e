"""The copy of a cluster's runs for code that waits and does not await: one thread keeps the connections."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clusterkit.backends.ray.files import localise_paths
from clusterkit.backends.ray.mirror import Copies
from clusterkit.backends.records import Runs
from clusterkit.runs.directory import RunDirectory
from trainer.errors import UserError

if TYPE_CHECKING:
    from clusterkit.ssh.selection import Selection

T = TypeVar("T")


class Mirror(Runs):
    """Runs of a cluster, copied below `folder`. Safe for threads."""

    def __init__(self, selection: Selection, folder: Path, fileroot: str) -> None:
        super().__init__(folder)
        self.fileroot, self.cluster = fileroot, selection.cluster
        self._copies = Copies(selection, folder, fileroot)
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def index(self) -> None:
        """See `Runs.index`."""
        self._do(self._copies.index())

    def fetch(self, run: RunDirectory, *, logs: bool = False) -> None:
        """See `Runs.fetch`."""
        self._do(self._copies.fetch(run, logs=logs))

    def index_steps(self, run: RunDirectory) -> None:
        """See `Runs.index_steps`."""
        self._do(self._copies.index_steps(run))

    def fetch_step(self, file: Path) -> None:
        """See `Runs.fetch_step`."""
        self._do(self._copies.fetch_step(file))

    def checkpoint_folder(self, typed: str) -> str:
        """See `Runs.checkpoint_folder`."""
        if not typed.startswith(f"{self.cluster.storage}/"):
            raise UserError(
                f"--recover-from {typed} is not below {self.cluster.storage}, which is all that the hosts share"
            )
        return typed.rstrip("/")

    def put(self, run: RunDirectory, name: str, text: str) -> None:
        """See `Runs.put`."""
        self._do(self._copies.put(run, name, text))

    def look(self, run: RunDirectory) -> dict[str, Any]:
        """See `Runs.look`; every file is read there, not brought here."""
        return self.look_at(str(self._copies.original(run).recover))

    def look_at(self, folder: str) -> dict[str, Any]:
        """See `Runs.look_at`."""
        found: dict[str, Any] = self._do(self._copies.look(folder))
        return found

    def with_original_paths(self, value: T) -> T:
        """See `Runs.with_original_paths`."""
        return localise_paths(value, self.folder, self.fileroot, self.cluster.name)

    def close(self) -> None:
        """Close the connections and remove the copy."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._copies.close(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            try:
                return future.result()
            except BaseException:
                future.cancel()
                raise
