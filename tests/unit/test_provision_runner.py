"""One host's way through the steps: what is changed, what is left alone, and how a failure is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
from localsession import LocalSession
from rich.console import Console

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps.step import Action, DesiredState, Refused, Step
from clusterkit.setup import runner as runner_module
from clusterkit.setup.hostlog import HostLog
from clusterkit.setup.model import HostReport, Milestones, Report, State, StepFailedError
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.view import summary, table
from clusterkit.ssh.api import Session

HOST = Host(name="one")
WISH = DesiredState(Cluster(hosts=(HOST,)))


@dataclass
class Line:
    """Wants a file to hold a line. `script`: what is run to get there, for the tests of failures."""

    file: Path
    text: str
    script: str = ""
    name: str = "line"
    retries: int = 0
    timeout: float = 20.0

    def plan(self, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
        if facts.files.get(str(self.file)) == self.text:
            return ()
        script = self.script or f"cat > {self.file}"
        action = Action(f"write {self.file.name}", script, self.text.encode(), self.timeout, self.retries)
        return (action,)


class Refusing:
    name = "refusing"

    def plan(self, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
        raise Refused("this cannot be", "do that")


def make_runner(tmp_path: Path, file: Path, *, dry: bool = False, secrets: tuple[str, ...] = ()) -> HostRunner:
    async def look(session: Session) -> Facts:
        return Facts(files={str(file): file.read_text()} if file.exists() else {})

    log = HostLog(tmp_path, HOST.name, secrets)
    runner = HostRunner(HOST, HostReport(HOST.name), log, look, lambda report: None, dry=dry)
    runner.session = LocalSession(HOST.name)
    return runner


def run(runner: HostRunner, steps: Sequence[Step]) -> None:
    asyncio.run(runner.run_steps(steps, WISH))


def failure(runner: HostRunner, steps: Sequence[Step]) -> StepFailedError:
    with pytest.raises(StepFailedError) as caught:
        run(runner, steps)
    return caught.value


def test_what_is_missing_is_done_once_and_told(tmp_path: Path) -> None:
    step = Line(tmp_path / "file", "hello")
    first = make_runner(tmp_path, step.file)
    run(first, [step])

    assert step.file.read_text() == "hello"
    assert (first.report.states, first.report.changes) == ({"line": State.CHANGED}, ["write file"])
    assert first.report.seconds["line"] > 0

    second = make_runner(tmp_path, step.file)
    second.facts = first.facts
    run(second, [step])
    assert (second.report.states, second.report.changes) == ({"line": State.OK}, [])


def test_a_dry_run_plans_and_writes_nothing(tmp_path: Path) -> None:
    step = Line(tmp_path / "file", "hello")
    runner = make_runner(tmp_path, step.file, dry=True)
    run(runner, [step])

    assert not step.file.exists()
    assert isinstance(runner.session, LocalSession)
    assert runner.session.scripts == []
    assert (runner.report.states, runner.report.changes) == ({"line": State.PLANNED}, ["write file"])


def test_a_failing_script_is_told_with_its_last_lines_and_kept_in_the_log(tmp_path: Path) -> None:
    step = Line(tmp_path / "file", "x", script="echo all is well; echo disk on fire >&2; exit 7")
    runner = make_runner(tmp_path, step.file)
    error = failure(runner, [step])

    assert (error.step, error.message) == ("line", "could not write file: exit code 7")
    assert error.lines == ["all is well", "disk on fire"]
    log = runner.log.path.read_text()
    assert "== line: write file" in log
    assert "disk on fire" in log
    assert "exit code 7" in log


def test_a_script_that_changes_nothing_is_no_success(tmp_path: Path) -> None:
    step = Line(tmp_path / "file", "x", script="true")
    error = failure(make_runner(tmp_path, step.file), [step])

    assert "everything ran and yet this is still to do: write file" in error.message


def test_what_may_pass_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_WAIT_S", 0.01)
    script = (
        f"cat >/dev/null; echo try >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) = 3 ]; printf x > {tmp_path}/file"
    )
    step = Line(tmp_path / "file", "x", script=script, retries=2)
    run(make_runner(tmp_path, step.file), [step])

    assert (tmp_path / "tries").read_text().count("try") == 3


def test_a_script_over_its_time_names_what_it_was(tmp_path: Path) -> None:
    step = Line(tmp_path / "file", "x", script="echo began; sleep 60", timeout=0.3)
    error = failure(make_runner(tmp_path, step.file), [step])

    assert "longer than 0.3 s" in error.message
    assert error.command == "write file"
    assert "began" in error.lines


def test_a_refusal_ends_the_host_with_its_way_out_and_later_steps_are_not_tried(tmp_path: Path) -> None:
    step = Line(tmp_path / "file", "x")
    error = failure(make_runner(tmp_path, step.file), [Refusing(), step])

    assert (error.step, error.message, error.fix) == ("refusing", "this cannot be", "do that")
    assert not step.file.exists()


def test_secrets_never_reach_the_log(tmp_path: Path) -> None:
    secret = "0123456789abcdef" * 2
    step = Line(tmp_path / "file", "x", script=f"cat > {tmp_path}/file; echo token is {secret}")
    runner = make_runner(tmp_path, step.file, secrets=(secret,))
    run(runner, [step])

    assert secret not in runner.log.path.read_text()
    assert "token is ********" in runner.log.path.read_text()
    assert runner.log.path.stat().st_mode & 0o077 == 0


def test_those_who_wait_for_the_head_go_on_or_fail_with_it() -> None:
    async def both() -> tuple[str, str]:
        points = Milestones("head1")
        early = asyncio.create_task(points.wait("storage", "shared"))
        late = asyncio.create_task(points.wait("ray", "ray"))
        await points.reach("storage")
        await early
        await points.fail(StepFailedError("image", "no space left"))
        await points.wait("storage", "shared")  # what was reached stays reached
        with pytest.raises(StepFailedError) as caught:
            await late
        return caught.value.step, caught.value.message

    assert asyncio.run(both()) == ("ray", "the head node head1 failed at image: no space left")


def test_of_a_host_that_failed_a_dry_run_does_not_say_that_nothing_is_to_do() -> None:
    failed, fine = HostReport("gone"), HostReport("fine")
    failed.failure = StepFailedError("connect", "no route to it")
    told = summary(Report({"gone": failed, "fine": fine}), ("connect",), dry=True).splitlines()
    assert "fine: nothing to do" in told
    assert not any(line.startswith("gone: ") for line in told)


def test_a_narrow_terminal_shows_each_host_s_step_in_place_of_all_columns() -> None:
    steps = ("connect", "check", "system", "packages", "docker", "toolkit", "daemon", "storage", "shared", "image")
    host = HostReport("gpu01", dict.fromkeys(steps, State.WAITING))
    host.states |= {"connect": State.OK, "check": State.OK, "system": State.CHANGED, "packages": State.RUNNING}
    host.details["packages"] = "installs git"

    def drawn(width: int) -> str:
        console = Console(width=width, file=StringIO())
        console.print(table([host], steps, width))
        return console.file.getvalue()

    assert "4/10 packages" in drawn(60)
    assert "installs git" in drawn(60)
    assert "packages  docker" in drawn(160)

    host.states |= {"packages": State.FAILED, **dict.fromkeys(steps[4:], State.SKIPPED)}
    told = summary(Report({"gpu01": host}), steps, dry=False, width=60).splitlines()
    assert told[0] == "gpu01  ok connect, check; changed system; FAILED packages;"
    assert max(map(len, told)) <= 60
    assert summary(Report({"gpu01": host}), steps, dry=False).startswith("host   connect  check  system")
