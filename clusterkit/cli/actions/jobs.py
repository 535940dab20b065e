"""`clusterkit jobs`: ask a place what it works on."""

from __future__ import annotations

import time
from collections import Counter

from clusterkit.backends.base import Job
from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import Kind, checked_user, place_of_run, slurm_place
from clusterkit.cli.runoptions import RunOptions
from clusterkit.common.text_plot import columns, duration
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output


def jobs(run: RunOptions, hosts: HostOptions, *, slurm: bool, alive: bool, as_json: bool) -> None:
    """List a user's jobs, and count those of others."""
    whose = checked_user(run.user)
    if slurm:
        place = slurm_place(bool(hosts.cluster or hosts.hostnames), run.here, fileroot=run.fileroot)
    else:
        place = place_of_run(run, Kind.CLUSTER_FIRST, hosts)
    with open_backend(place, output.note) as backend:
        known = [job for job in backend.jobs() if job.alive or not alive]
    found = [job for job in known if job.user == whose]
    others = Counter(job.user or "none that clusterkit knows" for job in known if job.user != whose)
    if others:
        output.note("of others: " + ", ".join(f"{name} ({count})" for name, count in others.items()) + "; --user NAME")
    text = "\n".join(_lines(found)) if found else f"no jobs of {whose} {backend.where or 'on this machine'}"
    output.outcome(text, found, as_json=as_json)


def _lines(found: list[Job]) -> list[str]:
    rows = [["job", "status", "run", "since", "for"]]
    for job in found:
        since, length = "-", "-"
        if job.started is not None:
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started))
            length = duration((job.ended or time.time()) - job.started)
        rows.append([job.submission_id, job.status.lower(), job.run, since, length])
    return columns(rows)
