"""The action that downloads from the Hugging Face hub or its mirror, in a container of the runtime image."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit.hosts.model import Cluster
from clusterkit.provision import docker
from clusterkit.provision.assets.model import NodeAsset
from clusterkit.provision.ray.model import LABEL_CLUSTER, LABEL_ROLE, container_name
from clusterkit.provision.steps.step import Action
from clusterkit.ssh.shell import for_each

FETCH = "fetch"
"""Role label of the container that downloads."""
FETCH_SECONDS = 24 * 3600.0

_SCRIPT = Path(__file__).with_name("hub_fetch.py")
# Addresses of proxies and mirrors may hold passwords. So variables come over stdin: no argument list, no file and no
# `docker inspect` shows them.
_BEGIN = (
    "import json, os, sys; os.environ.update(json.loads(sys.stdin.buffer.readline())); "
    "exec(compile(sys.stdin.buffer.read(), 'hub_fetch.py', 'exec'))"
)


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach the hub."""

    image: str
    endpoint: str = field(default="", repr=False)  # a mirror of it
    token: str = field(default="", repr=False)  # for gated repositories
    ca_file: str = ""  # certificates on the host that replace the image's
    environment: dict[str, str] = field(default_factory=dict, repr=False)  # proxies


def fetch_action(asset: NodeAsset, cluster: Cluster, hub: Hub) -> Action:
    """Return the action that downloads an asset. Run again, it goes on where it was interrupted."""
    request = {
        "repository": asset.source,
        "folder": asset.folder,
        "kind": asset.kind,
        "revision": asset.revision,
    }
    name = container_name(cluster.name, FETCH)
    labels = {LABEL_CLUSTER: cluster.name, LABEL_ROLE: FETCH}
    # Otherwise a mirror answers with addresses of the hub's own block storage.
    mirror = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1"} if hub.endpoint else {}
    library = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    library |= {"HF_HUB_DOWNLOAD_TIMEOUT": "60", "HF_HOME": "/tmp/hf"}
    environment = {**library, **mirror, **hub.environment}
    mounts = [f"type=bind,src={cluster.storage},dst={cluster.storage}"]
    if hub.token:
        environment["HF_TOKEN"] = hub.token
    if hub.ca_file:
        mounts.append(f"type=bind,src={hub.ca_file},dst=/etc/clusterkit-ca.pem,readonly")
        environment.update({"SSL_CERT_FILE": "/etc/clusterkit-ca.pem", "REQUESTS_CA_BUNDLE": "/etc/clusterkit-ca.pem"})
    command = [
        *("run", "--rm", "--interactive", "--init", "--pull", "never", "--network", "host", "--name", name),
        *(part for key, value in labels.items() for part in ("--label", f"{key}={value}")),
        *("--security-opt", "no-new-privileges", "--security-opt", "label=disable"),
        *(part for mount in mounts for part in ("--mount", mount)),
        *("--entrypoint", "python3", hub.image, "-c", _BEGIN, json.dumps(request)),
    ]
    older = docker.ps(*(f"label={key}={value}" for key, value in labels.items()), stopped=True)
    script = (
        "set -eu\n"
        # A download whose SSH connection broke goes on in its container, and nobody reads its output.
        f"{for_each(older, docker.REMOVE)}"
        f"{docker.command(*command)}\n"
    )
    title = f"download {asset.kind} {asset.source} to {asset.folder}"
    stdin = json.dumps(environment).encode() + b"\n" + _SCRIPT.read_bytes()
    return Action(title, script, stdin, timeout=FETCH_SECONDS, retries=2)
