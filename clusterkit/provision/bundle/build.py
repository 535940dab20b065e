"""Build air-gapped bundles: packages with all their dependencies, image archives, and a manifest of all files.

A file that is complete already is not fetched again, so an interrupted build goes on where it ended.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit.common.suggest import did_you_mean
from clusterkit.provision.bundle import packages
from clusterkit.provision.bundle.folder import MANIFEST, BundleFile, BundleImage, Manifest, Say, digest
from clusterkit.provision.steps.systems import SYSTEMS, System
from trainer.disk import file_failure
from trainer.errors import RunError, UserError

_WORK = ".work"  # package lists and unfinished downloads


@dataclass(frozen=True, slots=True)
class Contents:
    """What a bundle will hold."""

    systems: tuple[str, ...]  # names such as debian-12
    images: tuple[str, ...] = ()  # references that `docker save` knows
    sources: packages.Sources = field(default_factory=packages.Sources)
    sets: Mapping[str, tuple[str, ...]] | None = None  # names of packages by set, in place of the usual ones


def build(out: Path, contents: Contents, *, say: Say = lambda _: None) -> Manifest:
    """Write a bundle to `out`: a folder, or one file where the name ends in .tar. Return its manifest.

    Raises:
        UserError: an unknown release, a missing tool, or a folder that is no bundle.
        RunError: a repository, the image store or the disk failed.
    """
    systems = [_system(name) for name in dict.fromkeys(contents.systems)]
    if not systems and not contents.images:
        raise UserError("name at least one operating system (--os debian-12), or an image (--image REF)")
    as_tar = out.suffix == ".tar"
    folder = out.with_name(f"{out.name}.parts") if as_tar else out
    _make_folder(folder)
    try:
        files: list[Path] = []
        for system in systems:
            target = folder / "packages" / system.name
            work = folder / _WORK / system.name
            files += packages.fetch(system, target, work, contents.sources, contents.sets, say)
        images = {reference: _save(reference, folder, say) for reference in dict.fromkeys(contents.images)}
        files += [folder / image.path for image in images.values()]
        manifest = _write_manifest(folder, contents, systems, images, files, say)
        if as_tar:
            _pack(folder, out, manifest)
            shutil.rmtree(folder)
    except OSError as error:
        raise file_failure(error, out, "name another place for it") from None
    return manifest


def _system(name: str) -> System:
    found = next((system for system in SYSTEMS if system.name == name), None)
    if found is None:
        known = [system.name for system in SYSTEMS]
        raise UserError(f"'{name}' is no supported system.{did_you_mean(name, known)}\nSystems: {', '.join(known)}")
    return found


def _make_folder(folder: Path) -> None:
    """Make the folder. Refuse one that is not empty and no bundle of ours."""
    try:
        if folder.exists() and any(folder.iterdir()) and not {MANIFEST, _WORK} & set(os.listdir(folder)):  # noqa: PTH208
            raise UserError(f"{folder} is not empty and no bundle: name another folder")
        (folder / _WORK).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_failure(error, folder, "name another place for it") from None


def _save(reference: str, folder: Path, say: Say) -> BundleImage:
    if reference.startswith("-"):
        raise UserError(f"'{reference}' is no image reference")
    image_id = _image_id(reference)
    if image_id is None:
        say(f"pulling {reference}")
        done = _docker("pull", "--quiet", reference)
        image_id = _image_id(reference)
        if image_id is None:
            raise RunError(f"{reference} is not here and cannot be pulled: {done.stderr.strip()[-500:]}")
    path = f"images/{image_id.partition(':')[2]}.tar"
    target = folder / path
    if not target.exists():
        say(f"saving {reference}")
        target.parent.mkdir(exist_ok=True)
        partial = folder / _WORK / target.name
        done = _docker("save", "--output", str(partial), reference)
        if done.returncode:
            partial.unlink(missing_ok=True)
            raise RunError(f"{reference} cannot be saved: {done.stderr.strip()[-500:]}")
        partial.chmod(0o644)
        partial.replace(target)
    return BundleImage(id=image_id, path=path)


def _image_id(reference: str) -> str | None:
    done = _docker("image", "inspect", "--format", "{{.Id}}", reference)
    return done.stdout.strip() if done.returncode == 0 else None


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("docker") is None:
        raise UserError("docker is not installed here; it is needed to put images into a bundle")
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=7200, check=False)


def _write_manifest(
    folder: Path,
    contents: Contents,
    systems: Sequence[System],
    images: Mapping[str, BundleImage],
    files: Sequence[Path],
    say: Say,
) -> Manifest:
    say(f"checksums of {len(files)} files")
    records: dict[str, BundleFile] = {}
    for path in sorted(set(files)):
        record = digest(path)
        if record is None:
            raise RunError(f"{path} has gone while the bundle was being built; run the command again")
        records[path.relative_to(folder).as_posix()] = record
    manifest = Manifest(
        systems=tuple(system.name for system in systems),
        docker_source=contents.sources.docker_source.replace("auto", "docker"),
        gpus=contents.sources.gpus,
        images=dict(images),
        files=records,
    )
    temporary = folder / f".{MANIFEST}"
    temporary.write_text(json.dumps(manifest.model_dump(), indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / MANIFEST)
    shutil.rmtree(folder / _WORK)
    return manifest


def _pack(folder: Path, out: Path, manifest: Manifest) -> None:
    """Write one .tar file with the manifest first. It is not compressed: packages and images are already."""
    temporary = out.with_name(f".{out.name}.new")
    with tarfile.open(temporary, "w") as archive:
        for path in (MANIFEST, *manifest.files):
            archive.add(folder / path, path)
    temporary.replace(out)
