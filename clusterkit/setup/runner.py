"""Take one host through the steps: plan, apply, read the facts again, and require that nothing is left to do."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from clusterkit.hosts.model import Host
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.images.identity import ImageError
from clusterkit.provision.steps.step import Action, DesiredState, Refused, Step
from clusterkit.setup.hostlog import HostLog
from clusterkit.setup.model import HostReport, State, StepFailedError
from clusterkit.ssh.api import HostError, Session
from trainer.errors import UserError

RETRY_WAIT_S = 5.0
LOGIN = "connect"

WRITTEN = ("/", "/etc", "/var", "/var/lib", "/var/lib/docker", "/var/cache", "/usr", "/tmp", "/run", "/root")
"""Folders that actions write to."""

_DF = re.compile(r"(?P<source>.*\S)\s+(?P<size>\d+)\s+\d+\s+(?P<free>-?\d+)\s+\S+\s+(?P<mount>/.*)")

Look = Callable[[Session], Awaitable[Facts]]
"""Reads the host's facts."""

Watch = Callable[[HostReport], None]
"""Gets every row that changes."""


class HostRunner:
    """Takes one host through the steps, and writes its report and log."""

    def __init__(self, host: Host, report: HostReport, log: HostLog, look: Look, watch: Watch, *, dry: bool) -> None:
        self.host, self.report, self.log, self.look, self.watch, self.dry = host, report, log, look, watch, dry
        self.session: Session | None = None
        self.former: list[Session] = []  # connections of earlier tries
        self._changed: set[str] = set()
        self.facts = Facts()
        self.waited = 0.0  # seconds within its own steps that it waited for other hosts

    @property
    def connected(self) -> Session:
        """The session of a host that is connected."""
        assert self.session is not None
        return self.session

    def show(self, step: str, state: State, detail: str = "") -> None:
        """Set a cell of the row. A step that an earlier try has changed stays "changed"."""
        if state is State.OK and step in self._changed:
            state = State.CHANGED
        self.report.states[step] = state
        self.report.details[step] = detail
        self.watch(self.report)

    def reset_for_retry(self) -> None:
        """Prepare another try. The old connection stays open (`former`), since others may use it. The facts stay."""
        self.report.retries += 1
        self._changed |= {step for step, state in self.report.states.items() if state is State.CHANGED}
        if self.session is not None:
            self.former.append(self.session)
        self.session = None
        if self.dry:
            self.report.changes.clear()  # they are planned again
        self.report.states = dict.fromkeys(self.report.states, State.WAITING)

    @property
    def current(self) -> str:
        """The step that the host is in."""
        states = self.report.states
        running = [step for step, state in states.items() if state is State.RUNNING]
        waiting = [step for step, state in states.items() if state is State.WAITING]
        return (running or waiting or list(states) or [LOGIN])[0]

    def unexpected_failure(self, error: Exception) -> StepFailedError:
        """Return the failure for an unforeseen error, and write its traceback to the host's log."""
        lines = "".join(traceback.format_exception(error)).splitlines()
        with contextlib.suppress(OSError):  # a full disk here
            for line in lines:
                self.log.line(line)
        return StepFailedError(
            self.current,
            f"{type(error).__name__}: {error}",
            lines=lines,
            fix="this is a fault of clusterkit or of this machine; the log has the traceback. The others went on "
            "without this host: run the same command again for it",
        )

    @asynccontextmanager
    async def timed(self, step: str) -> AsyncIterator[None]:
        """Run a block as `step`: measure its time, and turn its errors into failures of the step.

        Raises:
            StepFailedError: for the errors of steps, images and connections.
            UserError: while connecting: a key or an answer is missing that all hosts need.
        """
        began, waited = time.monotonic(), self.waited
        self.show(step, State.RUNNING)
        try:
            yield
        except HostError as error:
            command = self.report.details.get(step, "")
            raise StepFailedError(
                step, error.message, command=command, lines=self.log.tail, fix=error.fix, kind=error.kind
            ) from error
        except Refused as refusal:
            raise StepFailedError(step, refusal.message, fix=refusal.fix) from refusal
        except ImageError as error:
            first, *rest = error.message.splitlines() or [""]
            raise StepFailedError(step, first, lines=rest, fix=error.fix) from error
        except UserError as error:
            if step == LOGIN:
                raise
            raise StepFailedError(step, str(error)) from error
        finally:
            own = time.monotonic() - began - (self.waited - waited)
            self.report.seconds[step] = self.report.seconds.get(step, 0.0) + own

    async def run_steps(self, steps: Sequence[Step], desired: DesiredState) -> None:
        """Run all steps in order. Raises StepFailedError."""
        for step in steps:
            async with self.timed(step.name):
                await self._step(step, desired)

    async def _step(self, step: Step, desired: DesiredState) -> None:
        actions = step.plan(self.facts, desired)
        if not actions:
            self.show(step.name, State.OK)
            return
        if self.dry:
            self.report.changes += [action.title for action in actions]
            self.show(step.name, State.PLANNED, f"{len(actions)} to do")
            return
        await self.apply(step.name, actions)
        self.facts = await self.look(self.connected)
        left = step.plan(self.facts, desired)
        if left:
            raise StepFailedError(
                step.name,
                f"everything ran and yet this is still to do: {'; '.join(action.title for action in left)}",
                lines=self.log.tail,
                fix="the log shows what was run; running setup again tries anew",
            )
        self.show(step.name, State.CHANGED, "")

    async def apply(self, step: str, actions: Sequence[Action]) -> None:
        """Run actions in order, each with its retries. Raises StepFailedError or HostError."""
        for number, action in enumerate(actions, 1):
            count = f" ({number}/{len(actions)})" if len(actions) > 1 else ""
            self.show(step, State.RUNNING, f"{action.title}{count}")
            await self._action(step, action)
            self.report.changes.append(action.title)

    async def _action(self, step: str, action: Action) -> None:
        for attempt in range(action.retries + 1):
            self.log.heading(f"{step}: {action.title}")
            result = await self.connected.run(
                action.script,
                root=True,
                stdin=action.stdin,
                timeout=action.timeout,
                on_output=self.log.line,
            )
            self.log.line(f"exit code {result.exit_code} after {result.seconds:.1f} s")
            if result.ok:
                return
            if attempt < action.retries:
                self.show(step, State.RUNNING, f"{action.title}: failed, trying again")
                await asyncio.sleep(RETRY_WAIT_S * (attempt + 1))
        lines = (result.stdout + result.stderr).splitlines()
        full = await full_disks(self.connected, (*WRITTEN, *self.facts.disks))
        raise StepFailedError(
            step,
            f"could not {action.title}: " + (f"the disk is full: {full}" if full else f"exit code {result.exit_code}"),
            command=action.title,
            lines=lines,
            fix="make room there (df -h; du -xh / | sort -h | tail; docker system df), then run the same command again"
            if full
            else "the log has the whole output; run the same command again when the cause is gone",
        )


async def full_disks(session: Session, paths: Iterable[str]) -> str:
    """Return the mount points of the paths' disks that have less than 1 MiB or no inode left, as text."""
    listed = shlex.join(dict.fromkeys(paths))
    # df fails for a missing path, and still prints the others.
    script = f"export LC_ALL=C\ntimeout 10 df -Pk {listed} || :\necho @inodes\ntimeout 10 df -Pi {listed} || :\n"
    blocks, _, inodes = (await session.run(script, root=True, timeout=30.0)).stdout.partition("@inodes\n")
    found: dict[str, str] = {}
    for text, least, unit in ((blocks, 1024, "KiB"), (inodes, 1, "inodes")):
        for line in text.splitlines():
            if (words := _DF.match(line)) and int(words["size"]) and int(words["free"]) < least:
                found.setdefault(words["mount"], f"{words['mount']} ({words['source']}, {words['free']} {unit} free)")
    return ", ".join(found.values())
