"""What an image is: its reference as the user gives it, its ID, its digest in a registry, its content."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from clusterkit.provision import docker
from clusterkit.provision.images.errors import ImageError
from clusterkit.ssh.api import Session
from trainer.errors import UserError

_REFERENCE = re.compile(r"^(sha256:[0-9a-f]{64}|[a-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?)$")
_ID = re.compile(r"^sha256:[0-9a-f]{64}$")
INSPECT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Image:
    """An image that a host has.

    reference: as asked for. image_id: the engine's own (sha256:…). repo_digest: name@sha256:… in a registry, empty for
    an image that no registry has. content: hash of its layers and settings, the same wherever its ID is not, because
    engines with another image store count IDs in another way. size: bytes. labels: those that it carries.
    """

    reference: str
    image_id: str
    repo_digest: str = ""
    content: str = ""
    size: int = 0
    labels: tuple[tuple[str, str], ...] = ()

    def same_as(self, other: Image) -> bool:
        """Whether both are one image."""
        return self.image_id == other.image_id or (bool(self.content) and self.content == other.content)

    @property
    def run_as(self) -> str:
        """What `docker run` is to be given on every host: the tag, or the ID where the reference is no tag."""
        return self.reference if is_tag(self.reference) else self.image_id


def check_reference(reference: str) -> str:
    """Return the reference.

    Raises:
        UserError: it is none.

    """
    if not _REFERENCE.match(reference):
        raise UserError(
            f"{reference!r} is no image reference; expected NAME:TAG, NAME@sha256:… or an image ID sha256:…"
        )
    return reference


def is_tag(reference: str) -> bool:
    """Whether a reference names a tag, so that it can be given to an image."""
    return "@" not in reference and not _ID.match(reference)


def is_id(reference: str) -> bool:
    """Whether a reference is an image ID, which no registry knows."""
    return bool(_ID.match(reference))


def repository(reference: str) -> str:
    """The name without tag and digest."""
    name = reference.split("@", 1)[0]
    head, slash, tail = name.rpartition("/")
    return head + slash + tail.split(":", 1)[0]


async def inspect(session: Session, reference: str) -> Image | None:
    """Look at an image of a host; None where the host has none of that name.

    Raises:
        ImageError: Docker does not answer.
        HostError: as `Session.run`.

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
    """Make an image of what `docker image inspect` says."""
    config = record.get("Config") or {}
    layers = (record.get("RootFS") or {}).get("Layers") or []
    labels = config.get("Labels") or {}
    told = [layers, config.get("Env") or [], labels, config.get("Entrypoint") or [], config.get("Cmd") or []]
    digests = record.get("RepoDigests") or []
    own = [digest for digest in digests if _familiar(digest.split("@")[0]) == _familiar(repository(reference))]
    return Image(
        reference=reference,
        image_id=record["Id"],
        repo_digest=reference if "@" in reference else (own or [""])[0],
        content=hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest() if layers else "",
        size=int(record.get("Size") or 0),
        labels=tuple(sorted(labels.items())),
    )


def _familiar(name: str) -> str:
    """The short form that Docker shows for names of its default registry."""
    return name.removeprefix("docker.io/").removeprefix("library/")
