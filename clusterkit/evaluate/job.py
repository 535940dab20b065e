"""An evaluation as a job of a cluster's Ray: submitted once, followed, stopped; its results copied to this machine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import yaml

from clusterkit.backends.base import Say
from clusterkit.backends.ray.files import any_exists, run_checked
from clusterkit.backends.ray.follow import watch_job
from clusterkit.backends.ray.head import Head, head_of
from clusterkit.backends.ray.jobs import RayJob, RayJobs, next_id, origin, submit_or_attach
from clusterkit.backends.ray.storage import fetch_folders, put_code, read_from, read_whole
from clusterkit.common import text_plot
from clusterkit.evaluate.process import EvalOutputParser, Finished, WatchOutputParser
from clusterkit.evaluate.request import SubmittedEval
from clusterkit.runs.directory import user_name
from clusterkit.ssh.api import HostError
from evaluation.config import EvalConfig, WatchConfig
from evaluation.record import output_lock
from evaluation.results import RESULTS
from trainer.disk import file_failures
from trainer.errors import InterruptedRunError, RunError, UserError

if TYPE_CHECKING:
    from clusterkit.ssh.selection import Selection

KIND = "clusterkit-eval"
STOP_SECONDS = 120
"""So long an evaluation that is stopped may take to end its servers, until Ray kills it."""
POLL_SECONDS = 1.0
STARTS_WITHIN = 10.0
"""Seconds that Ray needs to start a job that it has room for."""
_EXIT_CODE = re.compile(r"exit code (\d+)")


async def submit(head: Head, request: EvalConfig | WatchConfig, say: Say) -> SubmittedEval:
    """Start the evaluation, or the watch over a run; where the very same one runs, attach to it.

    Raises:
        UserError: another one writes into the same folder. RunError: Ray refused. HostError: the head was lost.
    """
    async with head.jobs() as jobs:
        return await submit_or_attach(
            lambda: _submit(head, request, jobs, say),
            f"others keep submitting the same evaluation; look with clusterkit jobs {_place_options(head)}",
        )


async def _submit(head: Head, request: EvalConfig | WatchConfig, jobs: RayJobs, say: Say) -> SubmittedEval:
    config = request.evaluation if isinstance(request, WatchConfig) else request
    user, output = user_name(), config.output_path
    fingerprint = hashlib.sha256(json.dumps(request.model_dump(), sort_keys=True).encode()).hexdigest()[:16]
    known = [job for job in await jobs.all() if job.metadata.get("kind") == KIND]
    for job in known:
        if job.alive and job.metadata.get("output") == output:
            if job.user == user and job.metadata.get("fingerprint") == fingerprint:
                return SubmittedEval(
                    job.submission_id, output, job.metadata["log"], _place_options(head), attached=True
                )
            whose = "another" if job.user == user else f"{job.user}'s"
            raise UserError(
                f"{whose} evaluation writes into {output}, as job {job.submission_id}: wait for its end, end it with "
                f"clusterkit eval stop {_place_options(head)}, or choose another --out"
            )
    gpus = await _gpus(head, config)
    config = config.model_copy(update={"server": config.server.model_copy(update={"gpus": gpus})})
    watches = isinstance(request, WatchConfig)
    values = (request.model_copy(update={"evaluation": config}) if watches else config).model_dump()
    say("sending code and request")
    code = await put_code(head.session, head.cluster)
    name = PurePosixPath(output).name
    prefix = f"{user}-eval-{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}-{fingerprint[:8]}-"
    submission_id = next_id(prefix, known)
    request_file, log = (f"{output}/logs/{submission_id}.{end}" for end in ("yaml", "log"))
    await run_checked(head, f"umask 022; mkdir -p {shlex.quote(f'{output}/logs')}; rm -f {shlex.quote(log)}")
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    await head.session.put(text.encode(), request_file, root=True)
    for_gpus = f", for {text_plot.gpus(gpus)}{' while it scores' if watches else ''}" if gpus else ""
    say(f"submitting the job{for_gpus}")
    words = ["-m", "evaluation.watching", request_file] if watches else ["-m", "evaluation", request_file]
    await jobs.submit(
        submission_id,
        f"exec python3 {shlex.join(words)} >>{shlex.quote(log)} 2>&1",
        environment={
            "PYTHONPATH": code,
            "USER": user,
            "LOGNAME": user,
            "CLUSTERKIT_DATA": f"{head.cluster.storage}/datasets",
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
        },
        metadata={
            "kind": KIND,
            "user": user,
            "experiment": "eval",
            "trial": name,
            "fingerprint": fingerprint,
            "output": output,
            "log": log,
            **origin(),
        },
        gpus=0 if watches else gpus,  # a watch asks for them when there is something to score
    )
    return SubmittedEval(submission_id, output, log, _place_options(head))


async def _gpus(head: Head, config: EvalConfig) -> int:
    """GPUs that Ray is asked for: as many as were typed, else all of a host such as the head; 0 where it has none."""
    if config.server.gpus or config.server.engine == "openai" or config.server.url:
        return config.server.gpus
    counted = int((await run_checked(head, 'set -- /dev/nvidia[0-9]*\n[ -e "$1" ] || set --\necho $#')).strip() or 0)
    return min(counted, 1) if config.server.engine == "embedded" else counted


async def follow_output(
    selection: Selection,
    submitted: SubmittedEval,
    parser: EvalOutputParser,
    say: Say,
    more: Callable[[Head], Awaitable[None]] | None = None,
) -> RayJob:
    """Hand on what a job prints until it ends, and return the ended job.

    Args:
        say: gets why nothing is printed.
        more: called after every look.
    """
    read, began, told = 0, time.monotonic(), False

    async def look(head: Head, job: RayJob) -> None:
        nonlocal read, told
        if job.status == "PENDING" and not told and time.monotonic() - began > STARTS_WITHIN:
            told = True
            say("the job waits for its turn; one that waits for GPUs needs as many free ones on one host: see --gpus")
        while data := await read_from(head.session, Path(submitted.log), read):
            read += len(data)
            parser.feed(data)
        if more is not None:
            await more(head)

    return await watch_job(selection, submitted.submission_id, look, say)


async def follow(selection: Selection, submitted: SubmittedEval, local: Path, say: Say) -> Finished:
    """Show what the evaluation prints until it ends, and copy its results to `local`.

    Raises:
        UserError: with the subclass that fits how it ended. HostError: its results could not be copied.
    """
    parser = EvalOutputParser(say)
    job = await follow_output(selection, submitted, parser, say)
    code = _exit_code(job)
    folder = None
    if code == UserError.exit_code and parser.error:
        await _clear_away(selection, submitted)
    if parser.answer is not None and code in (0, 1):
        async with head_of(selection) as head:
            folder = await copy_results(head, submitted.output, PurePosixPath(parser.answer["results"]).name, local)
    ending = "" if parser.error or parser.answer is not None else await _ending(selection, job, submitted)
    if code == UserError.exit_code and ending:
        raise UserError(ending)
    return parser.finished(code, folder, ending)


async def _clear_away(selection: Selection, submitted: SubmittedEval) -> None:
    with suppress(HostError):  # the refusal is what is to be told
        async with head_of(selection) as head:
            await remove_refused(head, submitted)


async def remove_refused(head: Head, submitted: SubmittedEval) -> None:
    """Remove a refused evaluation's requests and log, and their folder if it holds no others, unless it has answers.

    Raises:
        HostError: it could not be done.
    """
    output, log = shlex.quote(submitted.output), shlex.quote(submitted.log)
    request = shlex.quote(str(PurePosixPath(submitted.log).with_suffix(".yaml")))
    script = f"""answers=
