"""Look at a cluster once: its containers on each host, and the nodes and jobs of its Ray."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterkit.common.records import json_object
from clusterkit.provision import docker
from clusterkit.provision.images.identity import parse
from clusterkit.provision.ray.model import HEAD, LABEL_CLUSTER, LABEL_GPUS, LABEL_ROLE, NODE_ROLES
from clusterkit.provision.ray.ports import Ports
from clusterkit.ssh.api import HostError, Result, Session, or_error
from clusterkit.ssh.shell import first_of, for_each

LOOK_SECONDS = 90.0
LOG_LINES = 15

_PROBE = Path(__file__).with_name("container_probe.py")
_FORMAT = (
    '{"id":{{json .Id}},"name":{{json .Name}},"image":{{json .Image}},"reference":{{json .Config.Image}},'
    '"state":{{json .State.Status}},"exit":{{json .State.ExitCode}},"labels":{{json .Config.Labels}}}'
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOG, _INFO, _IMAGE = "@@log", "@@inside", "@@image"


@dataclass(frozen=True, slots=True)
class ContainerState:
    """A container with the cluster's label, as its host shows it."""

    id: str
    name: str
    role: str
    state: str
    exit_code: int
    image_id: str
    image: str
    labels: dict[str, str]
    content: str = ""  # of its image, as `Image.content`: engines count IDs in two ways
    log: tuple[str, ...] = ()  # last lines of a container that does not run
    ray: str = ""
    python: str = ""
    gpus_seen: int | None = None
    node_ids: tuple[str, ...] | None = None  # of the Ray node in it, as in Ray's list; None: nobody asked

    @property
    def running(self) -> bool:
        """Whether its main process runs."""
        return self.state == "running"

    @property
    def gpus(self) -> int:
        """GPUs that Ray was started with."""
        return int(self.labels.get(LABEL_GPUS) or 0)

    @property
    def phrase(self) -> str:
        """The state in a table."""
        return f"exited ({self.exit_code})" if self.state == "exited" else self.state


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node as Ray lists it."""

    name: str
    address: str
    state: str
    head: bool
    cpus: float
    gpus: float
    memory: float  # bytes
    id: str = ""


UNKNOWN = "unknown"
"""User of a job that was not submitted with clusterkit."""


@dataclass(frozen=True, slots=True)
class RayAnswer:
    """What Ray's API says."""

    version: str = ""
    nodes: tuple[RayNode, ...] = ()
    jobs: tuple[str, ...] = ()  # that wait or run
    error: str = ""  # why Ray did not answer
    status: str = field(default="", repr=False)  # of `ray status`, where Ray did not answer
    users: dict[str, str] = field(default_factory=dict)  # who submitted each job

    def alive(self) -> dict[str, RayNode]:
        """Return the living nodes by name; of several with one name, the last that Ray lists."""
        return {node.name: node for node in self.nodes if node.state == "ALIVE"}

    def find(self, name: str, ids: tuple[str, ...] | None) -> RayNode | None:
        """Return the living node of a name; of several, the one with one of these IDs."""
        found = [node for node in self.nodes if node.state == "ALIVE" and node.name == name]
        return next((node for node in found if ids and node.id in ids), found[-1] if found else None)


async def containers_on(session: Session, cluster: str, inside: bool = False) -> tuple[ContainerState, ...]:
    """Return the cluster's containers on a host. inside: also ask running Ray nodes for versions and GPUs.

    Raises:
        HostError: the host could not be asked, or Docker is there and does not answer.
    """
    stdin = _PROBE.read_bytes() if inside else b""
    result = await session.run(_containers_script(cluster, inside), root=True, stdin=stdin, timeout=LOOK_SECONDS)
    if not result.ok:
        raise docker.no_answer(session.host.name, result)
    return parse_containers(result.stdout)


async def ask_ray(session: Session, cluster: str, ports: Ports | None = None) -> RayAnswer:
    """Ask the head's Ray about its nodes and jobs. session: of the head's host.

    Raises:
        HostError: the host could not be asked. Where Ray does not answer, `RayAnswer.error` says why.
    """
    heads = docker.ps(_label(cluster), f"label={LABEL_ROLE}={HEAD}")
    script = (
        f"{first_of(heads)}"
        "[ -n \"$id\" ] || { echo 'the head container does not run' >&2; exit 1; }\n"
        f'exec docker exec --interactive "$id" python3 - head {(ports or Ports()).dashboard}\n'
    )
    result = await session.run(script, root=True, stdin=_PROBE.read_bytes(), timeout=LOOK_SECONDS)
    return parse_answer(result)


async def log_tail(session: Session, container: str) -> tuple[str, ...]:
    """Return the last lines that a container printed; none where the host cannot be asked."""
    try:
        result = await session.run(
            f"{docker.command('logs', '--tail', str(LOG_LINES), container)} 2>&1", root=True, timeout=LOOK_SECONDS
        )
    except HostError:
        return ()
    return _lines(result.stdout)


