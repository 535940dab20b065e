"""What the Ray containers of a cluster are made of: names, labels, places, and the settings they are started with."""

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
"""Hash of what the container was started with."""
LABEL_TOKEN = "clusterkit.token"
"""Fingerprint of the token that it was started with."""
LABEL_GPUS = "clusterkit.gpus"
"""Number of GPUs that Ray was started with."""
LABEL_HEAD = "clusterkit.head"
"""On workers: ID of the head's container. A new head is a new Ray, which the workers of the old one never join."""

HEAD, WORKER = "head", "worker"
NODE_ROLES = (HEAD, WORKER)

NODE_FOLDER = "/etc/clusterkit"
"""On every host; one folder per cluster in it."""
LEASE_FILE = "lease"
"""In that folder on the head: who works on the cluster at this moment."""
TOKEN_IN_CONTAINER = "/run/clusterkit/ray_token"


@dataclass(frozen=True, slots=True)
class RaySettings:
    """What the Ray of a cluster is started with; the same for all its hosts.

    image: reference of the runtime image; image_id: its ID, where it is known. token: empty where it is not known yet
    (a plan before the first start). head_address: where the other nodes reach the head. head_container: ID of the
    running head's container; "" where it will be a new one; None: unknown, workers are not compared with it.
    gpus: None: those that a host has; False: none; True: a host without is refused. shm: bytes of /dev/shm, 0 for half
    of the memory. environment: for every container; never secrets, `docker inspect` shows them.
    """

    cluster: Cluster
    image: str
    head_address: str
    image_id: str = ""
    token: str = field(default="", repr=False)
    head_container: str | None = None
    gpus: bool | None = None
    privileged: bool = False
    recreate: bool = False
    shm: int = 0
    ports: Ports = field(default_factory=Ports)
    environment: dict[str, str] = field(default_factory=dict)

    def role(self, host: Host) -> str:
        """Head or worker."""
        return HEAD if host.name == self.cluster.head_host.name else WORKER


SMALLEST_SHM = 64 << 20
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def shm_bytes(text: str) -> int:
    """Bytes of a size such as 64g, 512m or 1.5t, in powers of 1024 as Docker counts; 0 for an empty text.

    Raises:
        UserError: it is no such size, or too small for Ray.

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
    """Name of the container: clusterkit-default-head."""
    return f"clusterkit-{cluster}-{role}"


def node_folder(cluster: str) -> str:
    """Folder on a host with what belongs to this cluster."""
    return f"{NODE_FOLDER}/{cluster}"


def token_file(cluster: str) -> str:
    """File on a host that holds the cluster's Ray token."""
    return f"{node_folder(cluster)}/ray_token"


def fingerprint(token: str) -> str:
    """What may be shown of a token (256 random bits, so that its hash tells nothing about it)."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def node_containers(facts: Facts, cluster: str) -> tuple[Container, ...]:
    """Head and worker containers of this cluster on the host, running or not."""
    return tuple(
        container
        for container in facts.docker.containers
        if container.labels.get(LABEL_CLUSTER) == cluster and container.labels.get(LABEL_ROLE) in NODE_ROLES
    )


def container_with_role(containers: Iterable[Container], role: str) -> Container | None:
    """The container of that role."""
    return next((container for container in containers if container.labels.get(LABEL_ROLE) == role), None)
