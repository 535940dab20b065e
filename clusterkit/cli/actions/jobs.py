"""`clusterkit jobs`: ask the cluster's Ray what it works on."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from clusterkit.backends.ray.backend import RayBackend
from clusterkit.backends.ray.jobs import RayJob
from clusterkit.cli.actions.target import checked_user, hosts_of_cluster, place_of
from clusterkit.common.text_plot import columns, duration
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output


def jobs(hosts: HostOptions, user: str | None, *, alive: bool, as_json: bool) -> None:
    """List a user's jobs, and count those of others."""
    whose = checked_user(user)
    with RayBackend(place_of(hosts_of_cluster(hosts)), output.note) as cluster:
        known = [job for job in cluster.jobs() if job.alive or not alive]
    found = [job for job in known if job.user == whose]
    others = Counter(job.user or "none that clusterkit knows" for job in known if job.user != whose)
    if others:
        output.note("of others: " + ", ".join(f"{name} ({count})" for name, count in others.items()) + "; --user NAME")
    if as_json:
        output.result_json([_as_dict(job) for job in found])
        return
    output.result("\n".join(_lines(found)) if found else f"no jobs of {whose}")


def _as_dict(job: RayJob) -> dict[str, Any]:
    return {
        "submission_id": job.submission_id,
        "status": job.status,
        "message": job.message,
        "started": job.started or None,
        "ended": job.ended or None,
        **{key: job.metadata.get(key) for key in ("user", "submitted_from", "experiment", "trial", "run_dir")},
    }


def _lines(found: list[RayJob]) -> list[str]:
    rows = [["job", "status", "run", "since", "for"]]
    for job in found:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started)) if job.started else "-"
        length = duration((job.ended or time.time()) - job.started) if job.started else "-"
        rows.append([job.submission_id, job.status.lower(), job.run, since, length])
    return columns(rows)
