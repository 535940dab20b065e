"""`clusterkit eval --cluster --watch`: which run is watched there, and what is shown here of what its job does."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from clusterkit.backends.ray.follow import watch_job
from clusterkit.backends.ray.storage import read_from
from clusterkit.evaluate.job import SubmittedEval, copy_results
from trainer.errors import InterruptedRunError, RunError, UserError

if TYPE_CHECKING:
    from clusterkit.backends.ray.head import Head
    from clusterkit.backends.ray.jobs import RayJob
    from clusterkit.ssh.selection import Selection

Say = Callable[[str], None]


@dataclass
class JobOutputParser:
    """What the job prints: its lines are handed on, what was scored waits in `scored` to be copied."""

    say: Say
    scored: deque[str] = field(default_factory=deque)
    failed: list[str] = field(default_factory=list)
    count: int = 0
    error: str = ""
    _results: str = ""
    _rest: str = ""

    def feed(self, data: bytes) -> None:
        """Take what was printed since."""
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if line.startswith('{"results": '):
                self._results = PurePosixPath(json.loads(line)["results"]).name
            elif line.startswith('{"watch": '):
                self._event(json.loads(line))
            else:
                self.error = line.removeprefix("error: ") if line.startswith("error: ") else self.error
                self.say(line)

    def _event(self, event: dict[str, Any]) -> None:
        name = Path(event.get("checkpoint", "")).name
        if event["watch"] == "scoring":
            self._results = ""
            self.say(f"scoring {name}")
        elif event["watch"] == "lost":
            self.say(f"the evaluation was lost: {event['reason']}")
        elif event["watch"] != "ended":
            self.count += 1
            if event["watch"] == "failed":
                self.failed.append(name)
                self.say(f"{name} could not be scored (code {event['code']})")
            if self._results:  # an incomplete one has results, too
                self.scored.append(self._results)


async def follow_watch(
    selection: Selection, asked: SubmittedEval, here: Path, say: Say, show: Callable[[Path], None]
) -> None:
    """Show what is scored, copied to `here`, until the job ends.

    show: gets the folder of every checkpoint's results.

    Raises:
        UserError: with the subclass that fits how it ended.

    """
    told, read = JobOutputParser(say), 0

    async def look(head: Head, job: RayJob) -> None:  # noqa: ARG001 (as watch_job calls it)
        nonlocal read
        while data := await read_from(head.session, Path(asked.log), read):
            read += len(data)
            told.feed(data)
        while told.scored:
            place = await copy_results(head, asked.output, told.scored[0], here)
            told.scored.popleft()  # not before it is here: a connection may be lost meanwhile
            show(place)

    job = await watch_job(selection, asked.submission_id, look, say)
    if job.status == "STOPPED" or "exit code 130" in job.message:
        raise InterruptedRunError("the watch was stopped: what is answered is written; the same command goes on")
    if told.failed:
        raise RunError(f"{len(told.failed)} checkpoints could not be scored: {', '.join(told.failed)}")
    if job.status != "SUCCEEDED":
        reason = " ".join(job.message.split())[-400:]
        raise RunError(told.error or f"job {job.submission_id} ended ({job.status}): {reason}; its log is {asked.log}")
    if not told.count:
        raise UserError("the run has no checkpoint yet (epoch…globalstepN)")
    say(f"{told.count} checkpoints are scored")