async def containers_everywhere(
    sessions: Mapping[str, Session], cluster: str, inside: bool = False
) -> tuple[dict[str, tuple[ContainerState, ...]], dict[str, HostError]]:
    """Return `containers_on` for all hosts, and the errors of hosts that could not be asked."""
    asked = [or_error(containers_on(session, cluster, inside)) for session in sessions.values()]
    answers = dict(zip(sessions, await asyncio.gather(*asked), strict=True))
    found = {name: answer for name, answer in answers.items() if not isinstance(answer, HostError)}
    return found, {name: answer for name, answer in answers.items() if isinstance(answer, HostError)}


def _label(cluster: str) -> str:
    return f"label={LABEL_CLUSTER}={cluster}"


def _containers_script(cluster: str, inside: bool) -> str:
    roles = "|".join(NODE_ROLES)
    ask = (
        f'  case $role in {roles}) printf "{_INFO} "\n'
        # Where it does not answer, its versions stay empty.
        '    docker exec --interactive "$id" python3 - node <&3 2>/dev/null || echo null;;\n'
        "  esac\n"
        if inside
        else ""
    )
    # There is at most one running node a host, so stdin is read once.
    state = f'{{{{.State.Running}}}} {{{{.Image}}}} {{{{index .Config.Labels "{LABEL_ROLE}"}}}}'
    # A container may outlive what Docker knows of its image.
    image = "docker image inspect --format '{{json .}}' \"${image%% *}\" 2>/dev/null || echo null"
    look = (
        f'if ! {{ docker inspect --format {shlex.quote(_FORMAT)} "$id" &&\n'
        f'  state=$(docker inspect --format {shlex.quote(state)} "$id"); }}; then\n'
        '  gone "$id"\n'
        "  continue\n"
        "fi\n"
        "role=${state#* * } image=${state#* }\n"
        f"printf '{_IMAGE} '; {image}\n"
        'if [ "${state%% *}" = true ]; then\n'
        f"  :\n{ask}"
        "else\n"
        # Its last lines help, but are not needed.
        f'  echo {_LOG}; docker logs --tail {LOG_LINES} "$id" 2>&1 || :; echo; echo {_LOG}\n'
        "fi\n"
    )
    return (
        "exec 3<&0 </dev/null\n"
        "command -v docker >/dev/null || exit 0\n"
        # A container that was removed meanwhile is left out; an engine that stops answering is an error.
        'gone() { left=$(docker ps --all --quiet --filter "id=$1") && [ -z "$left" ]; }\n'
    ) + for_each(docker.ps(_label(cluster), stopped=True, whole_ids=True), look)


def parse_containers(text: str) -> tuple[ContainerState, ...]:
    """Return the containers that the script printed."""
    found: list[dict[str, Any]] = []
    in_log = False
    for line in text.splitlines():
        if line == _LOG:
            in_log = not in_log
        elif in_log:
            found[-1]["log"].append(line)
        elif line.startswith(_IMAGE):
            found[-1]["content"] = parse("", json_object(line.removeprefix(_IMAGE)) or {"Id": ""}).content
        elif line.startswith(_INFO):
            found[-1]["inside"] = json_object(line.removeprefix(_INFO)) or {}
        elif record := json_object(line):
            found.append({**record, "log": [], "inside": {}, "content": ""})
    return tuple(_container(record) for record in found)


def _container(record: dict[str, Any]) -> ContainerState:
    labels, inside = record["labels"] or {}, record["inside"]
    return ContainerState(
        id=record["id"],
        name=record["name"].lstrip("/"),
        role=labels.get(LABEL_ROLE, ""),
        state=record["state"],
        exit_code=record["exit"],
        image_id=record["image"],
        image=record["reference"],
        labels=labels,
        content=record["content"],
        log=_lines("\n".join(record["log"])),
        ray=inside.get("ray", ""),
        python=inside.get("python", ""),
        gpus_seen=inside.get("gpus"),
        node_ids=tuple(inside["node_ids"]) if "node_ids" in inside else None,
    )


def parse_answer(result: Result) -> RayAnswer:
    """Return the answer that container_probe.py printed in the head's container, or why there is none."""
    answer = next((found for line in reversed(result.stdout.splitlines()) if (found := json_object(line))), None)
    if answer is None:
        last = _lines(result.stderr)[-1:]
        return RayAnswer(error=last[0] if last else f"no answer (exit code {result.exit_code})")
    if "error" in answer:
        return RayAnswer(error=answer["error"], status=answer.get("status", ""))
    nodes = []
    for node in answer["nodes"]:
        total = node.get("resources_total") or {}
        cpus, gpus, memory = (float(total.get(key, 0)) for key in ("CPU", "GPU", "memory"))
        name, address = str(node.get("node_name", "")), str(node["node_ip"])
        head, its_id = bool(node.get("is_head_node")), str(node.get("node_id", ""))
        nodes.append(RayNode(name, address, str(node["state"]), head, cpus, gpus, memory, its_id))
    users = {
        str(job.get("submission_id") or job.get("job_id")): str((job.get("metadata") or {}).get("user") or UNKNOWN)
        for job in answer["jobs"]
        if job.get("status") in ("PENDING", "RUNNING")
    }
    return RayAnswer(str(answer["ray"]), tuple(nodes), tuple(users), users=users)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line for line in _COLOURS.sub("", text).splitlines() if line.strip())
