"""`clusterkit eval --cluster`: start the evaluation there, or attach to it, follow it, and copy its results here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import typer

from clusterkit.backends.ray.head import Head, head_of
from clusterkit.cli.actions.target import Kind, Typed, checked_user, target, told
from clusterkit.evaluate.job import SubmittedEval, copy_results, follow, newest_results, submit
from clusterkit.evaluate.job import stop as end_evaluation
from clusterkit.evaluate.process import Finished
from clusterkit.evaluate.remote import EvalArguments, copied_from, output_folder, remote_request
from clusterkit.evaluate.remote_watch import follow_watch
from clusterkit.evaluate.watch import show_scored
from clusterkit.runs.directory import FILEROOT
from clusterkit.ssh.api import HostError
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from clusterkit.ui import output
from evaluation.config import EvalConfig, WatchConfig
from evaluation.steps import keep_scores
from trainer.disk import file_failures
from trainer.errors import InterruptedRunError, RunError

T = TypeVar("T")
Say = Callable[[str], None]


def evaluate_on(cluster: str, wanted: EvalArguments, *, detach: bool, as_json: bool, say: Say) -> Finished | None:
    """Do what `clusterkit eval --cluster` says; None for an evaluation that was detached from.

    Raises:
        UserError: with its subclasses, with what to do.

    """
    selection = select(HostOptions(cluster=cluster))
    source: Path | None = None

    async def begin(head: Head) -> SubmittedEval:
        nonlocal source
        request = await remote_request(head, wanted, say)
        source = copied_from(head, wanted, request)
        return await submit(head, request, say)

    try:
        asked = _with_head(selection, begin)
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted: what is copied stays there; the same command goes on") from None
    output.note(
        f"{'it runs already' if asked.attached else 'it runs'}, as job {asked.submission_id}. Folder on the cluster: "
        f"{asked.output}"
    )
    watches = bool(wanted.watch)
    if detach:
        if as_json:
            output.result_json(asked.as_dict())
        output.note(_how_to_go_on(cluster, wanted.output_path))
        return None
    try:
        here = copy_of(cluster, wanted.output_path)
        if watches:
            _do(follow_watch(selection, asked, here, say, lambda place: show_scored(place, as_json)))
            return None
        finished = _do(follow(selection, asked, here, say))
        if source is not None:  # the run's report is here
            with file_failures(source, FILEROOT):
                keep_scores({**finished.results, "model_path": str(source)}, finished.folder)
        return finished
    except KeyboardInterrupt:
        output.note(f"detached: it goes on, as job {asked.submission_id}\n{_how_to_go_on(cluster, wanted.output_path)}")
        raise typer.Exit(0) from None


def planned(cluster: str, wanted: EvalArguments) -> EvalConfig | WatchConfig:
    """What would be asked there; nothing is copied or started."""
    return _with_head(
        select(HostOptions(cluster=cluster)), lambda head: remote_request(head, wanted, lambda _: None, change=False)
    )


def copy_of(cluster: str, output_path: str) -> Path:
    """Where the results of a cluster's evaluations are copied to: beside those of this machine, by its name."""
    typed = PurePosixPath(output_path)
    return Path(typed.name if typed.is_absolute() else typed).absolute() / cluster


def fetch_newest(cluster: str, output_path: str, into: Path) -> Path:
    """Copy the latest results of a cluster; their folder here. Raises UserError where there are none."""

    async def fetch(head: Head) -> Path:
        folder = output_folder(head, output_path)
        return await copy_results(head, folder, await newest_results(head, folder), into)

    return _with_head(select(HostOptions(cluster=cluster)), fetch)


def stop(cluster: str | None, output_path: str, user: str | None) -> None:
    """End the evaluation that writes into a folder there. Raises RunError where none does."""
    place, whose = told(target(Kind.ON_A_CLUSTER, Typed(cluster))), checked_user(user)
    assert place is not None
    said = _with_head(
        select(HostOptions(cluster=place)),
        lambda head: end_evaluation(head, output_folder(head, output_path, whose), output.note, whose),
    )
    output.result(said)


def _with_head(selection: Selection, work: Callable[[Head], Awaitable[T]]) -> T:
    async def do() -> T:
        async with head_of(selection) as head:
            return await work(head)

    return _do(do())


def _do(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except HostError as error:
        raise RunError(str(error)) from error


def _how_to_go_on(cluster: str, output_path: str) -> str:
    return "\n".join(
        [
            "  follow it       the same command again, which also copies the results here",
            f"  look at answers clusterkit eval show {output_path} --cluster {cluster}, once it has ended",
            f"  end it          clusterkit eval stop --cluster {cluster} --output-path {output_path}",
        ]
    )
