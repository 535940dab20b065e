"""How a cluster and the run on it are doing: hosts, Ray, the job and the run's records, each as far as it is seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clusterkit.backends.base import RunSelector
from clusterkit.backends.ray.files import localise_paths
from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.jobs import RayJob
from clusterkit.backends.ray.mirror import Copies, job_of
from clusterkit.backends.ray.newest import newest_of
from clusterkit.backends.ray.storage import fileroot_of
from clusterkit.common.text_plot import iso_time, size
from clusterkit.provision.ray.current import option
from clusterkit.provision.ray.state import ClusterState, observe
from clusterkit.provision.ray.token import read_token
from clusterkit.runs.diagnose.model import BAD
from clusterkit.runs.diagnose.view import findings_of
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.status import Status
from clusterkit.runs.status import observe as observe_run
from clusterkit.runs.train_command import recorded_command
from clusterkit.ssh.api import ErrorKind, HostError, Session
from clusterkit.ssh.connection import connect
from clusterkit.ui.run_status import status_lines
from trainer.errors import RunError

if TYPE_CHECKING:
    from clusterkit.hosts.model import Host
    from clusterkit.ssh.selection import Selection


LOOK_SECONDS = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Disk:
    """The shared storage, in bytes."""

    path: str
    size: int
    free: int


@dataclass(frozen=True)
class ClusterStatus:
    """One observation."""

    cluster: str
    observed_at: float  # Unix seconds
    nodes: ClusterState  # hosts and Ray
    disk: Disk | None  # the shared storage; None where it was not seen
    job: RayJob | None  # the run's last job that Ray knows of
    run: Status | None  # the run that was asked for, or the newest
    run_dir: str = ""  # its folder on the storage
    unseen: tuple[str, ...] = ()  # what could not be seen, and why; what is left is no less true for it

    @property
    def exit_code(self) -> int:
        """0 all is well, 1 the run failed, was killed or stands still, 3 something was not seen or is missing."""
        if self.run is not None and self.run.state in ("failed", "killed", "stalled"):
            return 1
        return 3 if self.unseen or not self.nodes.ready else 0

    @property
    def original(self) -> RunDirectory | None:
        """The run in its place on the storage; None without a run."""
        if self.run is None:
            return None
        run = self.run.run
        return RunDirectory(Path(self.run_dir).parents[3], run.user, run.experiment, run.trial)

    def with_original_paths(self, value: T) -> T:
        """Text, or what holds text, with the places and commands of the cluster instead of those of the copy here."""
        if self.run is None or self.original is None:
            return value
        return localise_paths(value, self.run.run.fileroot, str(self.original.fileroot), self.cluster)

    def as_dict(self) -> dict[str, Any]:
        """For --json: the shape of a run's status, with the cluster around it."""
        run, job = self.run, self.job
        return {
            **self.with_original_paths({} if run is None else {**run.as_dict(), "diagnosis": findings_of(run)}),
            **({"run_dir": self.run_dir} if self.run_dir else {}),
            "cluster": self.nodes.as_dict(),
            "storage": None
            if self.disk is None
            else {"path": self.disk.path, "size": self.disk.size, "free": self.disk.free},
            "job": None
            if job is None
            else {"submission_id": job.submission_id, "status": job.status, "message": job.message},
            "unseen": list(self.unseen),
            "observed_at": iso_time(self.observed_at),
        }


