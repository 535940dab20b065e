"""Watch a submitted run from here until it ends; a lost connection is made again, the run does not notice."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterkit.backends.base import RunOutcome, SubmittedRun, completed, outcome_of_job
from clusterkit.backends.ray.head import Backoff, Head, head_of
from clusterkit.backends.ray.jobs import RayJob
from clusterkit.backends.ray.storage import fetch_records, read_from
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.final_evaluation import read_summary
from clusterkit.runs.log.metrics import History, MetricsTail
from clusterkit.ssh.api import HostError
from trainer.errors import RunError

if TYPE_CHECKING:
    from clusterkit.ssh.selection import Selection
    from clusterkit.ui.progress import Progress

POLL_SECONDS = 2.0


@dataclass
class Copy:
    """A run's records as far as they have been fetched: `history`, and the folder where they lie here."""

    remote: RunDirectory
    folder: Path

    def __post_init__(self) -> None:
        self.local = RunDirectory(self.folder, self.remote.user, self.remote.experiment, self.remote.trial)
        self.local.logs.mkdir(parents=True, exist_ok=True)
        self.history = History()
        self._tail = MetricsTail(self.local.metrics)
        self._offset = 0

    async def refresh(self, head: Head) -> list[dict[str, object]]:
        """Fetch what has been written since; the new records."""
        while data := await read_from(head.session, self.remote.metrics, self._offset):
            with self.local.metrics.open("ab") as file:
                file.write(data)
            self._offset += len(data)
        news = self._tail.read()
        self.history.extend(news)
        return news

    @property
    def size(self) -> int:
        """Bytes of metrics.jsonl that have been fetched."""
        return self._offset

    async def finish(self, head: Head) -> None:
        """Fetch the closing table."""
        run = self.remote
        await fetch_records(head.session, str(run.fileroot), run.user, run.experiment, self.folder, trial=run.trial)


async def watch_job(
    selection: Selection,
    submission_id: str,
    look: Callable[[Head, RayJob], Awaitable[None]],
    say: Callable[[str], None],
) -> RayJob:
    """Look at a job every few seconds until it has ended, and return it; a lost connection is made again.

    Args:
        look: called each time, the last time with the ended job.
        say: gets a sentence when the cluster cannot be seen.
    """
    patience = Backoff()
    while True:
        try:
            async with head_of(selection) as head, head.jobs() as jobs:
                while True:
                    job = await jobs.get(submission_id)
                    await look(head, job)
                    patience.reset()
                    if not job.alive:
                        return job
                    await asyncio.sleep(POLL_SECONDS)
        except (HostError, RunError) as error:
            first = str(error).splitlines()[0]
            say(f"cannot see the run for now ({first}); trying again; the run goes on without us")
            await patience.wait()


async def follow(selection: Selection, submitted: SubmittedRun, progress: Progress, again: str) -> RunOutcome:
    """See `Backend.follow`."""
    known = submitted.knows_records
    with tempfile.TemporaryDirectory(prefix="clusterkit-") as folder:
        copy = Copy(submitted.run, Path(folder))

        async def look(head: Head, job: RayJob) -> None:
            nonlocal known
            news = await copy.refresh(head)
            progress.show(copy.history, [] if known else news)
            known = False
            if not job.alive:
                await copy.finish(head)

        job = await watch_job(selection, submitted.submission_id, look, progress.say)
        ended = f"job {job.submission_id} ended ({job.status}): {' '.join(job.message.split())[-400:]}"
        done = job.status == "SUCCEEDED"
        return outcome_of_job(
            copy.history, done=done, ended=ended, summary=lambda: read_summary(copy.local), again=again
        )


async def closing(head: Head, run: RunDirectory) -> RunOutcome:
    """The outcome of a run that was complete before this command."""
    with tempfile.TemporaryDirectory(prefix="clusterkit-") as folder:
        copy = Copy(run, Path(folder))
        await copy.finish(head)
        return completed(copy.local)
