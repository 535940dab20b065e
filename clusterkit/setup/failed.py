"""Which hosts of a cluster failed in its last set-up, kept for `setup --retry`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

from clusterkit.hosts.folders import state_folder, write_private
from clusterkit.hosts.model import Cluster
from clusterkit.setup.model import Report


def path_of(cluster: str) -> Path:
    """Where the list is kept."""
    return state_folder() / cluster / "failed.json"


def failed_hosts(cluster: Cluster) -> tuple[str, ...]:
    """Hosts of the cluster that failed when they were last set up, in its order; a damaged list is an empty one."""
    known = _read(cluster.name)
    return tuple(host.name for host in cluster.hosts if host.name in known)


def save_failed(cluster: Cluster, report: Report) -> None:
    """Add who failed, take out who got through; hosts that were not worked on stay as they were.

    Raises:
        OSError: the state folder cannot be written to.

    """
    now = {host.name for host in report.failed}
    left = set(failed_hosts(cluster)) - report.hosts.keys()
    _write(cluster.name, (host.name for host in cluster.hosts if host.name in now | left))


def _read(cluster: str) -> Collection[str]:
    try:
        found = json.loads(path_of(cluster).read_text(encoding="utf-8"))["failed"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return {str(name) for name in found} if isinstance(found, list) else ()


def _write(cluster: str, names: Iterable[str]) -> None:
    write_private(path_of(cluster), json.dumps({"failed": list(names)}) + "\n")