if [ -d {output}/records ] && [ -e {request} ]; then
  answers=$(find {output}/records -name samples.jsonl -newer {request} -print -quit)
fi
if [ -e {request} ] && [ -z "$answers" ]; then
  if [ -d {output}/logs/watch ]; then
    find {output}/logs/watch -maxdepth 1 -name '*.yaml' -newer {request} -delete
    rmdir --ignore-fail-on-non-empty {output}/logs/watch
  fi
  rm -f {request} {log}
  rmdir --ignore-fail-on-non-empty {output}/logs
fi
"""
    await run_checked(head, script)


async def follow_watch(
    selection: Selection, submitted: SubmittedEval, local: Path, say: Say, show: Callable[[Path], None]
) -> None:
    """Show what is scored until the job ends.

    Raises:
        UserError: with the subclass that fits how it ended.
    """
    parser = WatchOutputParser(say)

    async def copy(head: Head) -> None:
        while parser.scored:
            folder = await copy_results(head, submitted.output, parser.scored[0], local)
            parser.scored.popleft()  # not before it is here: a connection may be lost meanwhile
            show(folder)

    job = await follow_output(selection, submitted, parser, say, copy)
    code = _exit_code(job)
    if code == InterruptedRunError.exit_code:
        raise InterruptedRunError("the watch was stopped: what is answered is written; the same command goes on")
    if parser.refused and code in (0, 1, UserError.exit_code) and (parser.count or code != 1):
        await _clear_away(selection, submitted)
    if parser.failed:
        raise RunError(f"{len(parser.failed)} checkpoints could not be scored: {', '.join(parser.failed)}")
    if code:
        raise RunError(parser.error or await _ending(selection, job, submitted))
    if not parser.count:
        raise UserError("the run has no checkpoint yet (epoch…globalstepN)")
    say(f"{parser.count} checkpoints are scored")


def _exit_code(job: RayJob) -> int:
    """Exit code of a job that has ended; -1 where Ray does not know it."""
    if job.status == "SUCCEEDED":
        return 0
    found = _EXIT_CODE.search(job.message)
    return InterruptedRunError.exit_code if job.status == "STOPPED" else int(found[1]) if found else -1


async def _ending(selection: Selection, job: RayJob, submitted: SubmittedEval) -> str:
    """How a job ended, for one that has not said so itself: perhaps to another command, which removed its log."""
    reason = " ".join(job.message.split())[-400:] or "no reason given"
    log = f"its log is {submitted.log}"
    with suppress(HostError):
        async with head_of(selection) as head:
            # One that was not even begun has none either, nor an exit code of its own.
            if _exit_code(job) in (1, UserError.exit_code) and not await any_exists(head, [submitted.log]):
                log = (
                    "its log is gone: that of a refused evaluation is removed by the first command that tells why, and "
                    "the same command again tells it anew"
                )
    return f"job {job.submission_id} ended ({job.status}): {reason}; {log}"


async def copy_results(head: Head, output: str, name: str, local: Path) -> Path:
    """Copy one evaluation with the records of its rows, in place of an earlier copy; return its folder here.

    Args:
        output: folder of evaluations there.

    Raises:
        UserError: another command writes into `local`, or it cannot be written. HostError: it cannot be read there.
    """
    results = json.loads(await read_whole(head.session, Path(output, name, RESULTS)))
    names = [name, *dict.fromkeys(row["record"] for row in results["rows"])]
    with (
        file_failures(local, "choose another --out"),
        output_lock(local),
        tempfile.TemporaryDirectory(prefix=".copy-", dir=local) as staging,
    ):
        await fetch_folders(head.session, output, names, Path(staging), leave_out="servers")
        for one in reversed(names):  # the results last: they say that all is there
            target = local / one
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            (Path(staging) / one).rename(target)
    return local / name


async def newest_results(head: Head, output: str) -> str:
    """Name of the folder of the latest results in a folder of evaluations. Raises UserError where there are none."""
    script = f'set -- {shlex.quote(output)}/*/{RESULTS}\n[ -e "$1" ] || exit 0\nexec ls -t -- "$@"\n'
    found, *_ = (await run_checked(head, script)).splitlines() or [""]
    if not found:
        raise UserError(
            f"no results of an evaluation in {output} on cluster {head.cluster.name}: start one with clusterkit eval "
            f"{_place_options(head)}"
        )
    return PurePosixPath(found).parent.name


async def stop(head: Head, output: str, say: Say, user: str | None = None) -> str:
    """End the evaluation of a user, ours when left out, that writes into a folder; how that went, as a sentence.

    Raises:
        RunError: there is none, or it does not end.
    """
    async with head.jobs() as jobs:
        writing = [job for job in await jobs.all() if job.alive and job.metadata.get("output") == output]
        alive = [job for job in writing if job.user == (user or user_name())]
        if writing and not alive:
            raise UserError(
                f"the evaluation that writes into {output} is {writing[0].user}'s: --user {writing[0].user}"
            )
        if not alive:
            raise RunError(f"no evaluation writes into {output} on cluster {head.cluster.name}")
        name = alive[0].submission_id
        await jobs.stop(name)
        say(f"{name} ends its servers; by force after {STOP_SECONDS} s")
        loop = asyncio.get_running_loop()
        end = loop.time() + STOP_SECONDS + 60
        while (await jobs.get(name)).alive:
            if loop.time() > end:
                raise RunError(
                    f"{name} does not end: clusterkit ray-status {_place_options(head)} shows how the cluster is"
                )
            await asyncio.sleep(POLL_SECONDS)
    return f"{name} is stopped: what is answered is written, and the same command goes on"


def _place_options(head: Head) -> str:
    return f"--cluster {head.cluster.name}"
