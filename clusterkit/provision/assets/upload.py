"""Copy a folder of this machine to the shared storage, in blocks; a later call goes on after an interruption."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusterkit.data.assets.manifest import MANIFEST, origin, read_manifest
from clusterkit.provision.assets.model import NodeAsset
from clusterkit.provision.assets.view import View, asset_problem
from clusterkit.provision.steps.step import Refused
from clusterkit.ssh.api import ErrorKind, HostError, Result, Session
from clusterkit.ssh.uploads import UploadSlot, unlimited
from trainer.files import LFS_MARK, sha256

BLOCK = 32 << 20
BLOCK_SECONDS = 300.0
HASH_SECONDS = 3600.0

Files = Mapping[str, Mapping[str, Any]]
"""Bytes and SHA-256 by name."""


def local_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return bytes and SHA-256 of the folder's files. Where a size is the manifest's, so is the SHA-256.

    Raises:
        Refused: the folder is empty, or holds Git LFS pointers.
    """
    known = (read_manifest(folder) or {}).get("files", {})
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name == MANIFEST or name.split("/", 1)[0] in (".git", ".cache"):
            continue
        size = path.stat().st_size
        if size < 1024 and path.read_bytes().startswith(LFS_MARK):
            raise Refused(
                f"{path} is a Git LFS pointer, not the file itself",
                f"run git lfs pull in {folder}, or give the repository's name so that the head node downloads it",
            )
        entry = known.get(name, {})
        files[name] = {"bytes": size, "sha256": entry["sha256"] if entry.get("bytes") == size else sha256(path)}
    if not files:
        raise Refused(f"{folder} has no files", "give the folder of a model or data set")
    return files


async def upload(
    session: Session,
    asset: NodeAsset,
    folder: Path,
    view: View,
    on_bytes: Callable[[int, int], None] | None = None,
    slot: UploadSlot = unlimited,
) -> bool:
    """Make the asset's folder on the host a copy of `folder`.

    What arrived before an interruption stays beside the folder and is used again; the folder itself changes last.

    Args:
        on_bytes: gets the bytes that the host has by now, and the total.

    Returns:
        False where the host's folder was a copy already.

    Raises:
        Refused: the host's folder holds something else.
    """
    files = local_files(folder)
    manifest = view.manifest["files"] if view.manifest else None
    if manifest == files and not asset_problem(asset, view):
        return False
    if manifest is not None and manifest != files:
        raise Refused(
            f"{asset.folder} is another copy, made from {view.manifest.get('source') if view.manifest else ''}",
            f"move it away (mv {asset.folder} {asset.folder}.old), or give this one's folder another name",
        )
    complete = [name for name, entry in files.items() if view.sizes.get(name) == entry["bytes"]]
    bad = await _not_matching(session, asset.folder, {name: files[name] for name in complete}) if complete else set()
    good = set(complete) - bad
    if manifest is None and (strange := sorted((set(view.sizes) & set(files)) - good - set(view.pointers))):
        raise Refused(
            f"{asset.folder} was put there by somebody and differs from {folder} ({', '.join(strange[:3])})",
            f"move it away (mv {asset.folder} {asset.folder}.old), or run with {asset.override}",
        )
    missing = {name: entry for name, entry in files.items() if name not in good}
    staging = _staging(asset)
    async with slot(session.host.name):
        await _send_all(session, staging, folder, missing, on_bytes)
    details = {"asset": asset.name, "source": origin(str(folder)), "files": files}
    await _must(session, _publish(asset.folder, staging, list(missing)), json.dumps(details, indent=2).encode() + b"\n")
    return True


