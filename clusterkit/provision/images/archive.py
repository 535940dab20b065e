"""The image as a file on the shared storage: written once, completely or not at all, and loaded by every host."""

from __future__ import annotations

import json
import secrets
import shlex
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from clusterkit.provision import docker
from clusterkit.provision.images.identity import Image, ImageError
from clusterkit.provision.images.meter import PRELUDE, Progress, counter, readable
from clusterkit.ssh.api import Session
from clusterkit.ssh.shell import for_each, pipe

_ABSENT, _DIFFERENT = 44, 45
_SHORT = 120.0
FREE_FACTOR = 1.1
"""Free space that the storage must have, as a multiple of the image's size; compressed it takes about half."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive and the image in it."""

    path: str
    reference: str
    image_id: str
    content: str
    image_size: int
    compression: str  # zstd or gzip
    size: int  # of the file as it was written
    sha256: str  # likewise

    def holds(self, image: Image) -> bool:
        """Return whether it is an archive of this image."""
        return self.image_id == image.image_id or (bool(self.content) and self.content == image.content)


async def archives(session: Session, folder: str) -> list[Archive]:
    """Return the archives of which a folder has a record, the newest first. An unreadable record is ignored."""
    script = f"""[ -d {shlex.quote(folder)} ] || exit 0
cd {shlex.quote(folder)}
set -- *.json
[ -e "$1" ] || exit 0
{for_each('ls -t -- "$@"', 'cat "$id"; echo')}"""
    result = await session.run(script, root=True, timeout=_SHORT)
    found = []
    for line in result.stdout.splitlines():
        try:
            record = json.loads(line)
            # The host that wrote the archive may have the folder under another path.
            found.append(Archive(**{**record, "path": f"{folder}/{PurePosixPath(record['path']).name}"}))
        except (ValueError, TypeError, KeyError):
            continue
    return found


async def has_room(session: Session, folder: str, image: Image) -> bool:
    """Return whether the image certainly fits into the folder."""
    result = await session.run(f"df -Pk {shlex.quote(folder)}", root=True, timeout=_SHORT)
    words = result.stdout.splitlines()[-1].split() if result.ok else []
    return len(words) > 3 and words[3].isdigit() and int(words[3]) * 1024 > image.size * FREE_FACTOR


async def is_whole(session: Session, archive: Archive, *, timeout: float) -> bool:
    """Return whether the file still has the size and SHA-256 of its record."""
    path = shlex.quote(archive.path)
    script = f'size=$(stat -c %s {path})\n[ "$size" = {archive.size} ] || exit {_DIFFERENT}\nexec sha256sum <{path}\n'
    result = await session.run(script, root=True, timeout=timeout)
    return result.ok and result.stdout.split()[:1] == [archive.sha256]


async def write(
    session: Session, image: Image, folder: str, *, zstd: bool = True, progress: Progress | None = None, timeout: float
) -> Archive:
    """Save an image to a folder, under the name of its ID.

    Args:
        zstd: compress with zstd, which every host has that will load it.

    Raises:
        ImageError: the archive could not be written.
    """
    host = session.host.name
    compression = "zstd" if zstd else "gzip"
    name = f"{image.image_id.removeprefix('sha256:')}.tar.{'zst' if zstd else 'gz'}"
    path = f"{folder}/{name}"
    partial = f"{folder}/.{name}.{secrets.token_hex(4)}.partial"
    parts = pipe(
        ("docker save", docker.command("save", image.run_as)),
        ("copying", "moved"),
        ("compressing", "zstd -q -T0 -1" if zstd else "gzip -1"),
        ("writing the archive", 'tee "$partial"'),
        ("adding up", 'sha256sum >"$work/sum"'),
    )
    script = f"""{PRELUDE}
partial={shlex.quote(partial)}
trap 'kill "$ticker" 2>/dev/null || :; rm -rf "$work" "$partial"' EXIT
mkdir -p {shlex.quote(folder)}
find {shlex.quote(folder)} -maxdepth 1 -name '.*.partial' -mmin +1440 -delete 2>/dev/null || :
{parts}chmod 644 "$partial"
sync "$partial"
size=$(stat -c %s "$partial")
sum=$(cat "$work/sum")
mv -f "$partial" {shlex.quote(path)}
echo "@written $size ${{sum%% *}}"
"""
    on_output = counter(host, image.size, progress)
    result = await session.run(script, root=True, timeout=timeout, on_output=on_output)
    written = [line.split() for line in result.stdout.splitlines() if line.startswith("@written ")]
    if not result.ok or not written:
        raise ImageError(
            host,
            f"the image could not be saved to {folder}: {readable(result.stderr) or f'exit code {result.exit_code}'}",
            f"see that {folder} is writable and has {image.size * FREE_FACTOR / 1e9:.0f} GB free, "
            "or distribute the image another way (pull or fanout)",
        )
    _, size, sha256 = written[-1]
    archive = Archive(path, image.reference, image.image_id, image.content, image.size, compression, int(size), sha256)
    # The record is written last: a file without a record is ignored.
    record = f"{folder}/{image.image_id.removeprefix('sha256:')}.json"
    await session.put(json.dumps(asdict(archive)).encode(), record, root=True)
    if progress is not None:
        progress(host, image.size, image.size)
    return archive


async def load(session: Session, archive: Archive, *, progress: Progress | None = None, timeout: float) -> None:
    """Load an archive into a host's Docker.

    Raises:
        ImageError: the host does not see the file as it was written, or cannot load it.
    """
    path = shlex.quote(archive.path)
    unpack = "zstd -q -dc" if archive.compression == "zstd" else "gzip -dc"
    parts = pipe(("reading", f"moved <{path}"), ("decompressing", unpack), ("docker load", "docker load -q"))
    script = f"""{PRELUDE}
[ -f {path} ] || exit {_ABSENT}
size=$(stat -c %s {path})
[ "$size" = {archive.size} ] || exit {_DIFFERENT}
{parts}"""
    on_output = counter(session.host.name, archive.size, progress)
    result = await session.run(script, root=True, timeout=timeout, on_output=on_output)
    if not result.ok:
        reason = {
            _ABSENT: "it is not there: is the storage shared with the host that wrote it?",
            _DIFFERENT: f"it does not have the {archive.size} bytes that were written",
        }.get(result.exit_code, readable(result.stderr) or f"exit code {result.exit_code}")
        error = ImageError(session.host.name, f"{archive.path} cannot be loaded: {reason}", "run setup again")
        if error.disk_full:
            error.fix = "make room where Docker keeps its images (docker system df), then run setup again"
        raise error
    if progress is not None:
        progress(session.host.name, archive.size, archive.size)


async def discard(session: Session, archive: Archive) -> None:
    """Remove a damaged archive and its record."""
    record = archive.path.rsplit(".tar.", 1)[0] + ".json"
    await session.run(f"rm -f {shlex.quote(record)} {shlex.quote(archive.path)}", root=True, timeout=_SHORT)
