"""A copy of a cluster's runs on this machine, for the commands that read runs of this machine.

The copy is laid out like a fileroot. Only what has changed is fetched again, and of metrics.jsonl only what is new.
`Copies` awaits; `Mirror` is for code that waits, with a thread that keeps the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clusterkit.backends.ray.files import (
    HELDOUT,
    LOOK_SECONDS,
    Facts,
    fetch_logs,
    listing,
    localise_paths,
    run_checked,
)
from clusterkit.backends.ray.follow import Copy
from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.jobs import TRAINS, RayJob
from clusterkit.backends.ray.overviews import fetch_overviews
from clusterkit.backends.ray.storage import METRICS, fetch_records, list_runs, read_whole
from clusterkit.backends.records import Runs
from clusterkit.provision import docker
from clusterkit.provision.ray.model import LABEL_CLUSTER
from clusterkit.provision.ray.token import read_token
from clusterkit.runs.directory import CLOCK_FILE, HOLDER_FILE, RunDirectory, runs, user_name
from clusterkit.runs.log.metrics import History
from clusterkit.ssh.api import ErrorKind, HostError, Session
from clusterkit.ssh.connection import connect
from trainer.checkpoint import slots
from trainer.errors import RunError, UserError
from trainer.files import write_atomic
from trainer.paths import SUPERVISED

if TYPE_CHECKING:
    from clusterkit.hosts.model import Host
    from clusterkit.ssh.selection import Selection

HASH_SECONDS = 3600.0
"""For reading every byte of two checkpoints."""
SILENT_SECONDS = 60.0
"""A host that did not answer is asked last for so long."""
ROLLOUTS = "rollouts"
UNASKED = "a job that Ray was not asked about"

T = TypeVar("T")


@dataclass
class _CopiedRun:
    """What there is here of a run."""

    copy: Copy  # of its metrics
    records: Facts = field(default_factory=dict)  # files that were fetched, as they were there then
    logs: Facts = field(default_factory=dict)  # likewise
    heldout: Facts = field(default_factory=dict)  # likewise
    listed: Facts = field(default_factory=dict)  # all that tell about it, as they were at the last look


class Copies:
    """Connections to a cluster, and what they have brought here. fileroot: where the runs lie there.

    What looks at a run, or writes beside it, raises RunError where no host shows it.
    """

    def __init__(self, selection: Selection, folder: Path, fileroot: str) -> None:
        self.selection, self.folder, self.fileroot = selection, folder, fileroot
        self._sessions: dict[str, Session] = {}
        self._silent: dict[str, float] = {}
        self._known: dict[RunDirectory, _CopiedRun] = {}

    async def index(self) -> None:
        """Have a folder here for every run of this user, as old as the run's last start there.

        Raises:
            RunError: there is none, or no host shows them.
        """
        user, cluster = user_name(), self.selection.cluster.name
        found = await self._on_any_host(lambda head: list_runs(head.session, self.fileroot, user))
        if not found:
            raise RunError(
                f"cluster {cluster} has no run of {user} under {self.fileroot}: start one with clusterkit train "
                f"--cluster {cluster} --preset tiny"
            )
        for one in found:
            run = RunDirectory(self.folder, user, one.run.experiment, one.run.trial)
            run.logs.mkdir(parents=True, exist_ok=True)
            _date(run, one.started)

    async def fetch_overviews(self, user: str) -> None:
        """Bring what the overview of a user's runs is made from; see `Runs.fetch_overviews`."""
        await self._on_any_host(lambda head: self._fetch_overviews(head, user))

    async def _fetch_overviews(self, head: Head, user: str) -> None:
        await fetch_overviews(head.session, self.fileroot, user, self.folder)
        jobs = await self._jobs(head)
        for run in runs(self.folder, user=user):
            self._write_holder(run, self._holder(jobs, self.original(run), run))

    async def fetch(self, run: RunDirectory, *, logs: bool) -> None:
        """Bring a run's records up to date, and its logs where they are wanted."""
        await self._on_any_host(lambda head: self.update(head, run, logs=logs))

    async def index_steps(self, run: RunDirectory) -> None:
        """Have an empty file for every step whose trajectories are recorded there."""
        folder = run.logs / ROLLOUTS
        script = f"cd {shlex.quote(str(self.original(run).logs / ROLLOUTS))} 2>/dev/null || exit 0\nls\n"
        names = (await self._on_any_host(lambda head: run_checked(head, script))).splitlines()
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / Path(name).name).touch()

    async def fetch_step(self, file: Path) -> None:
        """Bring what is recorded of a step."""
        original = Path(self.fileroot) / file.relative_to(self.folder)
        write_atomic(file, await self._on_any_host(lambda head: read_whole(head.session, original)))

    async def fetch_heldout(self, run: RunDirectory) -> None:
        """Bring the held-out trajectories of a run that was brought, where they have changed since."""
        known = self._known[run]
        now = {name: fact for name, fact in known.listed.items() if name.startswith(HELDOUT)}
        for name in known.heldout.keys() - now.keys():
            (run.logs / name).unlink(missing_ok=True)
        for name, fact in now.items():
            if known.heldout.get(name) != fact:
                (run.logs / name).parent.mkdir(exist_ok=True)
                await self.fetch_step(run.logs / name)
                known.heldout[name] = fact
        known.heldout = now

    async def put(self, run: RunDirectory, name: str, text: str) -> None:
        """Write a file beside the run on the cluster. Raises RunError where no host takes it."""
        await self._on_any_host(
            lambda head: head.session.put(text.encode(), str(self.original(run).logs / name), root=True)
        )

    async def look(self, folder_there: str) -> dict[str, Any]:
        """What there is to go on from in a folder there, by a script in a container (or on its host without one)."""
        folder = shlex.quote(folder_there)
        script = (
            # Without Docker, or with one that does not answer, the host itself looks.
            f"ids=$({docker.ps(f'label={LABEL_CLUSTER}={self.selection.cluster.name}')} 2>/dev/null) || ids=\n"
            'id=${ids%%"\n"*}\n'
            f'[ -z "$id" ] || exec docker exec --interactive "$id" python3 - {folder}\n'
            f"exec python3 - {folder}\n"
        )
        source = Path(slots.__file__).read_bytes()
        text = await self._on_any_host(lambda head: run_checked(head, script, source, HASH_SECONDS))
        found: dict[str, Any] = json.loads(text)
        return found

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()), return_exceptions=True)

    def original(self, run: RunDirectory) -> RunDirectory:
        """The run itself, of its copy."""
        return RunDirectory(Path(self.fileroot), run.user, run.experiment, run.trial)

    def history(self, run: RunDirectory) -> History:
        """The records of a run that was brought."""
        return self._known[run].copy.history

    async def update(self, head: Head, run: RunDirectory, *, logs: bool = False) -> None:
        """Bring a run's records up to date over this host, and its logs where they are wanted."""
        original = self.original(run)
        facts, ahead = await listing(head, original)
        known = self._known.get(run)
        if known is None or facts.get(METRICS, (0, 0.0))[0] < known.copy.size:  # another run has the name now
            shutil.rmtree(run.logs, ignore_errors=True)
            known = self._known[run] = _CopiedRun(Copy(original, self.folder))
        known.listed = facts
        records = {name: fact for name, fact in facts.items() if _is_record(name)}
        if records != known.records:
            for name in known.records.keys() - records.keys():
                (run.logs / name).unlink(missing_ok=True)
            await fetch_records(
                head.session, self.fileroot, run.user, run.experiment, self.folder, trial=run.trial, metrics=False
            )
            known.records = records
        await known.copy.refresh(head)
        if logs:
            await fetch_logs(head, original, run, facts, known.logs)
        self._write_holder(run, self._holder(await self._jobs(head), original, run))
        (run.logs / CLOCK_FILE).write_text(str(ahead), encoding="utf-8")
        newest = max((moment for _, moment in facts.values()), default=0.0)
        _date(run, facts.get(run.config.name, (0, newest))[1])

    async def _jobs(self, head: Head) -> list[RayJob] | None:
        """All jobs of Ray; None where it cannot be asked over this host."""
        if head.session.host.name == self.selection.cluster.head_host.name and head.token:
            with contextlib.suppress(HostError, RunError):
                return await head.ask(lambda api: api.all())
        return None

    def _holder(self, jobs: list[RayJob] | None, original: RunDirectory, run: RunDirectory) -> str:
        """Who works on it, as `RunDirectory.holder` says it for runs of this machine."""
        if jobs is None:
            return "" if run.has_ended else UNASKED
        job = job_of(original, jobs)
        return f"job {job.submission_id}" if job is not None and job.alive else ""

    def _write_holder(self, run: RunDirectory, holder: str) -> None:
        path = run.logs / HOLDER_FILE
        if holder:
            path.write_text(holder, encoding="utf-8")
        else:
            path.unlink(missing_ok=True)

    async def _on_any_host(self, work: Callable[[Head], Awaitable[T]]) -> T:
        """Do it over a host that shows the storage: the head where it answers, else any other.

        Raises:
            RunError: none does, with the reason of each.
        """
        cluster, problems = self.selection.cluster, []
        hosts = dict.fromkeys([cluster.head_host, *cluster.hosts])
        for host in sorted(hosts, key=lambda host: self._silent.get(host.name, 0.0) > time.monotonic()):
            for kept in (True, False) if host.name in self._sessions else (False,):
                try:
                    return await work(Head(await self._session(host, kept), cluster, read_token(cluster.name)))
                except HostError as error:
                    if error.kind is ErrorKind.WRITE:
                        raise RunError(str(error)) from error
                    await self._lose(host)
                    if not kept:
                        problems.append(str(error))
        raise RunError("\n".join(dict.fromkeys(problems)))

    async def _session(self, host: Host, kept: bool) -> Session:
        if kept:
            return self._sessions[host.name]
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                self._sessions[host.name] = await connect(host, self.selection.ssh)
        except TimeoutError:
            raise HostError(host.name, ErrorKind.SILENT, f"does not answer within {LOOK_SECONDS:.0f} s") from None
        finally:
            self._silent[host.name] = 0.0 if host.name in self._sessions else time.monotonic() + SILENT_SECONDS
        return self._sessions[host.name]

    async def _lose(self, host: Host) -> None:
        session = self._sessions.pop(host.name, None)
        if session is not None:
            with contextlib.suppress(Exception):
                await session.close()


