"""Remove a cluster's containers and files from its hosts: what has its label, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from clusterkit.hosts.model import Cluster
from clusterkit.provision import docker
from clusterkit.provision.ray.model import LABEL_CLUSTER, LEASE_FILE, NODE_FOLDER, node_folder
from clusterkit.provision.ray.observe import ContainerState, containers_everywhere
from clusterkit.ssh.api import HostError, Session, or_error
from clusterkit.ssh.shell import for_each

STOP_SECONDS = 20
REMOVE_SECONDS = 180.0
LOOK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What one host has of a cluster."""

    host: str
    containers: tuple[ContainerState, ...] = ()
    files: bool = False  # whether the folder with its token is there

    @property
    def empty(self) -> bool:
        """Whether the host has nothing of the cluster."""
        return not self.containers and not self.files

    def lines(self, cluster: str) -> list[str]:
        """Return what there is, for people."""
        found = [f"container {c.name} ({c.role or 'no role'}, {c.phrase})" for c in self.containers]
        return [*found, *([f"folder {node_folder(cluster)}"] if self.files else [])]


async def leftovers(sessions: Mapping[str, Session], cluster: str) -> tuple[dict[str, Leftovers], dict[str, HostError]]:
    """Return what every host has of the cluster, and the errors of hosts that could not be asked."""
    containers, unreachable = await containers_everywhere(sessions, cluster)

    async def files(name: str) -> Leftovers | HostError:
        asked = sessions[name].run(f"test -e {node_folder(cluster)}", root=True, timeout=LOOK_SECONDS)
        result = await or_error(asked)
        return result if isinstance(result, HostError) else Leftovers(name, containers[name], files=result.ok)

    answers = dict(zip(containers, await asyncio.gather(*map(files, containers)), strict=True))
    unreachable.update((name, answer) for name, answer in answers.items() if isinstance(answer, HostError))
    return {name: answer for name, answer in answers.items() if isinstance(answer, Leftovers)}, unreachable


async def remove(
    sessions: Mapping[str, Session], cluster: Cluster, found: Mapping[str, Leftovers]
) -> dict[str, HostError | str]:
    """Remove it: all workers at once, then the head. Return the hosts where that failed, and why."""
    failed: dict[str, HostError | str] = {}

    async def one(name: str) -> None:
        asked = sessions[name].run(_script(cluster.name, found[name]), root=True, timeout=REMOVE_SECONDS)
        result = await or_error(asked)
        if isinstance(result, HostError) or not result.ok:
            failed[name] = result if isinstance(result, HostError) else result.reason

    head = cluster.head_host.name
    hosts = [name for name, what in found.items() if not what.empty]
    await asyncio.gather(*(one(name) for name in hosts if name != head))
    await asyncio.gather(*(one(name) for name in hosts if name == head))
    return failed


def _script(cluster: str, found: Leftovers) -> str:
    """Return a script that removes the given containers where they still have the label, then our own files by name."""
    removed = "".join(
        for_each(
            docker.ps(f"id={container.id}", f"label={LABEL_CLUSTER}={cluster}", stopped=True, whole_ids=True),
            f'docker stop -t {STOP_SECONDS} "$id" >/dev/null\n{docker.REMOVE}',
        )
        for container in found.containers
    )
    folder = node_folder(cluster)
    ours = ("ray_token", "ray_token.new", "hf_token", LEASE_FILE, f"{LEASE_FILE}.new")
    files = (
        f"rm -f {' '.join(f'{folder}/{name}' for name in ours)}\n"
        # A folder with files of others stays.
        f"[ ! -d {folder} ] || rmdir --ignore-fail-on-non-empty {folder}\n"
        f"[ ! -d {NODE_FOLDER} ] || rmdir --ignore-fail-on-non-empty {NODE_FOLDER}\n"
    )
    return f"{removed}{files}"
