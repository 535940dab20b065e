"""Runs as jobs of a cluster's Ray, whose folders lie on its shared storage."""

from __future__ import annotations

import asyncio
import re
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from clusterkit.backends.base import (
    RUNS,
    Job,
    Log,
    LogName,
    Observation,
    Place,
    PlannedRun,
    RunOutcome,
    RunRequest,
    RunSelector,
    Say,
    StoppedRun,
    StoredInput,
    SubmittedRun,
)
from clusterkit.backends.ray.follow import closing as closing_table
from clusterkit.backends.ray.follow import follow
from clusterkit.backends.ray.head import Backoff, Head, OnHead, head_of
from clusterkit.backends.ray.jobs import RayJob, matching_jobs, of_others
from clusterkit.backends.ray.mirror import Mirror
from clusterkit.backends.ray.newest import newest_of, require_newest, through_any
from clusterkit.backends.ray.request import request_on
from clusterkit.backends.ray.stage_inputs import have_assets, stored_inputs
from clusterkit.backends.ray.status import Watch, cluster_lines, watching
from clusterkit.backends.ray.storage import ListedRun, fileroot_of, newest_attempt, read_from, size_of
from clusterkit.backends.ray.submit import attach, dispatch
from clusterkit.backends.stop import LiveRun, end_run, require_one
from clusterkit.hosts.model import Cluster
from clusterkit.provision import docker
from clusterkit.provision.ray.model import HEAD, LABEL_CLUSTER, LABEL_ROLE
from clusterkit.runs.directory import RunDirectory, resume_hint, user_name
from clusterkit.ssh.api import SILENCES, HostError
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ssh.shell import first_of
from clusterkit.ui.progress import Progress
from trainer.errors import NoAnswerError, RunError, UserError

T = TypeVar("T")


