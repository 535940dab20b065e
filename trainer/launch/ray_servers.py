"""The engine servers of a run on the nodes of a Ray cluster: an actor for every server keeps the server's host there.

As with ranks, the actor only reserves resources. The host (`python -m trainer.serving`) is a process of its own, which
ends with the actor (`--tied`) and is started again by it when it is killed. Actors of servers that outlive their
trainer are detached, and found again by name.

`python -m trainer.launch.ray_servers add|stop CONFIG.yaml NAME` adds one to a run, or ends one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.config import RunConfig
from trainer.configfile import read_config
from trainer.errors import InterruptedRunError, RunError, UserError
from trainer.launch.nccl_settings import take
from trainer.paths import RunPaths
from trainer.placement import gpus_per_server
from trainer.serving import registry
from trainer.serving.keeper import HostKeeper, config_file, host_command, placed, start_host, with_other_weights

log = logging.getLogger("trainer")

POLL_SECONDS = 0.5
WAITING_SECONDS = 60.0
ACTOR_END_SECONDS = 60.0
PLACE_SECONDS = 600.0
"""How long `add` waits for GPUs."""


def namespace(experiment: str, trial: str) -> str:
    """Ray's namespace of a run: names of its actors are unique within it."""
    return f"clusterkit/{experiment}/{trial}"


@dataclass(frozen=True, slots=True)
class GpusOfNode:
    """GPUs on one node: Ray's id of the node, and ids of the GPUs as CUDA_VISIBLE_DEVICES takes them."""

    node: str
    ids: tuple[str, ...]


def shared_gpus(ranks: Sequence[GpusOfNode], each: int, servers: int) -> list[GpusOfNode]:
    """Share the ranks' GPUs out over servers.

    Args:
        ranks: GPUs of every rank.
        each: GPUs of one server, all on one node.

    Raises:
        RunError: the ranks have too few GPUs on one node each.
    """
    by_node: dict[str, list[str]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).extend(rank.ids)
    found = [
        GpusOfNode(node, tuple(ids[first : first + each]))
        for node, ids in by_node.items()
        for first in range(0, len(ids) - each + 1, each)
    ]
    if len(found) < servers:
        counts = ", ".join(str(len(ids)) for ids in by_node.values())
        raise RunError(
            f"{servers} engine servers are to share the ranks' GPUs, {each} on one node each, and Ray has given the "
            f"ranks {counts} GPUs on their nodes: free whole nodes for this run, or share a server among fewer GPUs"
        )
    return found[:servers]


class HostActor:
    """Actor on the node of one server: keeps its host, which ends when the actor does.

    Args:
        command: command of the host, without its GPUs and address.
        folder: folder of the registrations; what the host prints goes there.
        restarts: how often a host that was killed is started again.
        shared: ids of the GPUs, where they are the ranks' and not the actor's own.
    """

    def __init__(self, name: str, command: list[str], folder: str, restarts: int, shared: tuple[str, ...]) -> None:
        if shared:  # Ray does not know that this actor uses them
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shared)
        take()  # of the server's processes, which inherit them
        # By number among those that this process sees.
        gpus = tuple(range(len(shared or ray.get_gpu_ids())))
        whole = placed(command, gpus, str(ray.util.get_node_ip_address()))
        printed = Path(folder) / f"{name}.host.log"
        self._name = name
        self._keeper = HostKeeper(Path(folder), restarts, lambda _: start_host(whole, printed, tied=True))
        self._keeper.keep(name)
        self._keeper.watch()

    def placed(self) -> bool:
        """Answers once the actor has its place."""
        return True

    def stop(self) -> None:
        """End the server in order; returns when it has ended."""
        self._keeper.close()
        host = self._keeper.hosts[self._name]
        if host is not None:
            host.terminate()
            host.wait()


class RayServers:
    """The servers that a run starts; a context manager, within `ray.init` with the run's namespace.

    Args:
        model: folder of the weights to start with.
        shared: GPUs of the ranks, where the servers run on the same ones.
    """

    def __init__(
        self, config: RunConfig, model: Path, stop: Callable[[], bool], shared: Sequence[GpusOfNode] = ()
    ) -> None:
        self.config, self.model, self.stop, self.shared = config, model, stop, shared
        self.folder = registry.folder_of(RunPaths.of(config).logs)
        self._actors: dict[str, Any] = {}

    def __enter__(self) -> RayServers:
        file = config_file(self.config, self.folder)
        kept = not self.config.serving.shutdown_on_exit
        names = [f"server-{number}" for number in range(self.config.num_servers)]
        forget_dead(self.folder)
        for name in with_other_weights(self.config, self.model) & set(names):
            end(self.config, name)
            _await_end(name)
        places: list[GpusOfNode | None] = [None] * len(names)
        if self.shared:
            places[:] = shared_gpus(self.shared, gpus_per_server(self.config), len(names))
        for name, place in zip(names, places, strict=True):
            self._actors[name] = make_server(self.config, file, self.model, name, kept, place)
        self._await_places()
        return self

    def __exit__(self, *_: object) -> None:
        if self.config.serving.shutdown_on_exit:
            end_actors(list(self._actors.values()))
            for name in self._actors:
                registry.remove(self.folder, name)

    def _await_places(self) -> None:
        """Wait until Ray has resources for every actor, and log what is missing."""
        last_message = time.monotonic()
        waiting = [actor.placed.remote() for actor in self._actors.values()]
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_SECONDS)
            if self.stop():
                raise InterruptedRunError("interrupted while waiting for places in Ray for the engine servers")
            if waiting and time.monotonic() - last_message > WAITING_SECONDS:
                last_message = time.monotonic()
                each = gpus_per_server(self.config)
                kind = "GPU" if each else "CPU"
                log.warning(
                    f"waiting for places of {len(waiting)} engine servers, {each or 1} {kind} each on one node; "
                    f"{supply(kind)}"
                )


