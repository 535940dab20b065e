"""Where a command goes, this machine or which cluster: decided here for all of them (docs/cluster-runs.md)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from clusterkit.backends.base import Place, RunSelector, folder_of_runs
from clusterkit.cli.runoptions import RunOptions
from clusterkit.hosts import inventory
from clusterkit.provision.ray.current import Current, current
from clusterkit.runs.directory import RunDirectory, last_start, runs, user_name
from clusterkit.runs.holder import holder_of
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output
from trainer.errors import RunError, UserError


class Kind(Enum):
    """What decides where a command goes when the user does not say."""

    ON_A_CLUSTER = "only a cluster can do it"
    HERE = "this machine can do it"
    CLUSTER_FIRST = "the current cluster does it; without one, this machine"
    NEWEST_RUN = "where the run is that was started last"
    LIVING_RUN = "where the run is that is alive"


@dataclass(frozen=True)
class Target:
    """Where a command goes."""

    cluster: str | None  # its name; None for this machine
    note: str = ""  # says so on stderr; empty where the user has said it


def target(kind: Kind, typed: RunOptions, why_here: str = "") -> Target:
    """Where a command goes.

    Args:
        kind: what decides when the user does not say.
        why_here: with Kind.HERE, why this machine does it.

    Raises:
        UserError: two places were named; there are several clusters and none is the current one.
        RunError: runs of this machine and a current cluster that cannot be looked at.
    """
    if typed.cluster is not None and typed.here:
        raise UserError("--here and --cluster NAME are two places: choose one")
    if typed.cluster is not None or typed.here or (typed.fileroot is not None and not is_on_cluster(typed.fileroot)):
        return Target(typed.cluster)
    if kind is Kind.HERE:
        return Target(None, _here_note(why_here))
    now = current()
    if kind is Kind.ON_A_CLUSTER:
        return _some_cluster(now)
    local = _runs_here(kind, typed)
    if now.name:
        alone = Target(now.name, f"on cluster {now.name} ({now.why}; this machine: --here)")
        return _compare_places(kind, typed, now, local[-1]) if local else alone
    if now.ready and not local and not now.here:
        raise UserError(_choose_one(now, "; this machine: --here"))
    clusters = ", ".join(now.ready)
    return Target(None, f"on this machine (clusters: {clusters}; clusterkit use NAME chooses one)" if clusters else "")


def place_of(where: str | HostOptions | None, fileroot: str | None = None) -> Place:
    """The place that a name of a cluster or options of hosts mean; None for this machine."""
    if where is None:
        return Place(fileroot=fileroot)
    return Place("ray", HostOptions(cluster=where) if isinstance(where, str) else where, fileroot)


def slurm_place(on_cluster: bool, here: bool, options: object = None, fileroot: str | None = None) -> Place:
    """Slurm, which --slurm means.

    Args:
        on_cluster: whether a cluster was named, too.
        here: whether --here was.
        options: fields of `SlurmOptions`, of the command that submits.

    Raises:
        UserError: another place was named, too.
    """
    if on_cluster or here:
        raise UserError(f"{'--here' if here else '--cluster NAME'} and --slurm (mode=slurm) are two places: choose one")
    return Place("slurm", fileroot=fileroot, options=options)


def place_of_run(run: RunOptions, kind: Kind = Kind.NEWEST_RUN, hosts: HostOptions | None = None) -> Place:
    """Where a command about one run goes, told on stderr.

    Args:
        kind: what decides when the user does not say; runs of others are on the cluster.
    """
    if hosts is not None and hosts.hostnames is not None:
        if run.here:
            raise UserError("--here and --hostnames are two places: choose one")
        return place_of(hosts, run.fileroot)
    run = run if hosts is None else replace(run, cluster=hosts.cluster)
    cluster = announce(target(kind if run.user is None else Kind.CLUSTER_FIRST, run))
    return place_of(None if cluster is None else replace(hosts or HostOptions(), cluster=cluster), run.fileroot)


def hosts_of_cluster(hosts: HostOptions) -> HostOptions:
    """The hosts that a command means which only a cluster can do."""
    if hosts.hostnames is not None:
        return hosts
    return replace(hosts, cluster=announce(target(Kind.ON_A_CLUSTER, RunOptions(cluster=hosts.cluster))))


def announce(found: Target) -> str | None:
    """Say on stderr where the command goes, unless the user said so; the cluster's name, or None."""
    if found.note:
        output.note(found.note)
    return found.cluster


