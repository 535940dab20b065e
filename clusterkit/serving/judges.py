"""Judge servers of a run on a cluster: placed by its Ray, registered for the run, waited for, listed and ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from clusterkit.backends.ray.head import Head
from clusterkit.provision.assets.model import asset_of
from clusterkit.provision.assets.view import asset_problem, holds_adapter, look
from clusterkit.provision.steps.step import Refused
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.serving.engines import START_SECONDS, remote_job, remote_servers
from trainer.errors import RunError, UserError
from trainer.judge.servers import judges_folder
from trainer.serving.registry import Registration

_MODULE = "trainer.launch.ray_judges"
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class JudgeRequest:
    """Judge servers to be started."""

    experiment: str
    trial: str
    model: str = ""  # as typed; later its folder
    gpus: int = 0  # of all servers; 0 for one server on a CPU
    per_server: int = 1  # GPUs of one
    engine: str = "sglang"
    context_length: int = 0  # longest request; 0 for the model's own
    flags: str = ""  # more options of the server's own, quoted as for a shell

    @property
    def count(self) -> int:
        """Servers."""
        return max(self.gpus // self.per_server, 1)


def remote_folder(head: Head, request: JudgeRequest) -> Path:
    """Where the servers are registered."""
    return judges_folder(head.fileroot, user_name(), request.experiment, request.trial)


async def remote_judges(head: Head, request: JudgeRequest) -> list[Registration]:
    """Judge servers of a run."""
    return await remote_servers(head, remote_folder(head, request))


async def start_remote(head: Head, request: JudgeRequest, say: Callable[[str], None]) -> list[Registration]:
    """Have the servers started, and wait until they answer; those that are there already are taken as they are.

    Raises:
        UserError: the model is not on the cluster, or another one is served already. RunError: there is no place for
            them, or one does not start: then all of them are ended.
    """
    request = replace(request, model=await _model(head, request.model))
    words = [_MODULE, "start", *_names(head, request), "--model", request.model, "--engine", request.engine]
    words += ["--gpus", str(request.gpus) if request.gpus else "", "--per-server", str(request.per_server)]
    words += ["--context-length", str(request.context_length), f"--flags={request.flags}"]
    say(f"looking for a place for {request.count} server(s)")
    answer = await remote_job(head, _run(head, request), words)
    names = answer.removeprefix("starting: ").split(", ")
    say(f"{answer}; logs in {remote_folder(head, request)}")
    deadline = time.monotonic() + START_SECONDS
    states: dict[str, str] = {}
    while time.monotonic() < deadline:
        found = {one.name: one for one in await remote_judges(head, request) if one.name in names}
        for one in found.values():
            state = f"{one.name} on {one.node} answers" if one.state == "ready" else one.reason
            if state and states.get(one.name) != state:
                states[one.name] = state
                say(state)
        if given_up := [one for one in found.values() if one.state == "ended"]:
            await stop_remote(head, request)
            raise RunError("; ".join(f"{one.name} on {one.node} did not start: {one.reason}" for one in given_up))
        if len(found) == len(names) and all(one.state == "ready" for one in found.values()):
            return list(found.values())
        await asyncio.sleep(POLL_SECONDS)
    raise RunError(
        f"the servers have not answered within {START_SECONDS:.0f} s; they go on starting ("
        f"clusterkit serve list --judges shows them), with logs in {remote_folder(head, request)}"
    )


async def stop_remote(head: Head, request: JudgeRequest) -> str:
    """End all judge servers of a run; returns the last line that was printed."""
    words = [_MODULE, "stop", *_names(head, request), "--model", "-"]
    return await remote_job(head, _run(head, request), words)


async def _model(head: Head, typed: str) -> str:
    try:
        asset = asset_of("model", typed, head.cluster, "--model-path")
    except Refused as refusal:
        raise UserError(f"{refusal.message}: {refusal.fix}") from refusal
    view = await look(head.session, asset)
    if holds_adapter(view):
        raise UserError(f"--model-path {typed} is an adapter, and servers here take whole models: name a merged one")
    if problem := asset_problem(asset, view):
        raise UserError(
            f"model {asset.name} is not on the cluster ({problem}): fetch it with clusterkit setup --cluster "
            f"{head.cluster.name} --preset PRESET --set judge.model={typed} --no-train"
        )
    return asset.folder


def _run(head: Head, request: JudgeRequest) -> RunDirectory:
    return RunDirectory(Path(head.fileroot), user_name(), request.experiment, request.trial)


def _names(head: Head, request: JudgeRequest) -> list[str]:
    named = {"fileroot": head.fileroot, "user": user_name(), "experiment": request.experiment, "trial": request.trial}
    return [word for name, value in named.items() for word in (f"--{name}", value)]
