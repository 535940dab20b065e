"""The Ray containers of a cluster: names, labels, paths, and the settings that they are started with."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.facts.model import Container, Facts
from clusterkit.provision.ray.ports import Ports
from trainer.errors import UserError

LABEL_CLUSTER = "clusterkit.cluster"
LABEL_ROLE = "clusterkit.role"
LABEL_CONFIG = "clusterkit.config"
"""Hash of the settings that the container was started with."""
LABEL_TOKEN = "clusterkit.token"
"""Fingerprint of the token that it was started with."""
LABEL_GPUS = "clusterkit.gpus"
"""Number of GPUs that Ray was started with."""
LABEL_HEAD = "clusterkit.head"
"""On workers: ID of the head's container. Workers of an old head never join the Ray of a new one."""

HEAD, WORKER = "head", "worker"
NODE_ROLES = (HEAD, WORKER)

NODE_FOLDER = "/etc/clusterkit"
"""Folder on every host, with one folder per cluster."""
LEASE_FILE = "lease"
"""File in the cluster's folder: who works on the cluster at this moment."""
TOKEN_IN_CONTAINER = "/run/clusterkit/ray_token"


@dataclass(frozen=True, slots=True)
class RaySettings:
    """What the Ray of a cluster is started with; the same for all its hosts."""

    cluster: Cluster
    image: str  # reference of the runtime image
    head_address: str  # where the other nodes reach the head
    image_id: str = ""  # empty where it is unknown
    token: str = field(default="", repr=False)  # empty in a plan before the first start
    head_container: str | None = None  # ID; "": there will be a new one; None: unknown, do not compare workers with it
    gpus: bool | None = None  # None: those that a host has; False: none; True: refuse hosts without
    privileged: bool = False
    recreate: bool = False
    shm: int = 0  # bytes of /dev/shm; 0: half of the memory
    ports: Ports = field(default_factory=Ports)
    environment: dict[str, str] = field(default_factory=dict)  # no secrets: `docker inspect` shows them

    def role(self, host: Host) -> str:
        """Head or worker."""
        return HEAD if host.name == self.cluster.head_host.name else WORKER


SMALLEST_SHM = 64 << 20
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def shm_bytes(text: str) -> int:
    """Return the bytes of a size such as 64g, 512m or 1.5t, in powers of 1024 like Docker; 0 for an empty text.

    Raises:
        UserError: it is no size, or too small for Ray.
    """
    if not text:
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise UserError(f"--shm {text}: this is no size; it looks like 64g or 512m")
    size = int(float(found[1]) * (1 << _UNITS[found[2]]))
    if not SMALLEST_SHM <= size <= 1 << 50:
        raise UserError(f"--shm {text}: Ray needs at least 64m, and no host has more than 1024t")
    return size


def container_name(cluster: str, role: str) -> str:
    """Return the name of a container: clusterkit-default-head."""
    return f"clusterkit-{cluster}-{role}"


def node_folder(cluster: str) -> str:
    """Return the folder on a host for this cluster."""
    return f"{NODE_FOLDER}/{cluster}"


def token_file(cluster: str) -> str:
    """Return the file on a host that holds the cluster's Ray token."""
    return f"{node_folder(cluster)}/ray_token"


def fingerprint(token: str) -> str:
    """Return a fingerprint that may be shown: a token has 256 random bits, so its hash reveals nothing."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def node_containers(facts: Facts, cluster: str) -> tuple[Container, ...]:
    """Return this cluster's head and worker containers on the host, running or not."""
    return tuple(
        container
        for container in facts.docker.containers
        if container.labels.get(LABEL_CLUSTER) == cluster and container.labels.get(LABEL_ROLE) in NODE_ROLES
    )


def running_containers(facts: Facts, cluster: str) -> tuple[Container, ...]:
    """Return this cluster's containers that run on the host, of any role."""
    return tuple(
        container
        for container in facts.docker.containers
        if container.state == "running" and container.labels.get(LABEL_CLUSTER) == cluster
    )


def container_with_role(containers: Iterable[Container], role: str) -> Container | None:
    """Return the container of a role; None where there is none."""
    return next((container for container in containers if container.labels.get(LABEL_ROLE) == role), None)
