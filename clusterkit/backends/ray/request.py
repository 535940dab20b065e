"""A run as it was typed, in the paths of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterkit.backends.base import RunRequest
from clusterkit.backends.own_code import own_files
from clusterkit.backends.ray.storage import cache_of, fileroot_of
from clusterkit.config.resolve import resolve
from clusterkit.hosts.model import Cluster
from clusterkit.provision.assets.model import required_assets
from clusterkit.provision.steps.step import Refused
from trainer.config import RunConfig
from trainer.errors import UserError


def request_on(cluster: Cluster, preset: str | None, task: str | None, settings: Sequence[str]) -> RunRequest:
    """See `Backend.request`.

    Raises:
        UserError: as `resolve`; a path that the hosts do not share; more hosts wanted than there are.
    """
    typed = resolve(preset, task, settings).config
    try:
        assets = required_assets(typed, cluster)
    except Refused as refusal:
        raise UserError(f"{refusal.message}: {refusal.fix}") from refusal
    resolved = resolve(preset, task, [*settings, *(asset.override for asset in assets)])
    config = on_cluster(resolved.config, cluster, own_fileroot="fileroot" in resolved.settings)
    if config.n_nodes > len(cluster.hosts):
        raise UserError(
            f"preset {preset} takes {config.n_nodes} hosts, and cluster {cluster.name} has {len(cluster.hosts)}: "
            f"clusterkit presets plan {preset} --nodes {len(cluster.hosts)} says how it would fit"
        )
    own_code = own_files(resolved.config)
    return RunRequest(config, resolved.trial_is_named, own_code=own_code, typed=typed, assets=assets)


def on_cluster(config: RunConfig, cluster: Cluster, own_fileroot: bool = False) -> RunConfig:
    """The configuration with the cluster's paths for runs and caches.

    Args:
        config: resolved on this machine.
        own_fileroot: the user chose where runs lie.

    Raises:
        UserError: the chosen place is not on the storage that all hosts share.
    """
    fileroot = config.fileroot if own_fileroot else fileroot_of(cluster)
    if Path(cluster.storage) not in Path(fileroot).parents:
        raise UserError(f"fileroot={fileroot} is not below {cluster.storage}, which is all that the hosts share")
    places = {"mode": "ray", "fileroot": fileroot, "cache_dir": config.cache_dir or cache_of(cluster)}
    places["code_dir"] = ""  # the user's files are packed beside ours, where PYTHONPATH leads
    return config.model_copy(update=places)
