"""`clusterkit down --forget`: forget a cluster whose hosts are gone for good; no host is asked or changed."""

from __future__ import annotations

import sys

import typer

from clusterkit.cli.actions.target import hosts_of_cluster
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster
from clusterkit.provision.cluster_lock import local_lock
from clusterkit.provision.ray.current import forget as forget_choice
from clusterkit.provision.ray.model import LABEL_CLUSTER, node_folder
from clusterkit.setup.command import path_of as failures_of
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output
from trainer.errors import UserError


def forget(hosts: HostOptions, *, yes: bool, users: list[str], as_json: bool) -> None:
    """Show what may still run, ask, and remove what this machine keeps of the cluster."""
    chosen = {"--hostnames": hosts.hostnames, "--limit": hosts.limit, "--exclude": hosts.exclude, "--user": users}
    if typed := [name for name, value in chosen.items() if value]:
        raise UserError(f"--forget means a whole cluster and touches no host: leave {' and '.join(typed)} out")
    if yes and hosts.cluster is None:
        raise UserError("-y asks no questions: name the cluster that is to be forgotten with --cluster NAME")
    if as_json and not yes:
        raise UserError("--json asks no questions: add -y")
    cluster = inventory.load(hosts_of_cluster(hosts).cluster or inventory.DEFAULT)
    output.note("\n".join(_left_behind(cluster)))
    if not yes and not _agreed(cluster.name):
        output.note("nothing was forgotten")
        raise typer.Exit(1)
    with local_lock(cluster.name, "down"):
        if inventory.load(cluster.name) != cluster:  # somebody has set it up anew meanwhile
            raise UserError(
                f"cluster {cluster.name} has changed meanwhile: give the command again to see what it is now"
            )
        removed = [str(path) for path in inventory.remove(cluster.name)]
        # A new cluster of that name begins without the failures of this one.
        failures_of(cluster.name).unlink(missing_ok=True)
        if forget_choice(cluster.name):
            output.note(f"{cluster.name} is no longer the current cluster")
    names = [host.name for host in cluster.hosts]
    output.outcome(
        f"forgot cluster {cluster.name}; no host was touched",
        {"cluster": cluster.name, "removed": removed, "not_touched": names},
        as_json=as_json,
    )


def _left_behind(cluster: Cluster) -> list[str]:
    names = " ".join(host.name for host in cluster.hosts)
    name = f" --cluster {cluster.name}" if cluster.name != inventory.DEFAULT else ""
    return [
        f"no host of cluster {cluster.name} is asked or changed. Where one is alive, these go on: {names}",
        f"  containers with the label {LABEL_CLUSTER}={cluster.name}: Ray, its jobs (runs, servers) and their GPUs",
        f"  the folder {node_folder(cluster.name)}, and what is on the storage {cluster.storage}",
        "This machine forgets the hosts' names, Ray's token and the choices of setup. Should a host come back:",
        f"  clusterkit down --hostnames HOST{name}",
    ]


def _agreed(name: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError("stdin is no terminal to ask on: add -y to forget the cluster")
    return typer.confirm(f"Forget cluster {name}?", default=False, err=True)
