"""What is copied of a cluster's runs says how far a supervised start has come; scripts run in this machine's shell."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
from localsession import LocalSession
from run_writer import RunWriter

from clusterkit.backends.ray.files import listing
from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.jobs import RayJob
from clusterkit.backends.ray.mirror import Copies, _is_record
from clusterkit.backends.ray.overviews import fetch_overviews
from clusterkit.backends.ray.storage import fetch_records
from clusterkit.evaluate import job
from clusterkit.evaluate.process import EvalOutputParser
from clusterkit.evaluate.request import SubmittedEval
from clusterkit.hosts.model import Cluster, Host
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.status import observe
from clusterkit.ssh.api import ErrorKind, HostError, Result, Session
from clusterkit.ssh.selection import Selection
from trainer.errors import RunError, UserError


class Unprivileged(LocalSession):
    async def run(
        self,
        script: str,
        *,
        root: bool = False,
        stdin: bytes = b"",
        timeout: float = 60.0,
        on_output: Callable[[str], None] | None = None,
    ) -> Result:
        return await super().run(script, stdin=stdin, timeout=timeout, on_output=on_output)

    @asynccontextmanager
    async def stream(self, script: str, *, root: bool, timeout: float) -> AsyncIterator[SimpleNamespace]:
        process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=subprocess.PIPE)
        assert process.stdout is not None

        async def nothing() -> None:
            """There is no input."""

        read = partial(process.stdout.read, 1 << 16)
        yield SimpleNamespace(
            write_eof=nothing, read=read, wait=process.wait, errors=SimpleNamespace(last_lines=lambda: "")
        )


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("slot-a\n")


@pytest.fixture
def there(tmp_path: Path) -> RunDirectory:
    """A run in its supervised start, before the first recover checkpoint of that."""
    run = RunDirectory(tmp_path / "there", "user", "read", "run1")
    for path in (
        run.config,
        run.metrics,
        run.logs / "supervised" / "metrics.jsonl",
        run.logs / "supervised" / "main.log",
    ):
        write(path)
    return run


def copied(there: RunDirectory, folder: Path) -> RunDirectory:
    asyncio.run(fetch_records(cast("Session", Unprivileged()), str(there.fileroot), "user", "read", folder))
    return RunDirectory(folder, "user", "read", "run1")


def test_a_copy_says_whether_a_supervised_start_has_begun_and_is_done(there: RunDirectory, tmp_path: Path) -> None:
    assert not copied(there, tmp_path / "a").keeps_supervised

    write(there.recover / "supervised" / "LATEST")
    begun = copied(there, tmp_path / "b")
    assert begun.keeps_supervised
    assert not begun.has_supervised_checkpoint
    assert not begun.has_recover_checkpoint

    write(there.logs / "supervised" / "start.json")
    assert copied(there, tmp_path / "c").has_supervised_checkpoint


def test_overviews_have_what_the_closing_evaluation_is_expected_to_take(there: RunDirectory, tmp_path: Path) -> None:
    there.before.write_text('[{"chunks": 0, "seconds": 30.0}]')
    session = cast("Session", Unprivileged())
    asyncio.run(fetch_overviews(session, str(there.fileroot), "user", tmp_path / "a"))

    assert RunDirectory(tmp_path / "a", "user", "read", "run1").measured_before() == [{"chunks": 0, "seconds": 30.0}]


def test_its_progress_is_noticed_and_its_own_numbers_are_not_brought(there: RunDirectory) -> None:
    def records() -> set[str]:
        head = Head(cast("Session", Unprivileged()), Cluster(name="lab", hosts=(Host(name="here"),)), "")
        return {name for name in asyncio.run(listing(head, there))[0] if _is_record(name)}

    assert records() == {"config.yaml"}
    write(there.recover / "supervised" / "LATEST")
    write(there.logs / "supervised" / "start.json")
    assert records() == {"config.yaml", "supervised/LATEST", "supervised/start.json"}


def test_a_refused_evaluation_leaves_nothing_there_but_what_belongs_to_answers(tmp_path: Path) -> None:
    head = Head(cast("Session", Unprivileged()), Cluster(name="lab", hosts=(Host(name="here"),)), "")

    def left(output: Path, *others: str) -> list[str]:
        for name in ("logs/job.log", *others, "logs/job.yaml"):
            write(output / name)
        os.utime(output / "logs" / "job.yaml", (1, 1))
        asyncio.run(job.remove_refused(head, SubmittedEval("job", str(output), str(output / "logs" / "job.log"), "")))
        return sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())

    assert left(tmp_path / "none") == []
    assert list((tmp_path / "none").iterdir()) == [], "the folder may have been there before"
    write(tmp_path / "unasked" / "logs" / "job.log")
    asyncio.run(
        job.remove_refused(
            head, SubmittedEval("job", str(tmp_path / "unasked"), f"{tmp_path}/unasked/logs/job.log", "")
        )
    )
    assert (tmp_path / "unasked" / "logs" / "job.log").exists(), "without its request nothing is known of it"
    assert left(tmp_path / "others", "logs/other.log") == ["logs/other.log"]
    answered = ["logs/job.log", "logs/job.yaml", "records/a/samples.jsonl"]
    assert left(tmp_path / "answered", "records/a/samples.jsonl") == answered
    os.utime(tmp_path / "answered" / "records" / "a" / "samples.jsonl", (0, 0))
    asyncio.run(
        job.remove_refused(
            head, SubmittedEval("job", str(tmp_path / "answered"), f"{tmp_path}/answered/logs/job.log", "")
        )
    )
    assert not (tmp_path / "answered" / "logs").exists(), "its answers are those of an earlier one"


def reached(monkeypatch: pytest.MonkeyPatch, follow_output: Callable[..., object]) -> None:
    """A head that is reached, and a job that is followed by this."""

    @asynccontextmanager
    async def here(_: object) -> AsyncIterator[Head]:
        yield Head(cast("Session", Unprivileged()), Cluster(name="lab", hosts=(Host(name="here"),)), "")

    monkeypatch.setattr(job, "follow_output", follow_output)
    monkeypatch.setattr(job, "head_of", here)


@pytest.mark.parametrize(
    ("events", "code", "left"),
    [
        ([2, 2], 1, []),
        ([], 0, []),  # there is no checkpoint
        ([2, 1], 1, ["job.log", "job.yaml", "watch/a.yaml"]),  # the log says why one failed
        ([], 1, ["job.log", "job.yaml", "watch/a.yaml"]),  # it failed itself
    ],
)
def test_a_watch_all_of_whose_evaluations_are_refused_leaves_nothing_there(
    events: list[int], code: int, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "out" / "logs"
    for name in ("job.log", "job.yaml", "watch/a.yaml"):
        write(logs / name)
    os.utime(logs / "job.yaml", (1, 1))

    async def ended(_: object, __: object, parser: EvalOutputParser, *___: object) -> RayJob:
        for number, one in enumerate(events):
            event = {"watch": "failed", "checkpoint": f"/c/{number}", "code": one}
            parser.feed(json.dumps(event).encode() + b"\n")
        return RayJob("job", "FAILED" if code else "SUCCEEDED", f"failed with exit code {code}")

    reached(monkeypatch, ended)
    submitted = SubmittedEval("job", str(logs.parent), str(logs / "job.log"), "")
    with pytest.raises(UserError, match=r"could not be scored|no checkpoint yet|exit code 1"):
        asyncio.run(job.follow_watch(cast("Selection", None), submitted, tmp_path, print, print))
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*.*")) == left
    assert logs.exists() == bool(left)


@pytest.mark.parametrize("gone", [True, False])
def test_who_follows_a_refused_evaluation_second_is_told_that_its_log_is_gone(
    gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> RayJob:
        return RayJob("job-1", "FAILED", "Job entrypoint command failed with exit code 2")

    reached(monkeypatch, refused)
    log = tmp_path / "job-1.log"
    if not gone:
        write(log)
    submitted = SubmittedEval("job-1", str(tmp_path), str(log), "")
    told = "its log is gone: that of a refused evaluation is removed" if gone else f"its log is {log}$"
    with pytest.raises(UserError, match=rf"^job job-1 ended \(FAILED\): .*exit code 2; {told}") as error:
        asyncio.run(job.follow(cast("Selection", None), submitted, tmp_path, print))
    assert error.value.exit_code == 2
    with pytest.raises(RunError, match=told):
        asyncio.run(job.follow_watch(cast("Selection", None), submitted, tmp_path, print, print))

    async def not_begun(*_: object) -> RayJob:
        return RayJob("job-1", "FAILED", "The job supervisor was not started")

    reached(monkeypatch, not_begun)
    with pytest.raises(RunError, match=f"not started; its log is {log}$"):
        asyncio.run(job.follow(cast("Selection", None), submitted, tmp_path, print))


def test_a_refusal_is_told_where_the_head_is_lost_before_it_is_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_: object, __: object, parser: EvalOutputParser, ___: object) -> RayJob:
        parser.feed(b"error: no such data set\n")
        return RayJob("job", "FAILED", "Job entrypoint command failed with exit code 2")

    def lost(_: object) -> NoReturn:
        raise HostError("here", ErrorKind.UNREACHABLE, "no route")

    monkeypatch.setattr(job, "follow_output", refused)
    monkeypatch.setattr(job, "head_of", lost)
    selection = cast("Selection", None)
    with pytest.raises(UserError, match="no such data set"):
        asyncio.run(job.follow(selection, SubmittedEval("job", "/out", "/out/logs/job.log", ""), tmp_path, print))


def test_a_cluster_whose_clock_is_behind_does_not_make_its_run_stalled(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "there")
    writer.clock -= 3600.0 + 8.0
    writer.attempt().steps(1, 2)  # by a clock that is an hour behind, this very moment
    (tmp_path / "date").write_text("#!/bin/sh\nPATH=/usr/bin:/bin exec date -d '-1 hour' \"$@\"\n")
    (tmp_path / "date").chmod(0o755)
    session = Unprivileged(environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    cluster = Cluster(name="lab", hosts=(Host(name="here"),))
    copies = Copies(cast("Selection", SimpleNamespace(cluster=cluster)), tmp_path / "copy", str(tmp_path / "there"))
    local = replace(writer.run, fileroot=tmp_path / "copy")
    asyncio.run(copies.update(Head(cast("Session", session), cluster, ""), local))

    seen = observe(local, time.time(), holder="job 1")
    assert seen.state == "running"
    assert seen.silence is not None
    assert seen.silence < 60