def supply(kind: str) -> str:
    """How many GPUs or CPUs the cluster has, and how many are free, in words."""
    free, have = (int(f().get(kind, 0)) for f in (ray.available_resources, ray.cluster_resources))
    return f"the cluster has {have}, {free} free"


def make_server(
    config: RunConfig, file: Path, model: Path, name: str, kept: bool, shared: GpusOfNode | None = None
) -> Any:
    """Make the actor of one of a run's servers. shared: the ranks' GPUs, where it runs on those."""
    command, restarts = host_command(file, model, name, kept, tied=True), config.serving.restarts
    return make_actor(name, command, file.parent, gpus_per_server(config), restarts, detached=kept, shared=shared)


def make_actor(
    name: str,
    command: list[str],
    folder: Path,
    gpus: int,
    restarts: int,
    *,
    detached: bool,
    shared: GpusOfNode | None = None,
) -> Any:
    """The actor of a server: an existing one of that name, else a new one.

    Args:
        restarts: of the actor when its node is lost, and of the host.
        detached: whether it outlives the process that made it.
        shared: the ranks' GPUs, in place of its own.
    """
    if shared is None:
        place = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": "DEFAULT" if gpus else "SPREAD"}
    else:
        place = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(shared.node, soft=False)}
    lifetime = "detached" if detached else None
    actor = ray.remote(HostActor).options(
        name=name, get_if_exists=True, lifetime=lifetime, max_restarts=restarts, **place
    )
    return actor.remote(name, command, str(folder), restarts, shared.ids if shared else ())


def forget_dead(folder: Path) -> None:
    """Remove registrations whose actor is gone: of an attempt that was killed, or of a lost node."""
    for one in registry.read(folder):
        if find_actor(one.name) is None:
            registry.remove(folder, one.name)


def find_actor(name: str) -> Any:
    """The living actor of a server in this namespace, or None."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _await_end(name: str) -> None:
    """Wait until an actor's name is free: Ray ends actors after it has said so."""
    deadline = time.monotonic() + ACTOR_END_SECONDS
    while find_actor(name) is not None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def end_actors(actors: Sequence[Any]) -> None:
    """End servers in order, all at once, then their actors."""
    with suppress(Exception):  # gone already
        stopping = [actor.stop.remote() for actor in actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=ACTOR_END_SECONDS)
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor)


def add(config: RunConfig, file: Path, model: Path) -> str:
    """Add one server to a run; returns its name. It stays until it is stopped.

    Raises:
        UserError: the run's servers share the GPUs of its ranks.
        RunError: no node has the GPUs for it.
    """
    if config.allocation is not None and config.allocation.colocated and config.engine == "sglang":
        raise UserError(
            f"allocation_mode={config.allocation_mode}: the run's servers read weights from the ranks on their GPUs, "
            "and one on other GPUs cannot; give servers GPUs of their own (+ in place of |) to add some"
        )
    folder = registry.folder_of(RunPaths.of(config).logs)
    taken = {one.name for one in registry.read(folder)}
    name = next(name for name in (f"server-{n}" for n in range(1 << 16)) if name not in taken and not find_actor(name))
    await_place({name: make_server(config, file, model, name, kept=True)}, gpus_per_server(config))
    return name


def await_place(actors: dict[str, Any], gpus: int) -> None:
    """Wait until every actor has its resources; where one finds none, all of them are ended.

    Raises:
        RunError: no node has the GPUs for one of them.
    """
    waiting = [actor.placed.remote() for actor in actors.values()]
    ready, missing = ray.wait(waiting, num_returns=len(waiting), timeout=PLACE_SECONDS) if waiting else ([], [])
    if missing:
        for actor in actors.values():
            ray.kill(actor)
        need = f"{gpus} free GPUs" if gpus else "a free CPU"
        raise RunError(
            f"{len(ready)} of {len(waiting)} servers found a node with {need} within {PLACE_SECONDS:.0f} s: end what "
            "holds them, or add hosts (clusterkit ray-status shows who has what)"
        )


def end(config: RunConfig, name: str) -> None:
    """End one server of a run. Raises UserError when the run has none of that name."""
    folder = registry.folder_of(RunPaths.of(config).logs)
    actor = find_actor(name)
    if actor is None and name not in {one.name for one in registry.read(folder)}:
        raise UserError(f"the run has no server {name}: clusterkit serve list shows those it has")
    if actor is not None:
        end_actors([actor])
    registry.remove(folder, name)


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.launch.ray_servers", description=__doc__)
    parser.add_argument("action", choices=("add", "stop"))
    parser.add_argument("config", type=Path)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--model", type=Path, default=None)
    arguments = parser.parse_args()
    try:
        config = read_config(arguments.config, RunConfig)
        names = namespace(config.experiment_name, config.trial_name)
        ray.init(address="auto", namespace=names, logging_level=logging.WARNING)
        if arguments.action == "stop":
            end(config, arguments.name)
            print(f"{arguments.name} has ended")
        else:
            model = arguments.model or _model_of(config)
            print(f"{add(config, arguments.config, model)} is starting")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _model_of(config: RunConfig) -> Path:
    """The model that the run's other servers were started with, else the run's own."""
    folder = registry.folder_of(RunPaths.of(config).logs)
    models = [one.model for one in registry.read(folder) if one.model]
    model = models[0] if models else config.model.path
    if not model:
        raise UserError("the run has no servers yet and its model is not known: give --model-path FOLDER")
    return Path(model)


if __name__ == "__main__":
    sys.exit(main())
