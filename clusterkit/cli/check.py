"""`clusterkit check`: a verdict on every host, and what to do about each failure. Only `--nccl` leaves something."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.ssh.host_options import HostOptions

app = new_app("Check whether hosts are fit for a cluster; changes nothing on them.")


@app.command(
    examples="""
clusterkit check --hostnames a b c
clusterkit check --preset 7B_n4 --bandwidth
clusterkit check --limit 'gpu-*' --json
"""
)
@takes_hosts
def check(
    *,
    hosts: HostOptions,
    preset: str | None = typer.Option(None, "--preset", metavar="NAME", help="Also: is it enough for this preset?"),
    probes: bool = typer.Option(True, "--probes/--no-probes", help="Try ports and storage between the hosts."),
    bandwidth: bool = typer.Option(False, "--bandwidth", help="Measure storage and network; seconds per host."),
    nccl: bool = typer.Option(False, "--nccl", help="All-reduce over all GPUs; keep for runs what worked."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Check whether hosts are fit for a cluster.

    Looks at every host at once and changes nothing; the probes' own small files are removed again. Only --nccl leaves
    something behind: the NCCL settings that worked, in the containers, for later runs. Exit code: 0 all fine, 1 a
    check failed, 3 some hosts could not be reached, 2 bad usage.
    """
    actions.check.check(hosts, preset, probes=probes, bandwidth=bandwidth, nccl=nccl, as_json=as_json)
