"""The action that downloads from the Hugging Face hub, or a mirror of it, within the runtime container."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit.hosts.model import Cluster
from clusterkit.node_assets.model import NodeAsset
from clusterkit.raycluster.model import LABEL_CLUSTER, LABEL_ROLE, container_name, node_folder
from clusterkit.steps.api import Action

FETCH = "fetch"
"""Role of the container that downloads."""
FETCH_SECONDS = 24 * 3600.0
TOKEN_IN_CONTAINER = "/run/clusterkit/hf_token"

_SCRIPT = Path(__file__).with_name("hub_fetch.py")


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach the hub. token: for gated repositories. ca_file: certificates on the host that replace the image's.

    environment: proxies.
    """

    image: str
    endpoint: str = ""
    token: str = field(default="", repr=False)
    ca_file: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def fetch_action(asset: NodeAsset, cluster: Cluster, hub: Hub, files: Sequence[str] = ()) -> Action:
    """Download from the hub within the runtime container. Run again, it goes on where it was interrupted.

    files: only these of the repository.
    """
    order = {
        "repository": asset.source,
        "folder": asset.folder,
        "kind": asset.kind,
        "revision": asset.revision,
        "files": list(files),
    }
    name = container_name(cluster.name, FETCH)
    labels = {LABEL_CLUSTER: cluster.name, LABEL_ROLE: FETCH}
    # A mirror hands out addresses of the hub's own block storage otherwise.
    mirror = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1"} if hub.endpoint else {}
    environment = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": "/tmp/hf", **mirror, **hub.environment}
    mounts = [f"type=bind,src={cluster.storage},dst={cluster.storage}"]
    token = f"{node_folder(cluster.name)}/hf_token"
    if hub.token:
        mounts.append(f"type=bind,src={token},dst={TOKEN_IN_CONTAINER},readonly")
        environment["HF_TOKEN_PATH"] = TOKEN_IN_CONTAINER
    if hub.ca_file:
        mounts.append(f"type=bind,src={hub.ca_file},dst=/etc/clusterkit-ca.pem,readonly")
        environment.update({"SSL_CERT_FILE": "/etc/clusterkit-ca.pem", "REQUESTS_CA_BUNDLE": "/etc/clusterkit-ca.pem"})
    command = [
        *("docker", "run", "--rm", "--interactive", "--init", "--pull", "never", "--network", "host", "--name", name),
        *(part for key, value in labels.items() for part in ("--label", f"{key}={value}")),
        *("--security-opt", "no-new-privileges", "--security-opt", "label=disable"),
        *(part for mount in mounts for part in ("--mount", mount)),
        *(part for key, value in environment.items() for part in ("--env", f"{key}={value}")),
        *("--entrypoint", "python3", hub.image, "-", json.dumps(order)),
    ]
    filters = " ".join(f"--filter label={key}={value}" for key, value in labels.items())
    script = (
        "umask 077\n"
        # A download whose SSH connection broke goes on in its container, and nobody hears it.
        f'for id in $(docker ps --all --quiet {filters}); do docker rm --force "$id" >/dev/null; done\n'
        f"{_token_script(token) if hub.token else ''}"
        f"umask 022\n{shlex.join(command)}\n"
    )
    stdin = (hub.token + "\n").encode() if hub.token else b""
    title = f"download {asset.kind} {asset.source} to {asset.folder}"
    return Action(title, script, stdin + _SCRIPT.read_bytes(), timeout=FETCH_SECONDS, retries=2)


def _token_script(token: str) -> str:
    """Take the first line of stdin into a file that lives as long as the script; the rest stays for the container."""
    return (
        f"mkdir -p {token.rpartition('/')[0]}\n"
        f"trap 'rm -f {token}' EXIT\ntrap 'exit 1' HUP INT TERM\n"
        f"IFS= read -r secret\nprintf '%s' \"$secret\" >{token}\nunset secret\n"
    )
