"""The lock file: which image a cluster runs, so that hosts that are added later get the same one."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterkit.hosts.folders import config_folder, write_private
from clusterkit.provision.images.identity import Image
from clusterkit.ssh.api import Session

FILE = "image.lock.json"


class Lock(BaseModel):
    """The image that a reference meant when the cluster was set up (see `Image`)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    reference: str
    image_id: str
    repo_digest: str = ""
    content: str = ""
    date: str = ""  # of the set-up, in UTC

    @classmethod
    def of(cls, image: Image) -> Lock:
        """Return the lock of an image, with the date of now."""
        return cls(
            reference=image.reference,
            image_id=image.image_id,
            repo_digest=image.repo_digest,
            content=image.content,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def names(self, image: Image) -> bool:
        """Return whether this is the locked image."""
        return self.image_id == image.image_id or (bool(self.content) and self.content == image.content)


def parse(text: str) -> Lock | None:
    """Return the lock that a text describes; None where it is empty or damaged."""
    try:
        return Lock.model_validate_json(text)
    except ValidationError:
        return None


def local_path(cluster: str) -> Path:
    """Return the path of a cluster's lock on this machine."""
    return config_folder() / "clusters" / cluster / FILE


def read_local(cluster: str) -> Lock | None:
    """Return the lock on this machine."""
    path = local_path(cluster)
    return parse(path.read_text(encoding="utf-8")) if path.is_file() else None


async def read_shared(session: Session, storage: str) -> Lock | None:
    """Return the lock on the cluster's storage, which set-ups from other machines see too."""
    result = await session.run(f"cat {shlex.quote(_shared(storage))}", root=True, timeout=30.0)
    return parse(result.stdout) if result.ok else None


async def write(cluster: str, lock: Lock, session: Session, storage: str) -> bool:
    """Write both locks where they are not of this image. Return whether anything was written.

    Raises:
        OSError: the configuration folder cannot be written to.
    """
    text = lock.model_dump_json(indent=2) + "\n"
    changed = False
    if not _same(read_local(cluster), lock):
        write_private(local_path(cluster), text)
        changed = True
    if not _same(await read_shared(session, storage), lock):
        # Where this fails, `put` says why.
        await session.run(f"mkdir -p {shlex.quote(storage)}/clusterkit", root=True, timeout=30.0)
        await session.put(text.encode(), _shared(storage), root=True)
        changed = True
    return changed


def _shared(storage: str) -> str:
    return f"{storage}/clusterkit/{FILE}"


def _same(one: Lock | None, other: Lock) -> bool:
    return one is not None and one.model_copy(update={"date": other.date}) == other
