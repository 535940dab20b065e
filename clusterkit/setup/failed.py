"""Which hosts of a cluster failed in its last set-up, saved for `setup --retry`."""

from __future__ import annotations

import json
from pathlib import Path

from clusterkit.common.records import json_object
from clusterkit.hosts.folders import state_folder, write_private
from clusterkit.hosts.model import Cluster
from clusterkit.setup.model import Report


def path_of(cluster: str) -> Path:
    """Return the file with the list."""
    return state_folder() / cluster / "failed.json"


def failed_hosts(cluster: Cluster) -> tuple[str, ...]:
    """Return the hosts that failed in their last set-up, in the cluster's order. A damaged list counts as empty."""
    try:
        failed = (json_object(path_of(cluster.name).read_bytes()) or {}).get("failed")
    except OSError:
        return ()
    return tuple(host.name for host in cluster.hosts if isinstance(failed, list) and host.name in failed)


def save_failed(cluster: Cluster, report: Report) -> None:
    """Add the hosts that failed and remove those that are done. Hosts without a report stay as they were.

    Raises:
        OSError: the state folder cannot be written to.
    """
    failed = {host.name for host in report.failed} | (set(failed_hosts(cluster)) - report.hosts.keys())
    names = [host.name for host in cluster.hosts if host.name in failed]
    write_private(path_of(cluster.name), json.dumps({"failed": names}) + "\n")
