"""One asset on one host: there already, downloaded, or copied; and whether the other hosts see the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from clusterkit.data.assets import get_asset
from clusterkit.hosts.model import Cluster
from clusterkit.provision.assets.hub import Hub, fetch_action
from clusterkit.provision.assets.model import NodeAsset, Origin
from clusterkit.provision.assets.upload import upload
from clusterkit.provision.assets.view import asset_problem, look, require_usable, unseen
from clusterkit.provision.steps.step import Action, Refused
from clusterkit.ssh.api import Session
from clusterkit.ssh.uploads import UploadSlot, unlimited

Apply = Callable[[Sequence[Action]], Awaitable[None]]
"""Runs actions on the host; raises when one fails."""


async def provide(
    session: Session,
    asset: NodeAsset,
    cluster: Cluster,
    hub: Hub,
    apply: Apply,
    *,
    say: Callable[[str], None] = lambda _: None,
    on_bytes: Callable[[int, int], None] | None = None,
    slot: UploadSlot = unlimited,
) -> bool:
    """Have the asset on the host, the head node; False when it was there and nothing was changed.

    say: told about a download onto this machine. on_bytes: gets bytes sent, and their total, of an upload. slot: where
    an upload waits for its turn.

    Raises:
        Refused: a folder of the user's stands in the way or is not usable, or nothing complete came of a download.
        HostError: the host or the copy failed.
        UserError, RunError: from fetching an asset onto this machine.

    """
    view = await look(session, asset)
    if asset.origin is Origin.HOST:
        require_usable(asset, view)
        return False
    if asset.origin in (Origin.UPLOAD, Origin.CACHE):
        if asset.origin is Origin.CACHE and not asset_problem(asset, view):
            return False  # a name stands for one content, whatever the copy in this machine's cache looks like
        return await upload(session, asset, await _local_folder(asset, say), view, on_bytes, slot)
    if not asset_problem(asset, view):
        return False
    await apply([fetch_action(asset, cluster, hub)])
    if left := asset_problem(asset, await look(session, asset)):
        raise Refused(f"after the download, {left}", "run the same command again; if it stays, remove that folder")
    return True


async def compare(head: Session, other: Session, asset: NodeAsset) -> str:
    """How another host's view of the asset differs from the head's, as a phrase; empty when it does not.

    Raises:
        HostError: a host cannot be asked.

    """
    return unseen(*await asyncio.gather(look(head, asset), look(other, asset)))


def planned(asset: NodeAsset) -> str:
    """What would be done where the asset is missing: a line for a plan."""
    verb = "download" if asset.origin is Origin.HUB else "copy"
    return f"{verb} {asset.kind} {asset.source or asset.name} to {asset.folder}"


async def _local_folder(asset: NodeAsset, say: Callable[[str], None]) -> Path:
    if asset.origin is Origin.UPLOAD:
        return Path(asset.source)
    record = await asyncio.to_thread(get_asset, asset.source, say=say)
    return Path(record["path"])