class RayBackend:
    """`clusterkit.backends.base.Backend` of a cluster.

    Its coroutines run in one event loop, so that the connection to the head node is kept between them.
    """

    def __init__(self, place: Place, say: Say) -> None:
        self.place, self.say = place, say
        self.selection = select(place.hosts or HostOptions())
        self.cluster = self.selection.cluster
        self.where = f"on cluster {self.cluster.name}"
        self._stack, self._runner = ExitStack(), asyncio.Runner()
        self._connection = AsyncExitStack()
        self._head: Head | None = None
        self._watches: dict[RunSelector, Watch] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._runner.run(self._disconnect())
        self._runner.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of what is done on the cluster. Raises RunError where a host was lost, or refuses."""
        try:
            return self._runner.run(work)
        except HostError as error:
            raise RunError(str(error)) from error

    def do(self, work: Callable[[Head], Awaitable[T]], *, patient: bool = False) -> T:
        """Do something on the head node.

        Args:
            patient: try again where the connection is lost.

        Raises:
            UserError: this machine knows no Ray of the cluster.
            RunError: the head node cannot be reached, was lost, or refuses.
        """
        waits = Backoff()

        async def on_head() -> T:
            try:
                if self._head is None:
                    self._head = await self._connection.enter_async_context(head_of(self.selection))
                return await work(self._head)
            except HostError:
                await self._disconnect()
                raise

        while True:
            try:
                return self._runner.run(on_head())
            except HostError as error:
                if not patient:
                    raise (NoAnswerError if error.kind in SILENCES else RunError)(str(error)) from error
                self.say(f"cannot see the run for now ({error.message}); trying again")
                self._runner.run(waits.wait())

    def words(self, run: RunDirectory) -> str:
        """See `Backend.words`."""
        own = str(run.fileroot) == fileroot_of(self.cluster)
        folder = "" if own else f" --fileroot {shlex.quote(str(run.fileroot))}"
        return f"{run.word} --cluster {self.cluster.name}{folder}"

    def request(self, preset: str | None, task: str | None, settings: Sequence[str]) -> RunRequest:
        """See `Backend.request`."""
        return request_on(self.cluster, preset, task, settings)

    def attach(self, request: RunRequest) -> SubmittedRun | None:
        """See `Backend.attach`."""
        return attach(request, self.ray_jobs())

    def plan(self, request: RunRequest) -> PlannedRun:
        """See `Backend.plan`: which trial is meant, only the storage knows."""

        def look() -> list[StoredInput]:
            return self.do(lambda head: stored_inputs(head, request.assets))

        return PlannedRun(request, facts=(("cluster", self.cluster.name),), look=look)

    def start(self, planned: PlannedRun) -> SubmittedRun:
        """See `Backend.start`. A model or data set that is not on the storage is brought there first."""

        async def start(head: Head) -> SubmittedRun:
            await have_assets(head, planned.request.assets, self.say)
            return await dispatch(head, planned.request, self.say)

        return self.do(start)

    def follow(self, submitted: SubmittedRun, progress: Progress, again: str) -> RunOutcome:
        """See `Backend.follow`."""
        if submitted.state == "complete":
            return self.do(lambda head: closing_table(head, submitted.run))
        return self.wait(follow(self.selection, submitted, progress, again))

    def stop(self, selector: RunSelector, *, deadline: float, force: bool) -> StoppedRun:
        """See `Backend.stop`."""
        found = self.living(selector)
        if not found:
            known, user = self.ray_jobs(), selector.user or user_name()
            named = f" {selector}" if selector.experiment or selector.trial else ""
            others = ", ".join(f"{job.run} (--user {job.user})" for job in of_others(known, user) if job.user)
            raise RunError(
                f"no run{named} is alive {self.where} of user {user}"
                + (f"; of others: {others}. To end one of those, name its user" if others else "")
                + f": clusterkit jobs --cluster {self.cluster.name} lists what was there"
            )
        require_one([job.run for job in found])
        return end_run(job_run(self.cluster, self.do, found[0]), deadline=deadline, force=force, say=self.say)

    def log(self, selector: RunSelector, name: LogName, *, patient: bool = False) -> Log:
        """See `Backend.log`."""
        selector = self.in_folder(selector)

        async def find(head: Head) -> Path:
            run = await require_newest(head, selector)
            return name.path(run, await newest_attempt(head.session, run))

        path = self.do(find)
        return Log(
            path,
            lambda: self.do(lambda head: size_of(head.session, path)),
            lambda offset, most: self.do(lambda head: read_from(head.session, path, offset, most), patient=patient),
        )

    def status(self, selector: RunSelector) -> Observation:
        """See `Backend.status`; where no run fits, the cluster is shown alone."""
        return self.wait(self._look(self.in_folder(selector)))

    def runs(self, fileroot: str | None = None) -> Mirror:
        """See `Backend.runs`."""
        folder = self._typed_folder(fileroot) or fileroot_of(self.cluster)
        mirror = Mirror(self.selection, Path(tempfile.mkdtemp(prefix="clusterkit-")), folder)
        return self._stack.enter_context(closing(mirror))

    def jobs(self) -> list[Job]:
        """See `Backend.jobs`."""
        folder = self._typed_folder()
        return [job.listed for job in self.ray_jobs() if folder is None or job.is_in(folder)]

    def ray_jobs(self) -> list[RayJob]:
        """All jobs of the cluster's Ray, the oldest first."""
        return self.do(lambda head: head.ask(lambda jobs: jobs.all()))

    def living(self, selector: RunSelector) -> list[RayJob]:
        """Jobs of the runs that fit and are alive."""
        user, folder = selector.user or user_name(), self._typed_folder()
        return matching_jobs(self.ray_jobs(), user, selector.experiment, selector.trial, folder)

    def newest_run(self, selector: RunSelector) -> ListedRun | None:
        """The run that was started last, asked of any host that shows the storage; None without any."""
        selector = self.in_folder(selector)
        return self.wait(through_any(self.selection, lambda head: newest_of(head, selector)))

    def _typed_folder(self, fileroot: str | None = None) -> str | None:
        """The folder of runs that was asked for, a path of the cluster; None for the cluster's own."""
        typed = fileroot or self.place.fileroot or RUNS
        if typed == RUNS:
            return None
        if not typed.startswith("/"):
            raise UserError(f"--fileroot {typed}: with --cluster it is a folder there, so a path that begins with /")
        return typed.rstrip("/")

    def in_folder(self, selector: RunSelector) -> RunSelector:
        """The same run, looked for in the folder of runs that was typed."""
        return replace(selector, fileroot=self._typed_folder())

    async def _look(self, selector: RunSelector) -> Observation:
        if selector not in self._watches:
            context = watching(self.selection, selector)
            self._watches[selector] = await self._connection.enter_async_context(context)
        seen = await self._watches[selector].look()
        over = seen.run is not None and not seen.run.alive and not seen.unseen
        named = "" if seen.original is None else self.words(seen.original)
        return Observation(seen.as_dict(), cluster_lines(seen, named), seen.exit_code, over)

    async def _disconnect(self) -> None:
        self._head = None
        self._watches.clear()
        await self._connection.aclose()


KILL_SECONDS = 60.0


def job_run(cluster: Cluster, on_head: OnHead, job: RayJob) -> LiveRun:
    """A living run that is a Ray job. Its functions raise RunError where the cluster does not answer."""
    logs = Path(job.metadata["run_dir"])
    run = RunDirectory(logs.parents[3], *logs.parts[-3:])

    latest, started, done = (f"test -e {shlex.quote(str(path))}" for path in run.what_is_kept)

    def holds(test: str) -> bool:
        return on_head(lambda head: head.session.run(test, root=True)).ok

    # Ray waits as long as it was told when the job was submitted: only the processes themselves can be hurried.
    pattern = shlex.quote("trainer.* " + re.escape(f"{logs}/config.yaml"))
    kill = (
        first_of(docker.ps(f"label={LABEL_CLUSTER}={cluster.name}", f"label={LABEL_ROLE}={HEAD}"))
        + f'exec docker exec "$id" pkill -KILL -f -- {pattern}\n'
    )
    return LiveRun(
        job.run,
        interrupt=lambda: on_head(lambda head: head.ask(lambda jobs: jobs.stop(job.submission_id))),
        kill=lambda: on_head(lambda head: head.session.run(kill, root=True, timeout=KILL_SECONDS)),
        alive=lambda: on_head(lambda head: head.ask(lambda jobs: jobs.get(job.submission_id))).alive,
        resume_hint=lambda: resume_hint(holds(latest), holds(f"{started} || {done}")),
        stuck=lambda: "clusterkit down ends all of the cluster's Ray",
        poll_seconds=1.0,
    )
