"""Read, verify and send the air-gapped bundles that `clusterkit bundle` writes.

A bundle is a folder, or that folder in one .tar file:

    manifest.json                 size and SHA-256 of every other file; releases, sources and images of the bundle
    packages/debian-12/           a package repository that apt or dnf installs from: packages, all their dependencies
                                  and an index (Packages, or repodata/)
    packages/debian-12/SET.names  names of the packages to install for each set: base, docker, toolkit
    images/ID.tar                 image archives as `docker save` writes them
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clusterkit.ssh.api import ErrorKind, HostError, Session
from clusterkit.ssh.uploads import UploadSlot, unlimited
from trainer.disk import file_failure
from trainer.errors import RunError, UserError

MANIFEST = "manifest.json"
HOST_FOLDER = "/var/lib/clusterkit/bundle"
"""Where `send` puts a bundle's packages on a host; the value of `DesiredState.bundle`."""

Say = Callable[[str], None]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BundleFile(_Model):
    """Size in bytes and checksum of one file."""

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class BundleImage(_Model):
    """One image archive."""

    id: str  # the image ID (sha256:…), which `docker load` keeps
    path: str


class Manifest(_Model):
    """What a bundle holds."""

    version: int = 1
    systems: tuple[str, ...] = ()
    docker_source: str = ""  # whose packages of the engine: docker, distribution
    gpus: bool = True
    images: dict[str, BundleImage] = {}
    files: dict[str, BundleFile] = {}


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle in a folder."""

    folder: Path
    manifest: Manifest

    def verify(self) -> None:
        """Compare every file with the manifest.

        Raises:
            RunError: files are missing or damaged; the message names them.
        """
        bad = [path for path, wanted in self.manifest.files.items() if digest(self.folder / path) != wanted]
        if bad:
            raise RunError(
                f"{self.folder}: {len(bad)} file(s) missing or damaged: {', '.join(bad[:5])}\n"
                "Copy the bundle again, or run the `clusterkit bundle` command that made it once more: it fetches only "
                "what is not right."
            )

    def packages(self, system: str) -> dict[str, BundleFile]:
        """Return the files that a host of this release needs, by path within the bundle.

        Raises:
            UserError: the bundle was not built for the release.
        """
        if system not in self.manifest.systems:
            raise UserError(
                f"{self.folder} is a bundle for {', '.join(self.manifest.systems)}, not for {system}\n"
                f"Build one with `clusterkit bundle OUT --os {system}`."
            )
        start = f"packages/{system}/"
        return {path: file for path, file in self.manifest.files.items() if path.startswith(start)}

    def image(self, reference: str) -> tuple[str, Path] | None:
        """Return ID and archive of an image; None where the bundle does not have it."""
        found = self.manifest.images.get(reference)
        return (found.id, self.folder / found.path) if found else None


def load(path: Path, cache: Path) -> Bundle:
    """Open a bundle and verify its files. A .tar file is unpacked under `cache` once.

    Raises:
        UserError: it is no bundle.
        RunError: files are missing or damaged.
    """
    folder = path if path.is_dir() else _unpacked(path, cache)
    bundle = Bundle(folder, _manifest(folder))
    bundle.verify()
    return bundle


async def send(
    session: Session,
    bundle: Bundle,
    system: str,
    *,
    folder: str = HOST_FOLDER,
    on_bytes: Callable[[int], None] | None = None,
    slot: UploadSlot = unlimited,
) -> int:
    """Send the packages for a host's release that the host does not have yet; return the bytes sent.

    Args:
        system: release of the host, such as debian-12.
        folder: on the host; the value of `DesiredState.bundle`.

    Raises:
        UserError: the bundle was not built for the release.
        HostError: as `Session.run`; LOST where the host cannot say what it has.
    """
    files = bundle.packages(system)
    present = await session.run(_present_script(files, folder), root=True, timeout=300.0)
    if not present.ok:
        raise HostError(session.host.name, ErrorKind.LOST, f"{folder} cannot be used: {present.reason}")
    uploaded = set(present.stdout.splitlines())
    missing = {path: file for path, file in files.items() if path not in uploaded}
    sent = 0
    async with slot(session.host.name) if missing else nullcontext():
        for path, file in missing.items():

            def report(part: int, before: int = sent) -> None:
                if on_bytes is not None:
                    on_bytes(before + part)

            await session.put(bundle.folder / path, f"{folder}/{path}", root=True, on_bytes=report)
            sent += file.size
    return sent


def digest(path: Path) -> BundleFile | None:
    """Return size and checksum of a file; None where there is no such file."""
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return BundleFile(size=file.tell(), sha256=sha256)
    except OSError:
        return None


def _present_script(files: dict[str, BundleFile], folder: str) -> str:
    """Return a script that makes the folders and prints the paths of the files that are complete."""
    sums = "".join(f"{file.sha256}  {path}\n" for path, file in files.items())
    folders = sorted({f"{folder}/{PurePosixPath(path).parent}" for path in files})
    return f"""set -eu
umask 022
mkdir -p {" ".join(map(shlex.quote, folders))}
cd {shlex.quote(folder)}
sha256sum -c 2>/dev/null <<'SUMS' | sed -n 's/: OK$//p'
{sums}SUMS
"""


def _manifest(folder: Path) -> Manifest:
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder} is no bundle: it has no {MANIFEST} (`clusterkit bundle` writes one)") from None
    except (OSError, ValidationError) as error:
        raise UserError(f"{folder / MANIFEST} cannot be read: {error}") from None
    escaping = [path for path in manifest.files if PurePosixPath(path).is_absolute() or ".." in path.split("/")]
    if manifest.version != 1 or escaping:
        raise UserError(f"{folder / MANIFEST} is not of a kind that this clusterkit reads; build the bundle again")
    return manifest


def _unpacked(path: Path, cache: Path) -> Path:
    try:
        with tarfile.open(path) as archive:
            first = archive.next()
            # The manifest comes first: it shows whether this bundle is unpacked already.
            file = archive.extractfile(first) if first is not None and first.name == MANIFEST else None
            if file is None:
                raise UserError(f"{path} is no bundle: its first file is not {MANIFEST}")
            manifest = file.read()
            json.loads(manifest)
            target = cache / f"bundle-{hashlib.sha256(manifest).hexdigest()[:16]}"
            if not (target / MANIFEST).exists():
                # The manifest is written last: a folder that has one is complete.
                target.mkdir(parents=True, exist_ok=True)
                archive.extractall(
                    target, [member for member in archive.getmembers() if member.name != MANIFEST], filter="data"
                )
                (target / f".{MANIFEST}").write_bytes(manifest)
                (target / f".{MANIFEST}").replace(target / MANIFEST)
            return target
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such bundle") from None
    except (tarfile.TarError, ValueError) as error:
        raise UserError(f"{path} is no bundle, or it is damaged: {error}") from None
    except OSError as error:
        failure = file_failure(error, cache, "unpack it yourself and name the folder")
        raise type(failure)(f"{path} cannot be unpacked: {failure}") from None
