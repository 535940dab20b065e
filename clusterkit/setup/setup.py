"""`clusterkit setup`: take all hosts from SSH to a Ray node in parallel. A host waits for others only where it must."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit.common.finding import Finding, Level
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.bundle.folder import Bundle, send
from clusterkit.provision.checks.cluster import judge_cluster
from clusterkit.provision.checks.gpu import judge_gpus
from clusterkit.provision.checks.host import judge_host
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.cluster_lock import ClusterLockedError, Lease, LeaseLostError, LockOwner, release
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.facts.probe import ProbeRequest, gather
from clusterkit.provision.ray.model import token_file
from clusterkit.provision.ray.ports import Ports
from clusterkit.provision.steps.all import PROBED_COMMANDS, PROBED_FILES, PROBED_PACKAGES, STEPS
from clusterkit.provision.steps.step import DesiredState
from clusterkit.provision.steps.storage import probed_paths
from clusterkit.setup.hostlog import HostLog
from clusterkit.setup.model import HostReport, Milestones, Report, State, StepFailedError
from clusterkit.setup.runner import LOGIN, HostRunner, Watch
from clusterkit.ssh.api import ErrorKind, Session
from clusterkit.ssh.uploads import UPLOADS, Uploads
from trainer.errors import UserError

LEFT_TO_STEPS = {"docker", "toolkit", "packages"}
"""Checks whose problems the steps mend, or refuse with messages of their own."""

LONGEST_WAIT_S = 60.0
"""Longest wait before another connection to a host."""

Connect = Callable[[Host], Awaitable[Session]]
"""Opens the connection to a host."""


@dataclass(frozen=True)
class Request:
    """What `setup` was asked for."""

    cluster: Cluster
    hosts: tuple[Host, ...]  # of the cluster, to work on
    desired: DesiredState  # for the steps
    needs: Needs  # of the preset
    log_folder: Path  # for one file a host
    dry: bool = False  # only plan
    secrets: tuple[str, ...] = ()  # texts that no log may hold
    stages: tuple[Stage, ...] = ()
    bundle: Bundle | None = None  # packages to install from
    uploads: int = UPLOADS  # hosts that get large files from this machine at once
    retries: int = 0  # further connections to a host after the connection failed
    retry_wait: float = 2.0  # seconds before the first of them; doubled each time, a minute at most


class Stage:
    """What a host goes through after the steps: shared storage, image, assets, Ray.

    `run` takes one host through; it can wait for the head (`setup.head`). `plan` tells a dry run what `run` would do.
    """

    name = ""

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        """Take the host through, with its own work in `runner.timed(self.name)`. Raises StepFailedError."""
        raise NotImplementedError

    def plan(self, setup: Setup, runner: HostRunner) -> list[str]:  # noqa: ARG002
        """Return the titles of what would be done."""
        return []

    async def observe(self, setup: Setup, head: HostRunner) -> None:
        """End the others' waits where the head is only looked at (--limit, --exclude)."""

    async def finish(self, setup: Setup) -> None:
        """Check the whole cluster when all hosts are done. Failures go to `setup.fail`."""


