"""The stand-in servers of benchmarks/fleet.py as actors of a Ray whose nodes believe in GPUs.

Every host of the preset is a node of one Ray on this machine, with as many GPUs as the preset's hosts have. The actors
are those that a run's servers have (trainer/launch/ray_servers.py); the process that each keeps is a stand-in, which it
starts again when that is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from trainer.config import RunConfig
from trainer.launch.ray_servers import end_actor, make_actor, namespace
from trainer.placement import gpus_per_server
from trainer.serving import registry

NODE = {"num_cpus": 16, "object_store_memory": 80 << 20, "include_dashboard": False}
PLACE_SECONDS = 400.0


class RayFleet:
    """The servers of a run, an actor for each; has the methods of `fleet.Fleet`.

    nodes_s: until the nodes were there. placed_s: until all servers were registered, from then on.
    """

    def __init__(self, config: RunConfig, folder: Path, rates: Path) -> None:
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self.config, self.folder = config, folder
        began = time.monotonic()
        self.cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 0})
        self.hosts: dict[str, list[str]] = {}
        self._nodes: dict[str, Any] = {}
        for number in range(config.n_nodes):
            self.start(f"node {number}")
        names = namespace(config.experiment_name, config.trial_name)
        ray.init(address=self.cluster.address, namespace=names, log_to_driver=False)
        self.nodes_s = time.monotonic() - began
        stand_in = [sys.executable, str(Path(__file__).with_name("fleet_servers.py")), str(rates)]
        stand_in += ["--folder", str(folder)]
        self._actors: dict[str, Any] = {}
        began = time.monotonic()
        for name in (f"server-{number}" for number in range(config.num_servers)):
            self._actors[name] = make_actor(
                name,
                [*stand_in, "--name", name],
                folder,
                gpus_per_server(config),
                config.serving.restarts,
                detached=False,
            )
        self._await(set(self._actors))
        self.placed_s = time.monotonic() - began

    def start(self, address: str) -> None:
        """Add a node, or one that was lost: Ray starts the actors there that have no place."""
        self._nodes[address] = self.cluster.add_node(num_gpus=self.config.n_gpus_per_node, **NODE)
        self.hosts.setdefault(address, [])

    def say(self, what: str, name: str, _number: int = 0) -> None:
        """Kill the process of a server; its actor sees to its return."""
        if what == "lose":
            (pid,) = (one.pid for one in registry.read(self.folder) if one.name == name)
            os.kill(pid, signal.SIGKILL)

    def lose_host(self, _address: str) -> None:
        """End the node of the last server and all that runs on it, without a word."""
        last = max(registry.read(self.folder), key=lambda one: int(one.name.partition("-")[2]))
        above = {process.pid for process in psutil.Process(last.pid).parents()}
        for address, node in self._nodes.items():
            if any(one.process.pid in above for one in node.all_processes["raylet"]):
                self.cluster.remove_node(self._nodes.pop(address), allow_graceful=False)
                return
        raise RuntimeError(f"no node has process {last.pid} of {last.name}")

    def close(self) -> list[dict[str, Any]]:
        """End all."""
        for actor in self._actors.values():
            end_actor(actor)
        ray.shutdown()
        self.cluster.shutdown()
        return []

    def _await(self, names: set[str]) -> None:
        deadline = time.monotonic() + PLACE_SECONDS
        ready: set[str] = set()
        while time.monotonic() < deadline:
            ready = {one.name for one in registry.read(self.folder) if one.state == "ready"}
            if ready >= names:
                return
            time.sleep(0.2)
        raise SystemExit(f"after {PLACE_SECONDS:.0f} s {len(ready)} of {len(names)} servers are registered")
