"""`clusterkit train --cluster`: a preset onto a cluster that has what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from clusterkit.backends.own_code import own_files
from clusterkit.backends.ray.head import Head, head_of
from clusterkit.backends.ray.stage_inputs import InputStager
from clusterkit.backends.ray.submit import RunRequest, SubmittedRun, dispatch, on_cluster
from clusterkit.config.resolve import Resolved, resolve
from clusterkit.hosts.model import Cluster
from clusterkit.provision.assets.model import JUDGE, NodeAsset, Origin, required_assets
from clusterkit.provision.assets.view import asset_problem, look
from clusterkit.provision.cluster_lock import local_lock, remote_lease
from clusterkit.provision.steps.step import Refused
from trainer.errors import UserError

if TYPE_CHECKING:
    from clusterkit.ssh.selection import Selection


def order_of(
    cluster: Cluster, preset: str | None, task: str | None, overrides: Sequence[str]
) -> tuple[RunRequest, tuple[NodeAsset, ...], Resolved]:
    """The run that a command means on this cluster, what it needs there, and the configuration as typed.

    Raises:
        UserError: as `resolve`; a path that the hosts do not share; more hosts wanted than there are.

    """
    wanted = resolve(preset, task, overrides)
    try:
        assets = required_assets(wanted.config, cluster)
    except Refused as refusal:
        raise UserError(f"{refusal.message}: {refusal.fix}") from refusal
    resolved = resolve(preset, task, [*overrides, *(asset.override for asset in assets)])
    config = on_cluster(resolved.config, cluster, own_fileroot="fileroot" in resolved.settings)
    if config.n_nodes > len(cluster.hosts):
        raise UserError(
            f"preset {preset} takes {config.n_nodes} hosts, and cluster {cluster.name} has {len(cluster.hosts)}: "
            f"clusterkit presets plan {preset} --nodes {len(cluster.hosts)} says how it would fit"
        )
    return RunRequest(cluster, config, resolved.trial_is_named, own_code=own_files(resolved.config)), assets, wanted


async def train(
    selection: Selection, order: RunRequest, assets: Sequence[NodeAsset], say: Callable[[str], None]
) -> SubmittedRun:
    """Start the run, or attach to it; a model or data set that is not on the storage is brought there first.

    Raises:
        UserError: it cannot be had, or somebody else sets the cluster up. RunError, HostError: as `dispatch`, or a
            download or a copy failed.

    """
    async with head_of(selection) as head:
        await have_assets(head, assets, say)
        return await dispatch(head.session, order, head.token, say=say)


async def have_assets(head: Head, assets: Sequence[NodeAsset], say: Callable[[str], None]) -> None:
    """Have all models and data sets of a run on the storage, except the model of its judge.

    Raises:
        UserError: one cannot be had, or somebody else sets the cluster up. RunError, HostError: a download or a copy
            failed.

    """
    missing = []
    for asset in assets:
        if asset.setting == JUDGE:  # whoever serves it needs it; that may be another machine
            continue
        if said := asset_problem(asset, await look(head.session, asset)):
            if asset.origin is Origin.HOST:
                raise UserError(f"{asset.kind} {asset.name} is not on the cluster: {said}")
            missing.append(asset)
    if not missing:
        return
    # A download ends the one that is under way: one command at a time, as with a set-up, which downloads the same.
    with local_lock(head.cluster.name, "train") as owner:
        async with remote_lease(owner, [head.session]) as refused:
            for error in refused.values():
                raise error
            for asset in missing:
                await InputStager(head, say, "").provide(asset)
