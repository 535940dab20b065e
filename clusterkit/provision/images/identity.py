"""What identifies an image: the reference that the user gives, its ID, its digest in a registry, its content."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from clusterkit.provision import docker
from clusterkit.ssh.api import Session
from trainer.errors import UserError

_REFERENCE = re.compile(r"^(sha256:[0-9a-f]{64}|[a-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?)$")
_ID = re.compile(r"^sha256:[0-9a-f]{64}$")
INSPECT_SECONDS = 60.0


class ImageError(Exception):
    """A host has no usable image, or not the same as the others. `message`: what happened; `fix`: what to do next."""

    def __init__(self, host: str, message: str, fix: str = "") -> None:
        super().__init__(f"{host}: {message}" + (f"\n{fix}" if fix else ""))
        self.host, self.message, self.fix = host, message, fix

    @property
    def disk_full(self) -> bool:
        """Whether the reason is a full disk."""
        return "no space left on device" in self.message.lower()


@dataclass(frozen=True, slots=True)
class Image:
    """An image that a host has."""

    reference: str  # as it was asked for
    image_id: str  # the engine's own: sha256:…
    repo_digest: str = ""  # name@sha256:… in a registry; empty for an image of no registry
    content: str = ""  # hash of layers and settings: the same on engines whose image stores count IDs in another way
    size: int = 0  # bytes
    labels: tuple[tuple[str, str], ...] = ()

    def same_as(self, other: Image) -> bool:
        """Return whether both are one image."""
        return self.image_id == other.image_id or (bool(self.content) and self.content == other.content)

    @property
    def run_as(self) -> str:
        """The argument of `docker run` on every host: the tag, or the ID where the reference is no tag."""
        return self.reference if is_tag(self.reference) else self.image_id


def check_reference(reference: str) -> str:
    """Return the reference. Raises UserError where it is not a reference."""
    if not _REFERENCE.match(reference):
        raise UserError(
            f"{reference!r} is no image reference; expected NAME:TAG, NAME@sha256:… or an image ID sha256:…"
        )
    return reference


def is_tag(reference: str) -> bool:
    """Return whether a reference is a tag, which can be given to an image."""
    return "@" not in reference and not _ID.match(reference)


def is_id(reference: str) -> bool:
    """Return whether a reference is an image ID, which no registry knows."""
    return bool(_ID.match(reference))


def repository(reference: str) -> str:
    """Return the name without tag and digest."""
    name = reference.split("@", 1)[0]
    head, slash, tail = name.rpartition("/")
    return head + slash + tail.split(":", 1)[0]


async def inspect(session: Session, reference: str) -> Image | None:
    """Return an image of a host; None where the host has none of that name.

    Raises:
        ImageError: Docker does not answer.
    """
    check_reference(reference)
    try:
        record = await docker.ask(
            session, "image", "inspect", "--format", "{{json .}}", reference, timeout=INSPECT_SECONDS
        )
    except docker.NotFoundError:
        return None
    except docker.NoAnswerError as error:
        raise ImageError(error.host, error.message, error.fix) from None
    return parse(reference, record)


def parse(reference: str, record: dict[str, Any]) -> Image:
    """Return the image that `docker image inspect` describes."""
    config = record.get("Config") or {}
    layers = (record.get("RootFS") or {}).get("Layers") or []
    labels = config.get("Labels") or {}
    identity = [layers, config.get("Env") or [], labels, config.get("Entrypoint") or [], config.get("Cmd") or []]
    digests = record.get("RepoDigests") or []
    own = [digest for digest in digests if _familiar(digest.split("@")[0]) == _familiar(repository(reference))]
    return Image(
        reference=reference,
        image_id=record["Id"],
        repo_digest=reference if "@" in reference else (own or [""])[0],
        content=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest() if layers else "",
        size=int(record.get("Size") or 0),
        labels=tuple(sorted(labels.items())),
    )


def _familiar(name: str) -> str:
    """Return the short form in which Docker shows names of its default registry."""
    return name.removeprefix("docker.io/").removeprefix("library/")
