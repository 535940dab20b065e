"""`clusterkit jobs`: what the cluster's Ray works on, and what it has worked on."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.target import USER_OPTION, checked_user, hosts_of_cluster
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.backends.ray.jobs import Job
    from clusterkit.ssh.selection import Selection

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
@takes_hosts
def jobs(
    *,
    hosts: HostOptions,
    alive: bool = typer.Option(False, "--alive", help="Only those that wait or run."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    user: str | None = USER_OPTION,
) -> None:
    """List your jobs on the cluster's Ray, the oldest first; those of others are counted, and listed with --user.

    Ray forgets them when its head is started anew; the runs themselves stay on the storage. It goes to the current
    cluster (clusterkit use); --cluster NAME names another.
    """
    import asyncio  # noqa: PLC0415

    whose = checked_user(user)
    known = [job for job in asyncio.run(_jobs(select(hosts_of_cluster(hosts)))) if job.alive or not alive]
    found = [job for job in known if job.user == whose]
    others = Counter(job.user or "none that clusterkit knows" for job in known if job.user != whose)
    if others:
        output.note("of others: " + ", ".join(f"{name} ({count})" for name, count in others.items()) + "; --user NAME")
    if as_json:
        output.result_json([_as_dict(job) for job in found])
        return
    output.result("\n".join(_lines(found)) if found else f"no jobs of {whose}")


async def _jobs(selection: Selection) -> list[Job]:
    from clusterkit.backends.ray.head import head_of  # noqa: PLC0415

    async with head_of(selection) as head, head.jobs() as jobs:
        return await jobs.all()


def _as_dict(job: Job) -> dict[str, Any]:
    return {
        "submission_id": job.submission_id,
        "status": job.status,
        "message": job.message,
        "started": job.started or None,
        "ended": job.ended or None,
        **{key: job.metadata.get(key) for key in ("user", "submitted_from", "experiment", "trial", "run_dir")},
    }


def _lines(found: list[Job]) -> list[str]:
    from clusterkit.common.text_plot import duration  # noqa: PLC0415

    rows = [["job", "status", "run", "since", "for"]]
    for job in found:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started)) if job.started else "-"
        length = duration((job.ended or time.time()) - job.started) if job.started else "-"
        rows.append([job.submission_id, job.status.lower(), job.run, since, length])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
