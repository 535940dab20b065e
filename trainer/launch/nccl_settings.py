"""Settings of NCCL on this node, as `clusterkit check --nccl` found them to work and kept them in its container.

Every rank and server of a run on Ray takes them at its start, but for those that its environment has already. What was
found with other devices than the node has now is not used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FILE = "/run/clusterkit/nccl.json"
"""In the node's container, so that the settings go with it when `clusterkit setup` replaces it."""
FILE_VARIABLE = "CLUSTERKIT_NCCL_FILE"
"""Environment variable that names another file."""
DEVICES = {
    "NCCL_SOCKET_IFNAME": "/sys/class/net",
    "GLOO_SOCKET_IFNAME": "/sys/class/net",
    "NCCL_IB_HCA": "/sys/class/infiniband",
}
"""Settings that name devices, and the folder that has them."""
_NAME = re.compile(r"(?:NCCL|GLOO)_[A-Z0-9_]+")


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """What a node keeps."""

    settings: Mapping[str, str]  # environment variables
    made: float = 0.0  # when they were found, in seconds since 1970

    def as_json(self) -> str:
        """Content of the file."""
        return json.dumps({"settings": dict(self.settings), "made": self.made})


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a node's ranks and servers get."""

    taken: Mapping[str, str] = field(default_factory=dict)  # environment variables that were set
    problem: str = ""  # why what is kept is not used; empty where it is, or where nothing is kept


def parse(text: str) -> KeptSettings | None:
    """Read the content of a file; None where it is no such file."""
    try:
        found = json.loads(text)
        settings = {str(name): str(value) for name, value in found["settings"].items() if _NAME.fullmatch(name)}
        return KeptSettings(settings, float(found["made"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def take(environment: MutableMapping[str, str] = os.environ) -> NodeSettings:
    """Set what this node keeps in the environment, which its own variables stay in; returns what was set."""
    try:
        text = Path(environment.get(FILE_VARIABLE) or FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return NodeSettings()
    except OSError as error:
        return NodeSettings(problem=f"it cannot be read ({error})")
    kept = parse(text)
    if kept is None:
        return NodeSettings(problem="it cannot be read")
    if missing := missing_devices(kept.settings):
        return NodeSettings(problem=f"{', '.join(missing)} is not there any more")
    taken = {name: value for name, value in kept.settings.items() if name not in environment}
    environment.update(taken)
    return NodeSettings(taken)


def missing_devices(settings: Mapping[str, str]) -> list[str]:
    """Devices that the settings name and this machine does not have."""
    named = [
        Path(folder, device.partition(":")[0])
        for setting, folder in DEVICES.items()
        for device in settings.get(setting, "").removeprefix("=").split(",")
        if device
    ]
    return [path.name for path in named if not path.exists()]


def told(settings: Mapping[str, str]) -> str:
    """Settings as they are printed: NAME=VALUE NAME=VALUE."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def log_lines(nodes: Sequence[str], found: Sequence[NodeSettings]) -> tuple[list[str], list[str]]:
    """Lines of a run's log on what its nodes have taken.

    Args:
        nodes: address of each rank's node.
        found: what each rank has taken.

    Returns:
        Information and warnings, one line for all nodes that have the same.
    """
    by_text: dict[str, dict[str, None]] = {}
    problems: dict[str, dict[str, None]] = {}
    for node, one in zip(nodes, found, strict=True):
        if one.taken:
            by_text.setdefault(told(one.taken), {})[node] = None
        if one.problem:
            problems.setdefault(one.problem, {})[node] = None
    return (
        [f"from clusterkit check --nccl on {', '.join(where)}: {text}" for text, where in by_text.items()],
        [
            f"what clusterkit check --nccl kept on {', '.join(where)} is not used: {text}; run it again"
            for text, where in problems.items()
        ],
    )
