"""Judge servers of a run on a cluster: placed by its Ray, registered for the run, waited for, listed and ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from clusterkit.backends.ray.head import Head
from clusterkit.provision.assets.model import asset_of
from clusterkit.provision.assets.view import asset_problem, look
from clusterkit.provision.steps.step import Refused
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.serving.engines import START_SECONDS, remote_job, remote_servers
from trainer.errors import RunError, UserError
from trainer.judge.servers import judges_folder
from trainer.serving.registry import Registration

_MODULE = "trainer.launch.ray_judges"
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class JudgeOrder:
    """Judge servers to be started.

    Attributes:
        experiment: of the run that they are for.
        trial: of that run.
        model: as typed; later its folder.
        gpus: of all servers; 0 for one server on a CPU.
        per_server: GPUs of one.
        engine: sglang or vllm.
        context_length: longest request; 0 for the model's own.
        flags: more options of the server's own.
    """

    experiment: str
    trial: str
    model: str = ""
    gpus: int = 0
    per_server: int = 1
    engine: str = "sglang"
    context_length: int = 0
    flags: str = ""

    @property
    def count(self) -> int:
        """Servers."""
        return max(self.gpus // self.per_server, 1)


def remote_folder(head: Head, order: JudgeOrder) -> Path:
    """Where the servers are registered."""
    return judges_folder(head.fileroot, user_name(), order.experiment, order.trial)


async def remote_judges(head: Head, order: JudgeOrder) -> list[Registration]:
    """Judge servers of a run."""
    return await remote_servers(head, remote_folder(head, order))


async def start_remote(head: Head, order: JudgeOrder, say: Callable[[str], None]) -> list[Registration]:
    """Have the servers started, and wait until they answer; those that are there already are taken as they are.

    Raises:
        UserError: the model is not on the cluster, or another one is served already. RunError: there is no place for
            them, or one does not start: then all of them are ended.
    """
    order = replace(order, model=await _model(head, order.model))
    words = [_MODULE, "start", *_names(head, order), "--model", order.model, "--engine", order.engine]
    words += ["--gpus", str(order.gpus) if order.gpus else "", "--per-server", str(order.per_server)]
    words += ["--context-length", str(order.context_length), f"--flags={order.flags}"]
    say(f"looking for a place for {order.count} server(s)")
    said = await remote_job(head, _run(head, order), words)
    names = said.removeprefix("starting: ").split(", ")
    say(f"{said}; logs in {remote_folder(head, order)}")
    deadline = time.monotonic() + START_SECONDS
    told: dict[str, str] = {}
    while time.monotonic() < deadline:
        found = {one.name: one for one in await remote_judges(head, order) if one.name in names}
        for one in found.values():
            state = f"{one.name} on {one.node} answers" if one.state == "ready" else one.reason
            if state and told.get(one.name) != state:
                told[one.name] = state
                say(state)
        if given_up := [one for one in found.values() if one.state == "ended"]:
            await stop_remote(head, order)
            raise RunError("; ".join(f"{one.name} on {one.node} did not start: {one.reason}" for one in given_up))
        if len(found) == len(names) and all(one.state == "ready" for one in found.values()):
            return list(found.values())
        await asyncio.sleep(POLL_SECONDS)
    raise RunError(
        f"the servers have not answered within {START_SECONDS:.0f} s; they go on starting (clusterkit serve judge "
        f"--list shows them), with logs in {remote_folder(head, order)}"
    )


async def stop_remote(head: Head, order: JudgeOrder) -> str:
    """End all judge servers of a run; returns the last line that was printed."""
    words = [_MODULE, "stop", *_names(head, order), "--model", "-"]
    return await remote_job(head, _run(head, order), words)


async def _model(head: Head, typed: str) -> str:
    try:
        asset = asset_of("model", typed, head.cluster, "--model")
    except Refused as refusal:
        raise UserError(f"{refusal.message}: {refusal.fix}") from refusal
    if said := asset_problem(asset, await look(head.session, asset)):
        raise UserError(
            f"model {asset.name} is not on the cluster ({said}): fetch it with clusterkit setup --cluster "
            f"{head.cluster.name} --preset PRESET --set judge.model={typed} --no-train"
        )
    return asset.folder


def _run(head: Head, order: JudgeOrder) -> RunDirectory:
    return RunDirectory(Path(head.fileroot), user_name(), order.experiment, order.trial)


def _names(head: Head, order: JudgeOrder) -> list[str]:
    named = {"fileroot": head.fileroot, "user": user_name(), "experiment": order.experiment, "trial": order.trial}
    return [word for name, value in named.items() for word in (f"--{name}", value)]
