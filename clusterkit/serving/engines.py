"""The engine servers of a run, seen and changed from here: on this machine, or on a cluster through its head node."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterkit.backends.local.interpreter import python_here
from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.jobs import origin
from clusterkit.backends.ray.storage import put_code
from clusterkit.common.text_plot import columns
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.tail import last_lines
from clusterkit.ssh.api import ErrorKind, HostError
from trainer.errors import RunError, UserError
from trainer.serving import registry
from trainer.serving.keeper import end_hosts, host_command, placed, start_host
from trainer.serving.registry import Registration

START_SECONDS = 1200.0
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class ServerView:
    """One server of a run as a user sees it. up: seconds since its present start."""

    registration: Registration
    up: float

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self.registration), "gpus": list(self.registration.gpus), "up_s": round(self.up, 1)}


def views(found: Sequence[Registration]) -> list[ServerView]:
    """Registrations with their age."""
    return [ServerView(one, max(time.time() - one.started, 0.0)) for one in found]


def table(found: Sequence[ServerView], kind: str = "engine servers") -> list[str]:
    """Lines of a table; one that says so where there are none."""
    if not found:
        return [f"the run has no {kind}"]
    rows = [("server", "state", "node", "gpus", "engine", "up", "address")]
    for view in found:
        one = view.registration
        gpus = ",".join(map(str, one.gpus)) or "-"
        rows.append((one.name, one.state, one.node, gpus, one.engine, f"{view.up:.0f} s", one.url or "-"))
    return columns(rows) + [f"{one.name}: {one.reason}" for one in (view.registration for view in found) if one.reason]


# -- on this machine ------------------------------------------------------------------------------------------------


def local_servers(run: RunDirectory) -> list[Registration]:
    """Servers of a run on this machine."""
    return registry.read(registry.folder_of(run.logs))


def add_local(run: RunDirectory, gpus: tuple[int, ...], model: str, say: Callable[[str], None]) -> Registration:
    """Add a server to a run and wait until it answers. It stays until it is stopped.

    Raises:
        UserError: the run has no servers that this one could be like. RunError: it did not start; with the cause.
    """
    folder = registry.folder_of(run.logs)
    config = folder / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"{run.name} has not started engine servers: add servers.engine=vllm or sglang to its train command"
        )
    known = [one.model for one in local_servers(run) if one.model]
    if not (model or known):
        raise UserError("no other server of the run is there to take the model from: give --model-path FOLDER")
    name = registry.free_name(folder)
    command = host_command(config, Path(model or known[0]), name, kept=True, tied=False)
    command = placed([python_here(), *command[1:]], gpus, "127.0.0.1")
    host = start_host(command, folder / f"{name}.host.log", tied=False)
    say(f"{name} is starting; its log is {folder / name}.log")
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        one = next((one for one in local_servers(run) if one.name == name and one.pid == host.pid), None)
        if one is not None and one.state == "ready":
            return one
        if host.poll() is not None or (one is not None and one.state == "ended"):
            registry.remove(folder, name)
            lines = last_lines(folder / f"{name}.host.log", 1)
            raise RunError(
                f"{name} did not start: {(one and one.reason) or (lines[-1] if lines else 'no reason given')}"
            )
        time.sleep(POLL_SECONDS)
    raise RunError(
        f"{name} has not answered within {START_SECONDS:.0f} s; it goes on starting, see {folder / name}.log"
    )


def stop_local(run: RunDirectory, names: Sequence[str]) -> list[str]:
    """End servers on this machine, all that are named, and all without names; returns the names.

    Raises:
        UserError: the run has no such server, or one of them runs on another machine.
    """
    found = {one.name: one for one in local_servers(run)}
    if unknown := [name for name in names if name not in found]:
        servers = ", ".join(found) or "none"
        raise UserError(f"{run.name} has no server {unknown[0]} (there: {servers})")
    chosen = set(names or found)
    return end_all(registry.folder_of(run.logs), [one for one in found.values() if one.name in chosen])


def end_all(folder: Path, servers: Sequence[Registration]) -> list[str]:
    """End servers of this machine that are registered in a folder, and forget them; returns the names.

    Raises:
        UserError: one of them runs on another machine.
    """
    for one in servers:
        if one.node != os.uname().nodename:
            raise UserError(f"{one.name} runs on {one.node}: stop it there, or with --cluster NAME")
    names = {one.name for one in servers}
    end_hosts(folder, names)
    for name in names:  # those whose host had gone before
        registry.remove(folder, name)
    return sorted(names)


# -- on a cluster ---------------------------------------------------------------------------------------------------


async def remote_servers(head: Head, folder: Path) -> list[Registration]:
    """Servers that are registered in a folder of a cluster's storage."""
    script = f"""for file in {shlex.quote(str(folder))}/*.json; do
  # A server that ends meanwhile takes its file along.
  if text=$(cat "$file" 2>/dev/null); then printf '%s\\n' "$text"; elif [ -e "$file" ]; then exit 1; fi
done
"""
    result = await head.session.run(script, root=True)
    if not result.ok:
        raise HostError(
            head.session.host.name, ErrorKind.LOST, f"{folder} cannot be read", "look at its mount and rights"
        )
    found = []
    for line in result.stdout.splitlines():
        with suppress(ValueError):
            found.append(registry.parse(line))
    return found


async def change_remote(head: Head, run: RunDirectory, action: str, argument: str) -> str:
    """Have the cluster's Ray add or stop an engine server; returns the last line that it printed.

    Raises:
        UserError: the run has no servers. RunError: it failed, with its last line.
    """
    config = registry.folder_of(run.logs) / "config.yaml"
    if not (await head.session.run(f"[ -f {shlex.quote(str(config))} ]", root=True)).ok:
        raise UserError(
            f"{run.name} has not started engine servers: add servers.engine=vllm, or allocation_mode "
            "with sglang, to its train command"
        )
    return await remote_job(
        head, run, ["trainer.launch.ray_servers", action, str(config), *([argument] * bool(argument))]
    )


async def remote_job(head: Head, run: RunDirectory, words: Sequence[str]) -> str:
    """Have the cluster's Ray run a module of the node side to its end; returns the last line that it printed.

    Raises:
        RunError: it failed, with its last line.
    """
    code = await put_code(head.session, head.cluster, ())
    submission = f"{run.user}-{run.experiment}-{run.trial}-serve-{time.time_ns()}"
    async with head.jobs() as jobs:
        await jobs.submit(
            submission,
            f"exec {shlex.join(['python3', '-m', *words])}",
            environment={"PYTHONPATH": code, "USER": run.user, "LOGNAME": run.user},
            metadata={
                "kind": "clusterkit-serve",
                "user": run.user,
                "experiment": run.experiment,
                "trial": run.trial,
                **origin(),
            },
        )
        while (job := await jobs.get(submission)).alive:
            await asyncio.sleep(POLL_SECONDS)
        lines = (await jobs.logs(submission)).strip().splitlines()
    last = lines[-1] if lines else job.message
    if job.status != "SUCCEEDED":
        raise RunError(last.removeprefix("error: "))
    return last