@dataclass
class Setup:
    """One set-up. owner: of the cluster's lock, for the leases on its hosts; None: take no leases."""

    request: Request
    connect: Connect
    watch: Watch
    owner: LockOwner | None = None
    report: Report = field(default_factory=lambda: Report({}))
    runners: dict[str, HostRunner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        request = self.request
        self.head = Milestones(request.cluster.head_host.name)
        self.uploads = Uploads(request.uploads, self._waited_to_send)
        for host in request.hosts:
            row = HostReport(host.name, dict.fromkeys(self.step_names, State.WAITING))
            log = HostLog(request.log_folder, host.name, request.secrets)
            row.log = str(log.path)
            self.report.hosts[host.name] = row
            self.runners[host.name] = HostRunner(host, row, log, self._look, self._row_changed, dry=request.dry)
        head = request.cluster.head_host
        self.observed: HostRunner | None = None
        if head.name not in self.runners:
            row, log = HostReport(head.name), HostLog(request.log_folder, head.name, request.secrets)
            self.observed = HostRunner(head, row, log, self._look, lambda _: None, dry=True)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._refused: UserError | None = None  # ends the set-up before anything was changed
        self._changing = False
        # No host changes anything before it is clear that no other command works on the cluster.
        self._leases: dict[str, Lease] = {}
        self._not_renewed: dict[str, LeaseLostError] = {}
        self._guarding: set[str] = set()
        self._may_change = asyncio.Event()
        self._looked: dict[str, asyncio.Event] = {host.name: asyncio.Event() for host in request.hosts}

    def _waited_to_send(self, host: str, seconds: float) -> None:
        if host in self.runners:
            self.runners[host].waited += seconds

    def _row_changed(self, row: HostReport) -> None:
        self.watch(row)  # looked up late: the watcher is made from our rows

    @property
    def step_names(self) -> tuple[str, ...]:
        """Columns of the table, in order."""
        stages = tuple(stage.name for stage in self.request.stages)
        return (LOGIN, "check", *(step.name for step in STEPS), *stages)

    @property
    def sessions(self) -> dict[str, Session]:
        """Open connections by host, the head's among them."""
        runners = [*self.runners.values(), *([self.observed] if self.observed else [])]
        return {runner.host.name: runner.session for runner in runners if runner.session is not None}

    def is_head(self, runner: HostRunner) -> bool:
        """Return whether a host is the head."""
        return runner.host.name == self.request.cluster.head_host.name

    @property
    def head_runner(self) -> HostRunner:
        """The head's runner, also where the head is only looked at."""
        runner = self.runners.get(self.request.cluster.head_host.name) or self.observed
        assert runner is not None
        return runner

    @property
    def head_session(self) -> Session:
        """The connection to the head."""
        return self.head_runner.connected

    @property
    def alive(self) -> dict[str, HostRunner]:
        """Hosts that have not failed."""
        return {name: runner for name, runner in self.runners.items() if runner.report.failure is None}

    async def run(self) -> Report:
        """Take all hosts through and return the report. Where one host fails, the others finish.

        Raises:
            ClusterLockedError: another command works on the cluster; nothing was changed.
            UserError: a key or an answer is missing that all hosts need; nothing was changed.
        """
        began = time.monotonic()
        everybody = [*self.runners.values(), *([self.observed] if self.observed else [])]
        try:
            self._tasks = {runner.host.name: asyncio.create_task(self._host(runner)) for runner in everybody}
            endings = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            if self._refused is not None:
                raise self._refused
            if self.report.stopped:
                for runner in self.alive.values():
                    if State.WAITING in runner.report.states.values():
                        self._stopped(runner)
            for ending in endings:
                if isinstance(ending, BaseException) and not self.report.stopped:
                    raise ending
            if not self.request.dry and not self.report.stopped:
                await self._finish()
        finally:
            await asyncio.shield(release(self._leases.values()))
            former = [session for runner in everybody for session in runner.former]
            await asyncio.gather(
                *(session.close() for session in [*former, *self.sessions.values()]), return_exceptions=True
            )
            for runner in everybody:
                with contextlib.suppress(OSError):
                    runner.log.close()
            self.report.wall_seconds = time.monotonic() - began
        return self.report

    async def _finish(self) -> None:
        head = self.head_runner
        for stage in self.request.stages:
            try:
                await stage.finish(self)
            except Exception as error:
                self.fail(
                    head if head is not self.observed else next(iter(self.runners.values())),
                    head.unexpected_failure(error),
                )

    # -- one host ---------------------------------------------------------------------------------------------------

    async def _host(self, runner: HostRunner) -> None:
        """Take one host from end to end. Only look at a head that --limit or --exclude leaves out."""
        failure: StepFailedError | None = None
        try:
            await self._with_retries(runner, self._observe_head if runner is self.observed else self._set_up)
        except StepFailedError as error:
            failure = error
        except UserError as error:  # of the connection: see HostRunner.timed
            failure = StepFailedError(LOGIN, str(error))
            self._refuse(runner, error)
        except asyncio.CancelledError:
            if not (self._refused or self.report.stopped):
                raise
            self._stopped(runner)
        except Exception as error:
            failure = runner.unexpected_failure(error)
        finally:
            await self._let_others_go_on(runner, failure)
            if failure is not None and runner is not self.observed:
                self.fail(runner, failure)

    async def _let_others_go_on(self, runner: HostRunner, failure: StepFailedError | None) -> None:
        if (looked := self._looked.get(runner.host.name)) is not None:
            looked.set()
        if self.is_head(runner):
            self._may_change.set()
            if failure is not None:
                await self.head.fail(failure)

    def _refuse(self, runner: HostRunner, error: UserError) -> None:
        """End the whole set-up where nothing was changed yet; otherwise it is the host's own failure."""
        if not self._changing:
            self._refused = self._refused or error
            self._cancel(besides=runner)
        elif self.is_head(runner) and isinstance(error, ClusterLockedError):
            self._stop(str(error))

    def _cancel(self, besides: HostRunner | None = None) -> None:
        for name, task in self._tasks.items():
            if besides is None or name != besides.host.name:
                task.cancel()

    def _stop(self, reason: str) -> None:
        """Stop all hosts in the middle; the report says where each one is."""
        if not self.report.stopped:
            self.report.stopped = reason
            self.note(f"stopped: {reason}")
            self._cancel()

    def _stopped(self, runner: HostRunner) -> None:
        if self.report.stopped and runner is not self.observed:
            what = f"stopped in the middle: {self.report.stopped}"
            self.fail(
                runner, StepFailedError(runner.current, what, fix="when that is done, run the same command again")
            )

    def _lease_lost(self, host: str, error: LeaseLostError) -> None:
        if error.taken:
            self._stop(str(error))
        elif host in self._guarding:
            self._not_renewed[host] = error
            self._tasks[host].cancel()
        else:  # the host is done, or will connect and take the lease again
            self.note(str(error))

    async def _guarded(self, runner: HostRunner, work: Callable[[HostRunner], Awaitable[None]]) -> None:
        """Do the work. A lease that cannot be renewed ends it like a lost connection."""
        self._guarding.add(runner.host.name)
        try:
            await work(runner)
        except asyncio.CancelledError:
            error = self._not_renewed.pop(runner.host.name, None)
            task = asyncio.current_task()
            if error is None or self.report.stopped or task is None:
                raise
            task.uncancel()
            raise StepFailedError(runner.current, str(error), kind=ErrorKind.LOST) from None
        finally:
            self._guarding.discard(runner.host.name)

    async def _observe_head(self, head: HostRunner) -> None:
        async with head.timed(LOGIN):
            head.session = await self.connect(head.host)
            await self._take_lease(head)
            head.facts = await self._look(head.connected)
        self._may_change.set()
        if not self.request.dry:
            for stage in self.request.stages:
                await stage.observe(self, head)

    async def _with_retries(self, runner: HostRunner, work: Callable[[HostRunner], Awaitable[None]]) -> None:
        """Take a host through, and again from its connection on where that failed. Raises StepFailedError."""
        most = self.request.retries
        for tries in range(1, most + 1):
            try:
                await self._guarded(runner, work)
            except StepFailedError as failure:
                if not failure.transient:
                    raise
                wait = min(self.request.retry_wait * 2 ** (tries - 1), LONGEST_WAIT_S)
                await self._let_others_go_on(runner, None)  # it compares itself when it comes back
                what = f"{failure.step}: {failure.message.splitlines()[0]}"
                runner.log.heading(f"{what}; again in {wait:g} s ({tries} of {most})")
                self.note(f"{runner.host.name}: tried again ({tries} of {most}) after {what}")
                runner.reset_for_retry()
                runner.show(LOGIN, State.RUNNING, f"{what}; again in {wait:g} s ({tries} of {most})")
                await asyncio.sleep(wait)
            else:
                return
        await self._guarded(runner, work)

    async def _take_lease(self, runner: HostRunner) -> None:
        """Take the host's lease. Raises ClusterLockedError or HostError."""
        if self.owner is None or self.request.dry:
            return
        name = runner.host.name
        if name not in self._leases:
            self._leases[name] = Lease(self.owner, lambda error: self._lease_lost(name, error))
        await self._leases[name].take(runner.connected)

    async def _set_up(self, runner: HostRunner) -> None:
        async with runner.timed(LOGIN):
            runner.session = await self.connect(runner.host)
            if self.is_head(runner):
                await self._take_lease(runner)
                self._may_change.set()
        runner.show(LOGIN, State.OK)
        async with runner.timed("check"):
            runner.facts = await self._look(runner.connected)
            judged = (runner.host, runner.facts, self.request.cluster, self.request.needs)
            self._refuse_unfit([*judge_host(*judged), *judge_gpus(*judged)], runner)
        self._looked[runner.host.name].set()
        runner.show("check", State.OK)
        await self._may_change.wait()
        if not self.is_head(runner):
            # The head may be down, or part of another cluster too: so each host that is changed has its own lease.
            async with runner.timed(LOGIN):
                await self._take_lease(runner)
            runner.show(LOGIN, State.OK)
        self._changing = self._changing or not self.request.dry
        await self._send_bundle(runner)
        await runner.run_steps(STEPS, self.request.desired)
        if self.request.dry:
            await self._plan_stages(runner)
            return
        await self._compare(runner)
        for stage in self.request.stages:
            await stage.run(self, runner)

    async def _send_bundle(self, runner: HostRunner) -> None:
        bundle = self.request.bundle
        if bundle is None or self.request.dry:
            return
        async with runner.timed("check"):
            system = f"{runner.facts.os.id}-{runner.facts.os.version}"

            def tell(sent: int) -> None:
                runner.show("check", State.RUNNING, f"packages of the bundle: {sent >> 20} MiB")

            await send(runner.connected, bundle, system, on_bytes=tell, slot=self.uploads.slot)
            runner.show("check", State.OK)

    async def _plan_stages(self, runner: HostRunner) -> None:
        if (head := self._looked.get(self.request.cluster.head_host.name)) is not None:
            await head.wait()  # what a worker's Ray needs depends on the head's
        for stage in self.request.stages:
            titles = stage.plan(self, runner)
            runner.report.changes += titles
            runner.show(stage.name, State.PLANNED if titles else State.OK, f"{len(titles)} to do" if titles else "")

    async def _compare(self, runner: HostRunner) -> None:
        """Wait until all hosts have been looked at, then compare clocks, names and machine ids."""
        await asyncio.gather(*(event.wait() for event in self._looked.values()))
        facts = {name: other.facts for name, other in self.runners.items() if other.facts.hostname}
        async with runner.timed("check"):
            self._refuse_unfit((f for f in judge_cluster(facts, Needs()) if f.host == runner.host.name), runner)
            runner.show("check", State.OK)

    def _refuse_unfit(self, findings: Iterable[Finding], runner: HostRunner) -> None:
        for finding in findings:
            if finding.check in LEFT_TO_STEPS:
                continue
            if finding.level is Level.FAIL:
                raise StepFailedError("check", f"{finding.check}: {finding.message}", fix=finding.fix)
            if finding.level is Level.WARN:
                self.note(f"{runner.host.name}: {finding.message}" + (f" ({finding.fix})" if finding.fix else ""))

    def note(self, text: str) -> None:
        """Add a remark to the report, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)

    def fail(self, runner: HostRunner, failure: StepFailedError) -> None:
        """Record a host's failure. Nothing more is done on it."""
        row, masked = runner.report, runner.log.masked
        failure.message, failure.lines = masked(failure.message), [masked(line) for line in failure.lines]
        row.failure = failure
        for step, state in row.states.items():
            if state is State.WAITING:
                row.states[step] = State.SKIPPED
        with contextlib.suppress(OSError):  # a full disk here; the report has it
            runner.log.heading(f"FAILED at {failure.step}: {failure.message}")
        runner.show(failure.step, State.FAILED, failure.message)

    async def _look(self, session: Session) -> Facts:
        return await gather(session, probe_request(self.request.cluster, session.host))


def probe_request(cluster: Cluster, host: Host) -> ProbeRequest:
    """Return which facts setup reads of a host."""
    head = cluster.head_host
    return ProbeRequest(
        storage=cluster.storage,
        paths=probed_paths(cluster),
        packages=PROBED_PACKAGES,
        files=(*PROBED_FILES, token_file(cluster.name)),
        ports=tuple(Ports().listening(head=host.name == head.name).values()),
        head_address=head.private_address or head.target,
        commands=tuple(dict.fromkeys((*ProbeRequest().commands, *PROBED_COMMANDS))),
    )
