"""`clusterkit eval --cluster --watch`: what is shown here of what its job does."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from clusterkit.backends.base import Say
from clusterkit.evaluate.job import copy_results, follow_output
from clusterkit.evaluate.process import EvalOutputParser
from clusterkit.evaluate.request import SubmittedEval
from trainer.errors import InterruptedRunError, RunError, UserError

if TYPE_CHECKING:
    from clusterkit.backends.ray.head import Head
    from clusterkit.ssh.selection import Selection


class JobOutputParser(EvalOutputParser):
    """What the job prints: its lines are handed on, what was scored waits in `scored` to be copied."""

    def __init__(self, say: Say) -> None:
        super().__init__(say)
        self.scored: deque[str] = deque()
        self.failed: list[str] = []
        self.count = 0

    def take(self, line: str) -> None:
        """Take a line; what one evaluation says of its error is one of many."""
        if line.startswith('{"watch": '):
            self._event(json.loads(line))
        elif line.startswith('{"results": '):
            super().take(line)
        else:
            self.error = line.removeprefix("error: ") if line.startswith("error: ") else self.error
            self.say(line)

    def _event(self, event: dict[str, Any]) -> None:
        name = Path(event.get("checkpoint", "")).name
        if event["watch"] == "scoring":
            self.answer = None
            self.say(f"scoring {name}")
        elif event["watch"] == "lost":
            self.say(f"the evaluation was lost: {event['reason']}")
        elif event["watch"] != "ended":
            self.count += 1
            if event["watch"] == "failed":
                self.failed.append(name)
                self.say(f"{name} could not be scored (code {event['code']})")
            if self.answer is not None:  # an incomplete one has results, too
                self.scored.append(PurePosixPath(self.answer["results"]).name)


async def follow_watch(
    selection: Selection, submitted: SubmittedEval, local: Path, say: Say, show: Callable[[Path], None]
) -> None:
    """Show what is scored until the job ends.

    Args:
        selection: how to reach the cluster.
        submitted: the job.
        local: folder that results are copied to.
        say: gets what the job prints.
        show: gets the folder of every checkpoint's results.

    Raises:
        UserError: with the subclass that fits how it ended.
    """
    parser = JobOutputParser(say)

    async def copy(head: Head) -> None:
        while parser.scored:
            folder = await copy_results(head, submitted.output, parser.scored[0], local)
            parser.scored.popleft()  # not before it is here: a connection may be lost meanwhile
            show(folder)

    job = await follow_output(selection, submitted, parser, say, copy)
    if job.status == "STOPPED" or "exit code 130" in job.message:
        raise InterruptedRunError("the watch was stopped: what is answered is written; the same command goes on")
    if parser.failed:
        raise RunError(f"{len(parser.failed)} checkpoints could not be scored: {', '.join(parser.failed)}")
    if job.status != "SUCCEEDED":
        reason = " ".join(job.message.split())[-400:]
        raise RunError(
            parser.error or f"job {job.submission_id} ended ({job.status}): {reason}; its log is {submitted.log}"
        )
    if not parser.count:
        raise UserError("the run has no checkpoint yet (epoch…globalstepN)")
    say(f"{parser.count} checkpoints are scored")