def checked_user(typed: str | None) -> str:
    """Whose runs are meant: those of --user, else our own. Raises UserError where the name is none."""
    name = user_name() if typed is None else typed
    if not name or name.startswith((".", "-")) or any(sign in name for sign in "/*?[]\n\0"):
        raise UserError(f"--user {name}: this is no name of a user")
    return name


def selector_of(run: RunOptions) -> RunSelector:
    """The run that is meant. Raises UserError where the name of the user is none."""
    return RunSelector(run.experiment, run.trial, None if run.user is None else checked_user(run.user))


def is_on_cluster(folder: str, *, although_here: bool = False) -> bool:
    """Whether a folder is on the current cluster's storage. although_here: also where this machine shows it, too."""
    if not folder.startswith("/") or (Path(folder).exists() and not although_here):
        return False
    try:
        name = current().name
        return bool(name) and folder.startswith(f"{inventory.load(name).storage}/")
    except UserError:
        return False


def _some_cluster(now: Current) -> Target:
    """For commands about clusters themselves; `default` was meant by them before there was a choice."""
    if now.name:
        return Target(now.name, f"on cluster {now.name} ({now.why})")
    kept = inventory.cluster_names()
    if inventory.DEFAULT in kept or not kept:
        return Target(inventory.DEFAULT, f"on cluster {inventory.DEFAULT}" if len(kept) > 1 else "")
    if len(kept) == 1:
        return Target(kept[0], f"on cluster {kept[0]} (the only one)")
    raise UserError(_choose_one(Current("", "", tuple(kept)), ""))


def _choose_one(now: Current, otherwise: str) -> str:
    return (
        f"there are several clusters ({', '.join(now.ready)}), and none is the current one.\n"
        f"Choose it: clusterkit use NAME. For this command alone: --cluster NAME{otherwise}"
    )


def _runs_here(kind: Kind, typed: RunOptions) -> list[RunDirectory]:
    if kind not in (Kind.NEWEST_RUN, Kind.LIVING_RUN):
        return []
    found = runs(folder_of_runs(typed.fileroot), typed.experiment, typed.trial)
    return [run for run in found if holder_of(run)] if kind is Kind.LIVING_RUN else found


def _compare_places(kind: Kind, typed: RunOptions, now: Current, local: RunDirectory) -> Target:
    """Both this machine and the current cluster may have the run: look at the cluster."""
    from clusterkit.backends.ray.backend import RayBackend  # noqa: PLC0415 (asyncssh, only where a cluster is asked)

    name = local.name
    selector = RunSelector(typed.experiment, typed.trial)
    try:
        with RayBackend(place_of(now.name), output.note) as cluster:
            alive = [job.run for job in cluster.living(selector)] if kind is Kind.LIVING_RUN else []
            newest = None if kind is Kind.LIVING_RUN else cluster.newest_run(selector)
    except (RunError, UserError) as error:
        raise RunError(
            f"cluster {now.name} ({now.why}) cannot be looked at: {error}\n"
            f"For the runs of this machine ({name} is one) add --here"
        ) from None
    if alive:
        raise UserError(
            f"two runs are alive: {name} on this machine (--here) and {alive[0]} on cluster {now.name} (--cluster "
            f"{now.name}). Name one of the places"
        )
    if newest is None:
        dead = "alive " if kind is Kind.LIVING_RUN else ""
        return Target(None, f"on this machine (cluster {now.name} has no such run {dead}of yours)")
    remote = newest.run.name
    if newest.started_ago <= time.time() - last_start(local):
        return Target(
            now.name,
            f"on cluster {now.name} ({now.why}), where {remote} was started last; of this machine: {name} (--here)",
        )
    return Target(
        None,
        f"on this machine, where {name} was started last; on cluster {now.name}: {remote} (--cluster {now.name})",
    )


def _here_note(why: str) -> str:
    """Where there is a current cluster, that this machine was taken; a damaged choice matters to nobody here."""
    try:
        now = current()
    except UserError:
        return ""
    return f"on this machine: {why} (on the cluster: --cluster {now.name})" if now.name else ""