def _is_record(name: str) -> bool:
    """Whether a file is brought with the others that tell about a run."""
    if name.startswith(f"{SUPERVISED}/"):  # its own numbers grow with every step, and the run's have its progress
        return Path(name).name in ("start.json", "LATEST")
    return name != METRICS and not name.startswith(HELDOUT) and (not name.endswith(".log") or "/console" in name)


def _date(run: RunDirectory, moment: float) -> None:
    """Let the copy look as old as the run is: what was brought later was not started later."""
    for path in (run.logs, run.config):
        with contextlib.suppress(OSError):
            os.utime(path, (moment, moment))


def job_of(run: RunDirectory, jobs: list[RayJob]) -> RayJob | None:
    """The run's newest job."""
    mine = [job for job in jobs if job.metadata.get("kind") == TRAINS and job.metadata.get("run_dir") == str(run.logs)]
    return mine[-1] if mine else None


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

    def fetch_overviews(self, user: str | None = None) -> None:
        """See `Runs.fetch_overviews`."""
        self._do(self._copies.fetch_overviews(user or user_name()))

    def fetch(self, run: RunDirectory, *, logs: bool = False) -> None:
        """See `Runs.fetch`."""
        self._do(self._copies.fetch(run, logs=logs))

    def index_steps(self, run: RunDirectory) -> None:
        """See `Runs.index_steps`."""
        self._do(self._copies.index_steps(run))

    def fetch_heldout(self, run: RunDirectory) -> None:
        """See `Runs.fetch_heldout`."""
        self._do(self._copies.fetch_heldout(run))

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

    def original(self, run: RunDirectory) -> RunDirectory:
        """See `Runs.original`."""
        return self._copies.original(run)

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
