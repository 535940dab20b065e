"""What a host sees of an asset's folder, and whether the asset is complete."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterkit.common.records import json_object
from clusterkit.data.assets.manifest import MANIFEST
from clusterkit.provision.assets.model import NodeAsset, Origin
from clusterkit.provision.steps.step import Refused
from clusterkit.ssh.api import ErrorKind, HostError, Session
from trainer.adapter_folder import CONFIG, WEIGHTS

_ABSENT = 3
LOOK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class View:
    """What a host sees of an asset's folder."""

    exists: bool
    sizes: dict[str, int] = field(default_factory=dict)  # bytes by file
    pointers: tuple[str, ...] = ()  # files that are Git LFS pointers
    manifest: dict[str, Any] | None = None


async def look(session: Session, asset: NodeAsset) -> View:
    """Return what a host sees of the asset's folder.

    Raises:
        HostError: the host could not be asked, or the storage does not answer.
    """
    folder = shlex.quote(asset.folder)
    script = (
        f"[ -d {folder} ] || exit {_ABSENT}\ncd {folder}\n"
        f"if [ -e {MANIFEST} ]; then cat {MANIFEST}; else echo null; fi\n"
        "echo @@sizes\n"
        # Unfinished downloads and version control are no part of the asset.
        r"find . -ignore_readdir_race -name .git -prune -o -name .cache -prune -o -type f -printf '%s\t%P\n'"
        "\necho @@pointers\n"
        "find . -ignore_readdir_race -name .git -prune -o -type f -size -3 "
        # grep ends with 1 where no file has the line.
        """-exec sh -c 'grep -l -a -s "^version https://git-lfs.github.com/spec/" "$@" || [ $? = 1 ]' sh {} +\n"""
    )
    result = await session.run(script, root=True, timeout=LOOK_SECONDS)
    if result.exit_code == _ABSENT:
        return View(False)
    if not result.ok:
        message = f"{asset.folder} cannot be looked at: {result.reason}"
        raise HostError(session.host.name, ErrorKind.LOST, message, "look at the storage's mount and its rights there")
    return parse_view(result.stdout)


def parse_view(text: str) -> View:
    """Read what the script of `look` printed."""
    manifest, _, rest = text.partition("@@sizes\n")
    sizes, _, pointers = rest.partition("@@pointers\n")
    found = dict(line.split("\t", 1)[::-1] for line in sizes.splitlines() if "\t" in line)
    record = json_object(manifest)
    return View(
        True,
        {name: int(size) for name, size in found.items() if name != MANIFEST},
        tuple(sorted(line.removeprefix("./") for line in pointers.splitlines())),
        record if record is not None and isinstance(record.get("files"), dict) else None,
    )


def asset_problem(asset: NodeAsset, view: View) -> str:
    """Return why the folder cannot be used, as a phrase; empty where it is complete."""
    if not view.exists or not view.sizes:
        return f"{asset.folder} is not there"
    if view.pointers:
        return f"{_some(view.pointers)} in {asset.folder}: Git LFS pointers in place of files"
    if asset.origin is Origin.HOST:
        lacks = asset.kind == "model" and "config.json" not in view.sizes and not holds_adapter(view)
        return f"{asset.folder} is no model: it has no config.json" if lacks else ""
    if view.manifest is None:
        return f"{asset.folder} has no manifest: an interrupted copy, or one that was put there by hand"
    files = view.manifest["files"]
    damaged = [name for name, entry in files.items() if view.sizes.get(name) != entry["bytes"]]
    return f"{_some(damaged)} in {asset.folder}: missing or of another size" if damaged else ""


def holds_adapter(view: View) -> bool:
    """Return whether a folder holds a low-rank adapter and no whole model; see `trainer.adapter_folder`."""
    return {CONFIG, WEIGHTS} <= view.sizes.keys() and not any(
        name.startswith("model.safetensors") for name in view.sizes
    )


def difference(head: View, other: View) -> str:
    """Return how a host's view of a folder differs from the head's, as a phrase; empty where it does not."""
    if not other.exists:
        return "it is there on the head node and not here: is the storage really shared?"
    missing = [name for name, size in head.sizes.items() if other.sizes.get(name) != size]
    return f"{_some(missing)} missing or different here: is the storage really shared?" if missing else ""


def require_usable(asset: NodeAsset, view: View) -> None:
    """Raise Refused where a folder of the user's own cannot be used as it is."""
    reason = asset_problem(asset, view)
    if asset.origin is not Origin.HOST or not reason:
        return
    fix = f"run git lfs pull in {asset.folder}" if view.pointers else "put it there, or name another one"
    raise Refused(reason, fix)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
