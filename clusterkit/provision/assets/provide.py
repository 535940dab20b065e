"""Provide an asset on the head node: check it, download it or copy it. Then compare what other hosts see."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from clusterkit.data.assets import get_asset
from clusterkit.hosts.model import Cluster
from clusterkit.provision.assets.hub import Hub, fetch_action
from clusterkit.provision.assets.model import NodeAsset, Origin
from clusterkit.provision.assets.upload import upload
from clusterkit.provision.assets.view import asset_problem, difference, look, require_usable
from clusterkit.provision.steps.step import Action, Refused
from clusterkit.ssh.api import Session
from clusterkit.ssh.uploads import UploadSlot, unlimited

Apply = Callable[[Sequence[Action]], Awaitable[None]]
"""Runs actions on the host, and raises when one fails."""


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
    """Make sure that the asset is complete on the head node.

    Args:
        say: gets a line about a download onto this machine.
        on_bytes: gets the bytes sent and their total during an upload.

    Returns:
        False where it was complete and nothing was changed.

    Raises:
        Refused: a folder of the user's has that name or cannot be used, or a download ended incomplete.
        UserError, RunError: an asset could not be fetched onto this machine.
    """
    view = await look(session, asset)
    if asset.origin is Origin.HOST:
        require_usable(asset, view)
        return False
    if asset.origin in (Origin.UPLOAD, Origin.CACHE):
        if asset.origin is Origin.CACHE and not asset_problem(asset, view):
            return False  # a name of the catalogue has one content; this machine's copy need not be fetched
        return await upload(session, asset, await _local_folder(asset, say), view, on_bytes, slot)
    if not asset_problem(asset, view):
        return False
    await apply([fetch_action(asset, cluster, hub)])
    if left := asset_problem(asset, await look(session, asset)):
        raise Refused(f"after the download, {left}", "run the same command again; if it stays, remove that folder")
    return True


async def compare(head: Session, other: Session, asset: NodeAsset) -> str:
    """Return how another host's view of the asset differs from the head's; empty where it does not."""
    return difference(*await asyncio.gather(look(head, asset), look(other, asset)))


def planned(asset: NodeAsset) -> str:
    """Return the line of a plan that says how a missing asset would be provided."""
    verb = "download" if asset.origin is Origin.HUB else "copy"
    return f"{verb} {asset.kind} {asset.source or asset.name} to {asset.folder}"


async def _local_folder(asset: NodeAsset, say: Callable[[str], None]) -> Path:
    if asset.origin is Origin.UPLOAD:
        return Path(asset.source)
    record = await asyncio.to_thread(get_asset, asset.source, say=say)
    return Path(record["path"])
