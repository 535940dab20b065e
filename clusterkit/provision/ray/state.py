"""Whether a cluster is what it should be: every expected host's container, Ray node, GPUs and versions in one model."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from clusterkit.hosts.model import Cluster
from clusterkit.provision.ray.model import HEAD, NODE_ROLES, WORKER
from clusterkit.provision.ray.observe import ContainerState, RayAnswer, RayNode, ask_ray, containers_everywhere
from clusterkit.provision.ray.ports import Ports
from clusterkit.ssh.api import HostError, Session


@dataclass(frozen=True, slots=True)
class NodeState:
    """One row of the table."""

    name: str
    role: str
    address: str = ""
    container: str = "absent"
    ray_state: str = ""
    gpus: int = 0
    gpus_expected: int = 0
    cpus: int = 0
    memory: int = 0  # bytes
    ray: str = ""
    python: str = ""
    image: str = ""
    image_id: str = ""
    image_content: str = ""  # the same on engines that count IDs in other ways
    problem: str = ""  # empty where all is well
    log: tuple[str, ...] = ()  # last lines of a container that does not run


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All rows, the jobs of Ray, and the problems of the cluster as a whole."""

    cluster: str
    nodes: tuple[NodeState, ...]
    jobs: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether every expected node and GPU is alive, with the same Ray, Python and image everywhere."""
        return not self.problems and not any(node.problem for node in self.nodes)

    @property
    def all_problems(self) -> tuple[str, ...]:
        """Every problem as a sentence that names its host."""
        return (*self.problems, *(f"{node.name}: {node.problem}" for node in self.nodes if node.problem))

    @property
    def cannot_recover(self) -> bool:
        """Whether waiting is useless: an expected container does not run, or cannot be asked."""
        return any(node.problem and node.container != "running" for node in self.nodes)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "ready": self.ready}


async def observe(
    sessions: Mapping[str, Session],
    cluster: Cluster,
    *,
    expected: Mapping[str, int | None] | None = None,
    unreachable: Mapping[str, HostError] | None = None,
    ports: Ports | None = None,
    inside: bool = True,
) -> ClusterState:
    """Look once at every host that has a session.

    Args:
        expected: GPUs by host that must be there (None: as many as Ray was started with); default: all hosts.
        unreachable: hosts without a session, and why.
        inside: also read versions and GPUs in the containers.
    """
    head = sessions.get(cluster.head_host.name)
    (containers, failed), answer = await asyncio.gather(
        containers_everywhere(sessions, cluster.name, inside), _answer(head, cluster.name, ports)
    )
    failed = {**(unreachable or {}), **failed}
    nodes = {host.name: None for host in cluster.hosts} if expected is None else expected
    return assess(cluster, nodes, containers, failed, answer, inside)


async def _answer(head: Session | None, cluster: str, ports: Ports | None) -> RayAnswer:
    if head is None:
        return RayAnswer(error="the head's host cannot be reached")
    try:
        return await ask_ray(head, cluster, ports)
    except HostError as error:
        return RayAnswer(error=error.message)


def assess(
    cluster: Cluster,
    expected: Mapping[str, int | None],
    containers: Mapping[str, tuple[ContainerState, ...]],
    unreachable: Mapping[str, HostError],
    answer: RayAnswer,
    inside: bool = True,
) -> ClusterState:
    """Compare what was seen with what is expected. inside: the containers were asked for versions and GPUs."""
    alive = answer.alive()
    head = cluster.head_host.name
    rows = []
    for name, gpus in expected.items():
        role, found = HEAD if name == head else WORKER, containers.get(name, ())
        rows.append(_row(name, role, gpus, found, unreachable.get(name), answer, inside))
    # Other nodes are shown and are no problem: a command with --limit looks at a part of the cluster.
    rows += [_measured(NodeState(name, "other"), node) for name, node in alive.items() if name not in expected]
    problems = [*_answer_problem(answer), *_disagreement(rows)]
    return ClusterState(cluster.name, tuple(rows), answer.jobs, tuple(problems))


def _row(
    name: str,
    role: str,
    gpus: int | None,
    found: tuple[ContainerState, ...],
    error: HostError | None,
    answer: RayAnswer,
    inside: bool,
) -> NodeState:
    if error is not None:
        return NodeState(name, role, container="unknown", problem=error.message)
    container = next((c for c in found if c.role == role), next((c for c in found if c.role in NODE_ROLES), None))
    if container is None:
        return NodeState(name, role, gpus_expected=gpus or 0, problem="no Ray container: clusterkit setup starts it")
    desired_gpus = container.gpus if gpus is None else gpus
    node = answer.find(name, container.node_ids)
    row = NodeState(
        name,
        role,
        container=container.phrase,
        gpus_expected=desired_gpus,
        ray=container.ray,
        python=container.python,
        image=container.image,
        image_id=container.image_id,
        image_content=container.content,
        log=container.log,
    )
    row = _measured(row, node)
    problem = _container_problem(row, container)
    if not problem and not answer.error:
        problem = _ray_problem(row, node)
        if not problem and inside:
            problem = _former_node(container, node) or _inside_problem(row, container)
    return replace(row, problem=problem)


def _container_problem(row: NodeState, container: ContainerState) -> str:
    if not container.running:
        return f"the container {container.name} is {container.phrase}: clusterkit setup starts it again"
    if container.role != row.role:
        return f"runs as {container.role}, not as {row.role}: clusterkit setup --recreate puts it right"
    return ""


def _ray_problem(row: NodeState, node: RayNode | None) -> str:
    if node is None:
        return "its container runs, but it is not alive in Ray"
    return f"{row.gpus} of {row.gpus_expected} GPUs in Ray" if row.gpus < row.gpus_expected else ""


def _former_node(container: ContainerState, node: RayNode | None) -> str:
    """Return a problem where Ray lists the node of an earlier container: Ray 2.60 does so for 16 s after its end."""
    ids = container.node_ids
    if ids is not None and not ids:
        return "Ray has not started in its container yet; what Ray lists is the node of before"
    if ids and all(ids) and node is not None and node.id and node.id not in ids:
        return "the node in its container has not joined yet; what Ray lists is the node of before"
    return ""


def _inside_problem(row: NodeState, container: ContainerState) -> str:
    if not container.ray:
        return "the versions in its container could not be read (docker exec with python3 fails)"
    if not row.gpus_expected:
        return ""
    if container.gpus_seen is None:
        return "nvidia-smi fails in the container (often after a driver update or systemctl daemon-reload)"
    if container.gpus_seen < row.gpus_expected:
        return f"nvidia-smi in the container shows {container.gpus_seen} of {row.gpus_expected} GPUs"
    return ""


def _measured(row: NodeState, node: RayNode | None) -> NodeState:
    if node is None:
        return row
    return replace(
        row,
        address=node.address,
        ray_state=node.state,
        gpus=int(node.gpus),
        cpus=int(node.cpus),
        memory=int(node.memory),
    )


def _answer_problem(answer: RayAnswer) -> list[str]:
    if not answer.error:
        return []
    counted = status_counts(answer.status)
    return [f"Ray on the head does not answer: {answer.error}{counted}"]


def status_counts(text: str) -> str:
    """Return what `ray status` says of nodes and GPUs, in brackets; empty for another text.

    The text is no contract of Ray's, so it is read only where Ray's API does not answer.
    """
    active = re.search(r"^Active:\n(.*?)^Pending:", text, re.MULTILINE | re.DOTALL)
    if active is None:
        return ""
    nodes = sum(int(count) for count in re.findall(r"^ *(\d{1,9}) \S+$", active[1], re.MULTILINE))
    gpus = re.search(r"^ *[\d.]{1,30}/([\d.]{1,30}) GPU", text, re.MULTILINE)
    return f" (by `ray status` {nodes} nodes and {float(gpus[1]) if gpus else 0:g} GPUs)"


def _disagreement(rows: list[NodeState]) -> list[str]:
    """Return where Ray, Python or image are not the same everywhere, with the hosts that differ."""
    problems = []
    for what, field in (("Ray", "ray"), ("Python", "python"), ("image", "image_id")):
        values = {row.name: str(getattr(row, field)) for row in rows if getattr(row, field)}
        if what == "image" and len({row.image_content or row.name for row in rows if row.image_id}) == 1:
            continue
        if len(set(values.values())) > 1:
            (usual, _), *_ = Counter(values.values()).most_common(1)
            odd = ", ".join(f"{name} {_short(value)}" for name, value in values.items() if value != usual)
            problems.append(f"not the same {what} everywhere: {odd}; the others {_short(usual)}")
    return problems


def _short(value: str) -> str:
    return value.removeprefix("sha256:")[:12]
