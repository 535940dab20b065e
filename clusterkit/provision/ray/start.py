"""Wait for Ray: for the head until it answers, for the cluster until every node is alive."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from clusterkit.hosts.model import Cluster
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.ray.model import HEAD, RaySettings, container_with_role, node_containers
from clusterkit.provision.ray.observe import ContainerState, ask_ray, containers_on, log_tail
from clusterkit.provision.ray.plan import MustReplace, plan_node
from clusterkit.provision.ray.ports import Ports
from clusterkit.provision.ray.state import ClusterState, observe
from clusterkit.provision.steps.step import Refused
from clusterkit.runs.directory import user_name
from clusterkit.ssh.api import HostError, Session

HEAD_SECONDS = 180.0
READY_SECONDS = 180.0
POLL_SECONDS = 1.0
CONNECT_FIX = "see the container's log: docker logs {name}"


class NodeFailedError(Exception):
    """A host's Ray could not be started, or is not what it should be. `lines`: the last ones of the container's log."""

    def __init__(self, host: str, message: str, lines: Sequence[str] = (), fix: str = "") -> None:
        super().__init__("\n".join([f"{host}: {message}", *(f"    {line}" for line in lines), *([fix] if fix else [])]))
        self.host, self.message, self.lines, self.fix = host, message, tuple(lines), fix


class NodeEndedError(NodeFailedError):
    """Its container does not run any more: it may be started again."""


class NotReadyError(Exception):
    """The cluster did not become ready. `state`: the last one that was seen."""

    def __init__(self, state: ClusterState, waited: float) -> None:
        lines = [f"the Ray of cluster {state.cluster} is not ready (waited {waited:.0f} s):", *state.all_problems]
        for node in state.nodes:
            if node.problem and node.log:
                lines += [f"last lines of {node.name}'s container:", *(f"    {line}" for line in node.log)]
        super().__init__("\n".join(lines))
        self.state = state


def settings_for_plan(settings: RaySettings, head_facts: Facts) -> RaySettings:
    """Return the settings with the head's container as the facts show it, for a plan of the workers.

    A head that does not match the settings will be replaced, and its workers with it.
    """
    container = container_with_role(node_containers(head_facts, settings.cluster.name), HEAD)
    try:
        stays = container is not None and not plan_node(settings.cluster.head_host, head_facts, settings)
    except Refused:
        stays = container is not None
    return replace(settings, head_container=container.id if container is not None and stays else "")


async def wait_for_head(session: Session, cluster: str, ports: Ports | None = None) -> ContainerState:
    """Wait until the head's API answers and lists the head's own node, and return its container.

    The API answers first: on a busy host Ray may then give its own node up, after 30 s, and end.

    Raises:
        NodeFailedError: the container is gone or dead, or the API did not answer in time; with its log's last lines.
    """
    host, loop = session.host.name, asyncio.get_running_loop()
    end = loop.time() + HEAD_SECONDS
    while True:
        container = next((c for c in await containers_on(session, cluster) if c.role == HEAD), None)
        if container is None:
            raise NodeEndedError(host, "the head's container is gone", fix="run clusterkit setup again")
        fix = CONNECT_FIX.format(name=container.name)
        if not container.running:
            raise NodeEndedError(host, f"Ray's head ended: container {container.phrase}", container.log, fix)
        answer = await ask_ray(session, cluster, ports)
        if any(node.head and node.state == "ALIVE" for node in answer.nodes):
            return container
        if loop.time() > end:
            lines = await log_tail(session, container.id)
            raise NodeFailedError(
                host,
                f"Ray's head was not ready within {HEAD_SECONDS:.0f} s ({answer.error or 'its own node is not alive'})",
                lines,
                fix,
            )
        await asyncio.sleep(POLL_SECONDS)


async def wait_until_ready(
    sessions: Mapping[str, Session], cluster: Cluster, expected: Mapping[str, int | None] | None = None
) -> ClusterState:
    """Wait until every expected node and GPU is alive in Ray, with the same Ray, Python and image everywhere.

    Args:
        expected: GPUs by host (None: as many as its Ray was started with); default: all hosts.

    Raises:
        NotReadyError: not within READY_SECONDS, or a container ended.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        # Versions are read once all are alive, since that starts a process in every container.
        state = await observe(sessions, cluster, expected=expected, inside=False)
        if state.ready:
            state = await observe(sessions, cluster, expected=expected)
        if state.ready:
            return state
        waited = loop.time() - began
        if state.cannot_recover or waited > READY_SECONDS:
            raise NotReadyError(await _with_logs(state, sessions, cluster.name), waited)
        await asyncio.sleep(POLL_SECONDS)


async def require_replaceable(refusal: MustReplace, head: Session, settings: RaySettings) -> None:
    """Refuse to replace a running container unless --recreate was given and no job of others is alive.

    Raises:
        MustReplace: `refusal` with the jobs that would end, or with those of others.
    """
    answer = await ask_ray(head, settings.cluster.name, settings.ports)
    if not settings.recreate:
        jobs = f"; running now: {', '.join(answer.jobs)}" if answer.jobs else ""
        raise MustReplace(refusal.message, refusal.fix + jobs)
    others = {job: user for job, user in answer.users.items() if user != user_name()}
    if others:
        raise MustReplace(
            f"{refusal.message}, and to replace it ends what is not yours: "
            f"{', '.join(f'{job} of {user}' for job, user in others.items())}",
            "ask them to stop, or stop it for them (clusterkit stop --user NAME), and run the same command again",
        )


async def _with_logs(state: ClusterState, sessions: Mapping[str, Session], cluster: str) -> ClusterState:
    """Add the last lines of running containers that have a problem (dead ones have theirs already)."""

    async def lines(name: str) -> tuple[str, ...]:
        containers = await containers_on(sessions[name], cluster) if name in sessions else ()
        return await log_tail(sessions[name], containers[0].id) if containers else ()

    nodes = []
    for node in state.nodes:
        try:
            log = node.log or (await lines(node.name) if node.problem else ())
        except HostError:
            log = ()
        nodes.append(replace(node, log=log))
    return replace(state, nodes=tuple(nodes))