@asynccontextmanager
async def watching(selection: Selection, selector: RunSelector) -> AsyncIterator[Watch]:
    """Look at a cluster again and again: connections are kept, and made anew where they were lost."""
    folder = Path(tempfile.mkdtemp(prefix="clusterkit-"))
    watch = Watch(selection, selector, folder)
    try:
        yield watch
    finally:
        await asyncio.gather(*(session.close() for session in watch.sessions.values()), return_exceptions=True)
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Watch:
    """See `watching`."""

    selection: Selection
    selector: RunSelector
    folder: Path
    sessions: dict[str, Session] = field(default_factory=dict)
    _silent: dict[str, HostError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fileroot = self.selector.fileroot or fileroot_of(self.selection.cluster)
        self._copies = Copies(self.selection, self.folder, fileroot)

    async def look(self) -> ClusterStatus:
        """Look once. Raises UserError for a key or configuration that no host can be reached with."""
        await self._connect()
        cluster, unseen = self.selection.cluster, [str(error).splitlines()[0] for error in self._silent.values()]
        nodes = await observe(self.sessions, cluster, unreachable=self._silent, inside=False)
        jobs, problem = await self._jobs()
        unseen += [problem] if problem else []
        disk, run, run_dir, job = None, None, "", None
        try:
            disk = await self._disk()
            if (found := await self._find()) is not None:
                run_dir = str(found.logs)
                job = job_of(found, jobs)
                run = await self._run(found)
            elif self._reader is not None and (self.selector.experiment or self.selector.trial):
                unseen.append(f"there is no run {self.selector} of {self.selector.user or user_name()}")
        except (HostError, RunError) as error:
            unseen.append(str(error).splitlines()[0])
            self._forget_lost()
        return ClusterStatus(cluster.name, time.time(), nodes, disk, job, run, run_dir, tuple(unseen))

    async def _connect(self) -> None:
        self._forget_lost()

        async def one(host: Host) -> None:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    self.sessions[host.name] = await connect(host, self.selection.ssh)
                self._silent.pop(host.name, None)
            except HostError as error:
                self._silent[host.name] = error
            except TimeoutError:
                message = f"no connection within {LOOK_SECONDS:g} s"
                self._silent[host.name] = HostError(host.name, ErrorKind.SILENT, message, "Is the host overloaded?")

        missing = [host for host in self.selection.cluster.hosts if host.name not in self.sessions]
        await asyncio.gather(*(one(host) for host in missing))
        await asyncio.gather(*(self._prove(name) for name in list(self.sessions)))

    async def _prove(self, name: str) -> None:
        """A connection whose host has gone looks like a living one until something is asked of it."""
        try:
            await self.sessions[name].run(":", timeout=10.0)
        except HostError as error:
            self._silent[name] = error
            session = self.sessions.pop(name)
            with contextlib.suppress(Exception):
                await session.close()

    def _forget_lost(self) -> None:
        for name in self._silent:
            self.sessions.pop(name, None)

    @property
    def _reader(self) -> Head | None:
        """A host that shows the storage: the head where it answers, else any other."""
        cluster = self.selection.cluster
        names = [cluster.head_host.name, *(host.name for host in cluster.hosts)]
        session = next((self.sessions[name] for name in names if name in self.sessions), None)
        return None if session is None else Head(session, cluster, read_token(cluster.name))

    async def _jobs(self) -> tuple[list[RayJob], str]:
        """All jobs, and why they could not be seen."""
        cluster = self.selection.cluster
        session, token = self.sessions.get(cluster.head_host.name), read_token(cluster.name)
        if session is None:
            return [], "" if cluster.head_host.name in self._silent else "the head node was not asked for jobs"
        try:
            return await Head(session, cluster, token).ask(lambda jobs: jobs.all()), ""
        except (HostError, RunError) as error:
            return [], str(error).splitlines()[0]

    async def _disk(self) -> Disk | None:
        reader = self._reader
        if reader is None:
            return None
        path = self.selection.cluster.storage
        df_output = await reader.session.run(f"timeout 10 df -P -B1 {path}", timeout=20.0)
        words = (df_output.stdout.splitlines() or [""])[-1].split()
        return Disk(path, int(words[1]), int(words[3])) if df_output.ok and len(words) > 4 else None

    async def _find(self) -> RunDirectory | None:
        found = None if self._reader is None else await newest_of(self._reader, self.selector)
        return None if found is None else found.run

    async def _run(self, found: RunDirectory) -> Status:
        reader = self._reader
        assert reader is not None
        local = RunDirectory(self.folder, found.user, found.experiment, found.trial)
        await self._copies.update(reader, local)
        status = observe_run(local, time.time(), self._copies.history(local))
        if status.state in BAD:
            with contextlib.suppress(HostError):  # the run is told all the same
                await self._copies.update(reader, local, logs=True)
        return status


def exit_marks(run: RunDirectory) -> dict[int, dict[str, Any]]:
    """How each attempt of a dispatched run ended, by number, from what it left itself."""
    marks = {}
    for number in run.attempt_numbers():
        with contextlib.suppress(OSError, ValueError):
            marks[number] = json.loads(run.exit_mark(number).read_text(encoding="utf-8"))
    return marks


SHOWN_ENDS = 3
INTERRUPTED = 130


def cluster_lines(status: ClusterStatus, named: str = "") -> list[str]:
    """The run first, then what it runs on, then what could not be seen. named: see `status_lines`."""
    lines = _run_lines(status, named)
    rows = [("", ""), ("cluster", _nodes(status)), *(("problem", text) for text in status.nodes.all_problems)]
    if status.disk is not None:
        rows.append(("storage", f"{status.disk.path}: {size(status.disk.free)} of {size(status.disk.size)} free"))
    if status.job is not None:
        rows.append(("job", f"{status.job.submission_id}: {status.job.status.lower()}"))
    rows += [("not seen", text) for text in status.unseen]
    rows.append(("observed", iso_time(status.observed_at)))
    return [*lines, *(f"{label:<12} {text}".rstrip() for label, text in rows)]


def _run_lines(status: ClusterStatus, named: str) -> list[str]:
    if status.run is None:
        seen = "no run was found" if not status.unseen else "runs could not be looked at"
        return [f"{'run':<12} {seen} on cluster {status.cluster}"]
    again = recorded_command(status.run.history, status.run.run, option(status.cluster))
    lines = status.with_original_paths(status_lines(status.run, named, again))
    marks = exit_marks(status.run.run).items()
    ends = [(number, mark) for number, mark in marks if mark.get("code") not in (0, INTERRUPTED)]
    for number, mark in ends[-SHOWN_ENDS:]:
        text = str(mark.get("message") or f"exit code {mark.get('code')}").splitlines()[0]
        lines.append(f"{'attempt ' + str(number):<12} ended after step {mark.get('global_step')}: {text}")
    return lines


def _nodes(status: ClusterStatus) -> str:
    nodes = [node for node in status.nodes.nodes if node.role != "other"]
    alive = [node for node in nodes if node.ray_state == "ALIVE"]
    gpus, wanted = sum(node.gpus for node in alive), sum(node.gpus_expected for node in nodes)
    return f"{status.cluster}: {len(alive)} of {len(nodes)} nodes and {gpus} of {wanted} GPUs alive in Ray"
