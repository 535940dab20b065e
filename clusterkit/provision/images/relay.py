"""Send an image from one host to another through this machine, over our two connections: no host gets a key."""

from __future__ import annotations

from clusterkit.provision import docker
from clusterkit.provision.images.identity import Image, ImageError
from clusterkit.provision.images.meter import Progress
from clusterkit.ssh.api import ErrorKind, HostError, Session
from clusterkit.ssh.shell import pipe
from clusterkit.ssh.stream import relay as copy

_ROOM = "make room where Docker keeps its images (docker system df), then run setup again"


async def relay(
    source: Session, target: Session, image: Image, *, progress: Progress | None = None, timeout: float
) -> None:
    """Send an image from a host that has it to one that does not.

    Raises:
        ImageError: the transfer failed; `host` is where.
        HostError: as `Session.run`.
    """
    host = target.host.name

    def moved(done: int) -> None:
        if progress is not None:
            progress(host, done, 0)

    async with (
        source.stream(save_script(image), root=True, timeout=timeout) as reading,
        target.stream(LOAD, root=True, timeout=timeout) as writing,
    ):
        try:
            await copy(reading, writing, moved)
        except HostError as error:
            if error.kind is not ErrorKind.WRITE:
                raise
            raise ImageError(host, f"the image cannot be loaded: {error.message}", _ROOM) from None
        for session, stream in ((source, reading), (target, writing)):
            if await stream.wait():
                reason = stream.errors.last_lines()
                raise ImageError(session.host.name, f"the image could not be handed to {host}: {reason}", _ROOM)
    if progress is not None:
        progress(host, image.size, image.size)


def save_script(image: Image) -> str:
    """Return a script that prints the image, compressed."""
    return pipe(("docker save", docker.command("save", image.run_as)), ("compressing", "gzip -1"))


LOAD = pipe(("decompressing", "gzip -dc"), ("docker load", "docker load -q"))
"""Script that loads the output of `save_script`."""