async def _send_all(
    session: Session, staging: str, folder: Path, missing: Files, on_bytes: Callable[[int, int], None] | None
) -> None:
    total, done = sum(entry["bytes"] for entry in missing.values()), 0
    for _ in range(2):
        here = await _sizes(session, staging)
        if stray := [name for name in here if name not in missing]:
            await _remove(session, staging, stray)
        done = 0
        for name, entry in missing.items():
            before = done

            def tell(sent: int, before: int = before) -> None:
                if on_bytes is not None:
                    on_bytes(before + sent, total)

            await _send(session, folder / name, f"{staging}/{name}", entry["bytes"], here.get(name, 0), tell)
            done += entry["bytes"]
        bad = await _not_matching(session, staging, missing)
        if not bad:
            return
        # A block was of an earlier, different file: send the file again from its start.
        await _remove(session, staging, sorted(bad))
    raise HostError(
        session.host.name, ErrorKind.WRITE, f"{', '.join(sorted(bad))}: arrives damaged", "check that host's disk"
    )


async def _send(
    session: Session, source: Path, target: str, size: int, present: int, report: Callable[[int], None]
) -> None:
    """Append what the host lacks of a file, block by block."""
    offset = present if present <= size else 0
    quoted, parent = shlex.quote(target), shlex.quote(target.rpartition("/")[0])
    with source.open("rb") as file:
        file.seek(offset)
        while True:
            block = file.read(BLOCK)
            if block or offset == 0:
                script = (
                    f"umask 022\nmkdir -p {parent}\ntouch {quoted}\ntruncate -s {offset} {quoted}\ncat >>{quoted}\n"
                )
                await _must(session, script, block, BLOCK_SECONDS)
            offset += len(block)
            report(offset)
            if not block or offset >= size:
                return


async def _sizes(session: Session, folder: str) -> dict[str, int]:
    quoted = shlex.quote(folder)
    result = await _must(session, f"[ -d {quoted} ] || exit 0\ncd {quoted}\nfind . -type f -printf '%s\\t%P\\n'\n")
    pairs = (line.split("\t", 1) for line in result.stdout.splitlines())
    return {name: int(size) for size, name in pairs}


async def _not_matching(session: Session, folder: str, files: Files) -> set[str]:
    """Return the files that are missing on the host or have another SHA-256 there."""
    listing = "".join(f"{entry['sha256']}  {name}\n" for name, entry in files.items())
    result = await session.run(
        f"cd {shlex.quote(folder)} && sha256sum --check - 2>/dev/null",
        root=True,
        stdin=listing.encode(),
        timeout=HASH_SECONDS,
    )
    fine = {line.removesuffix(": OK") for line in result.stdout.splitlines() if line.endswith(": OK")}
    return set(files) - fine


async def _remove(session: Session, folder: str, names: list[str]) -> None:
    await _must(session, "rm -f -- " + " ".join(shlex.quote(f"{folder}/{name}") for name in names))


async def _must(session: Session, script: str, stdin: bytes = b"", timeout: float = 60.0) -> Result:
    result = await session.run(script, root=True, stdin=stdin, timeout=timeout)
    if not result.ok:
        message = f"the shared storage cannot be written: {result.reason}"
        raise HostError(session.host.name, ErrorKind.WRITE, message, "check its space and rights")
    return result


def _publish(folder: str, staging: str, names: list[str]) -> str:
    """Return a script that moves the sent files into the folder, then writes the manifest from stdin."""
    quoted, beside = shlex.quote(folder), shlex.quote(staging)
    moves = "".join(
        f"mkdir -p {shlex.quote(f'{folder}/{name}'.rpartition('/')[0])}\n"
        f"mv -f {shlex.quote(f'{staging}/{name}')} {shlex.quote(f'{folder}/{name}')}\n"
        for name in names
    )
    return (
        "umask 022\n"
        f"if [ ! -e {quoted} ]; then\nmkdir -p {beside}\nmv {beside} {quoted}\nelse\n:\n{moves}rm -rf {beside}\nfi\n"
        f"cd {quoted}\ncat >.{MANIFEST}.new\nsync .{MANIFEST}.new\nmv -f .{MANIFEST}.new {MANIFEST}\n"
    )


def _staging(asset: NodeAsset) -> str:
    parent, _, name = asset.folder.rpartition("/")
    return f"{parent}/.{name}.partial"
