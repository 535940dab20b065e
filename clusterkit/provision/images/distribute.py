"""Bring one image to all hosts: pull it, load it from the shared storage, or send it from a host that has it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum

from clusterkit.provision.images import archive as archives
from clusterkit.provision.images.archive import Archive
from clusterkit.provision.images.context import CONTENT_LABEL
from clusterkit.provision.images.identity import Image, ImageError, check_reference, inspect, is_id, is_tag
from clusterkit.provision.images.lock import Lock
from clusterkit.provision.images.meter import Progress
from clusterkit.provision.images.pull import pull, resolve
from clusterkit.provision.images.relay import NoSeederError, Seeders, relay
from clusterkit.ssh.api import HostError, Session
from clusterkit.ssh.uploads import UploadSlot, unlimited

PULLS_AT_ONCE = 4
PULL_UP_TO = 4
"""With more hosts than that, the shared storage comes before the registry, whose bandwidth they would share."""
TRANSFER_SECONDS = 2 * 3600.0


class Method(StrEnum):
    """How an image gets to a host, as --image-from names it."""

    AUTO = "auto"
    PRESENT = "present"
    PULL = "pull"
    STORAGE = "storage"
    FANOUT = "fanout"


WAYS = {
    Method.PULL: "from its registry",
    Method.STORAGE: "over the shared storage",
    Method.FANOUT: "from host to host",
}


@dataclass(frozen=True)
class ImageOutcome:
    """How one host got the image."""

    host: str
    method: Method
    image: Image
    seconds: float = 0.0


@dataclass
class Distribution:
    """One image on its way to many hosts: first `seed` on one host, then `join` on each of the others."""

    reference: str
    method: Method = Method.AUTO  # AUTO tries all, in the order that suits the number of hosts
    hosts: int = 1
    storage: str | None = None  # folder that all hosts share
    lock: Lock | None = None  # what the reference meant last time
    refresh: bool = False  # take what the tag means in its registry now, not what lock, first host or storage have
    progress: Progress | None = None  # gets host, bytes done and bytes in all
    timeout: float = TRANSFER_SECONDS
    zstd: bool = True  # whether all hosts have zstd
    slot: UploadSlot = unlimited  # limits how many images go through this machine at once
    image: Image | None = None
    notes: list[str] = field(default_factory=list)  # for the user: what was chosen, and what did not work

    def __post_init__(self) -> None:
        check_reference(self.reference)
        self._digest = ""
        self._seeders = Seeders()
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE)
        self._origin: Session | None = None
        self._archive: asyncio.Task[Archive] | None = None

    # -- the first host ---------------------------------------------------------------------------------------------

    async def seed(self, session: Session) -> ImageOutcome:
        """Make sure that the first host has the image, which decides what the others get. Comes before any `join`.

        Raises:
            ImageError: the host does not have it and cannot get it.
        """
        began, method = time.monotonic(), Method.PRESENT
        self._origin = session
        image = await self._present(session)
        if self.refresh:
            image, method = await self._newest(session, image)
        elif image is None or self._outdated(image):
            try:
                image, method = await self._first(session)
            except ImageError as error:
                if image is None:
                    raise self._with_refresh_hint(error) from error
                self._note(
                    f"{session.host.name}: {self.reference} is not what the lock file says ({error.message}); "
                    "--image-refresh takes what it means now"
                )
        self.image = image
        if not self._built_here(image):
            self._digest = self._digest or image.repo_digest
        await self._seeders.add(session)
        return ImageOutcome(session.host.name, method, image, time.monotonic() - began)

    async def _present(self, session: Session) -> Image | None:
        """Return the first host's image of that name, or of the ID in the lock where the reference is no tag."""
        image = await inspect(session, self.reference)
        if image is None and self._pinned is not None and not is_tag(self.reference):
            image = await inspect(session, self._pinned.image_id)
        return None if image is None else replace(image, reference=self.reference)

    async def _newest(self, session: Session, present: Image | None) -> tuple[Image, Method]:
        """Get what the tag means in its registry now."""
        self._digest = await resolve(session, self.reference)
        if present is not None and self._digest and present.repo_digest == self._digest:
            return present, Method.PRESENT
        image = await pull(session, self.reference, self._digest, progress=self.progress, timeout=self.timeout)
        return image, Method.PRESENT if present is not None and image.same_as(present) else Method.PULL

    def _with_refresh_hint(self, error: ImageError) -> ImageError:
        """Add to the error of a pinned image that it cannot be pulled any more, and how to unpin it."""
        if self._pinned is None or not self._pinned.repo_digest:
            return error
        locked = f"the lock file pins {self.reference} to this digest since {self._pinned.date or 'an earlier set-up'}"
        return ImageError(
            error.host, f"{error.message}\n{locked}", f"--image-refresh takes what the tag means now; or {error.fix}"
        )

    async def _first(self, session: Session) -> tuple[Image, Method]:
        if (image := await self.stored(session)) is not None:
            return image, Method.STORAGE
        if is_id(self.reference):
            raise ImageError(session.host.name, f"there is no image {self.reference}", "name it by its tag or digest")
        self._digest = self._pinned.repo_digest if self._pinned else ""
        self._digest = self._digest or await resolve(session, self.reference)
        image = await pull(session, self.reference, self._digest, progress=self.progress, timeout=self.timeout)
        return image, Method.PULL

    async def stored(self, session: Session) -> Image | None:
        """Load the image from an archive that an earlier set-up left on the storage; None where none is of use.

        Raises:
            ImageError: the host's disk is full, or no other way may be taken.
        """
        if self.storage is None or self.method not in (Method.AUTO, Method.STORAGE):
            return None
        for found in await archives.archives(session, self._folder):
            if self.reference not in (found.reference, found.image_id):
                continue
            try:
                problem = await self._problem(session, found)
                if not problem:
                    await archives.load(session, found, progress=self.progress, timeout=self.timeout)
            except ImageError as error:
                if error.disk_full or self.method is Method.STORAGE:
                    raise
                problem = error.message.removeprefix(f"{found.path} ")
            image = None
            if not problem:
                image = await inspect(session, self.reference if is_tag(self.reference) else found.image_id)
            if image is not None and found.holds(image):
                return replace(image, reference=self.reference)
            self._note(f"{session.host.name}: {found.path} is not used: {problem or 'it holds another image'}")
        return None

    async def _problem(self, session: Session, found: Archive) -> str:
        """Why an archive of the image's name is of no use; empty where it is."""
        if self._pinned is not None and found.content != self._pinned.content:
            return "the lock file pins another image of that name"
        if found.compression == "zstd" and not (await session.run("command -v zstd", timeout=30.0)).ok:
            return "there is no zstd to unpack it with"
        whole = await archives.is_whole(session, found, timeout=self.timeout)
        return "" if whole else "it is damaged: size or SHA-256 are not those of its record"

    @property
    def _pinned(self) -> Lock | None:
        """The lock where it is of this reference."""
        return self.lock if self.lock is not None and self.lock.reference == self.reference else None

    @staticmethod
    def _built_here(image: Image) -> bool:
        """Return whether `setup` built the image: some engines invent a digest for such images."""
        return "/" not in image.reference and CONTENT_LABEL in dict(image.labels)

    def _outdated(self, image: Image) -> bool:
        """Return whether the image is not the pinned one and the pinned one has a digest to pull it by."""
        return self._pinned is not None and bool(self._pinned.repo_digest) and not self._pinned.names(image)

    # -- every other host -------------------------------------------------------------------------------------------

    async def join(self, session: Session) -> ImageOutcome:
        """Give a host the image that the first one has. Any number of hosts may join at once.

        Raises:
            ImageError: no method worked, or the host ended up with another image.
        """
        reference_image, began = self._reference_image(), time.monotonic()
        image = await inspect(session, reference_image.run_as)
        if image is not None and image.same_as(reference_image):
            await self._seeders.add(session)
            return ImageOutcome(session.host.name, Method.PRESENT, image, time.monotonic() - began)
        methods = self._methods()
        for method in methods:
            try:
                await self._transfer(session, method)
                image = self._require_same(session, await inspect(session, reference_image.run_as))
            except ImageError as error:
                # No other method makes room on this host's disk.
                if method is methods[-1] or (error.disk_full and error.host == session.host.name):
                    raise
                self._note(f"{session.host.name}: {method} did not work ({error.message.splitlines()[0]})")
            else:
                await self._seeders.add(session)
                return ImageOutcome(session.host.name, method, image, time.monotonic() - began)
        raise AssertionError("there is always a method to try")

    def _methods(self) -> list[Method]:
        if self.method is not Method.AUTO:
            return [self.method]
        storage = [Method.STORAGE] if self.storage is not None else []
        published = [Method.PULL] if self._digest else []
        few = self.hosts <= PULL_UP_TO
        # To go through this machine is slowest, hence last.
        methods = [*published, *storage, Method.FANOUT] if few else [*storage, *published, Method.FANOUT]
        ways = ", else ".join(WAYS[method] for method in methods[:2])
        self._note(f"{self.reference} goes to the other hosts {ways}")
        return methods

    async def _transfer(self, session: Session, method: Method) -> None:
        reference_image = self._reference_image()
        if method is Method.PULL:
            if not self._digest:
                raise ImageError(session.host.name, f"{self.reference} is in no registry", "use storage or fanout")
            async with self._pulls:
                await pull(session, self.reference, self._digest, progress=self.progress, timeout=self.timeout)
        elif method is Method.STORAGE:
            found = await self._archive_on_storage(session)
            await archives.load(session, found, progress=self.progress, timeout=self.timeout)
        else:
            await self._send_from_seeder(session, reference_image)

    async def _send_from_seeder(self, session: Session, reference_image: Image) -> None:
        """Send the image through this machine from a host that has it; from another one where that host is lost."""
        while True:
            try:
                async with self._seeders.one() as source:
                    async with self.slot(session.host.name):
                        await relay(source, session, reference_image, progress=self.progress, timeout=self.timeout)
                    return
            except NoSeederError:
                raise ImageError(session.host.name, "every host with the image was lost", "run setup again") from None
            except HostError as error:
                if error.host == session.host.name:
                    raise

    async def _archive_on_storage(self, session: Session) -> Archive:
        """Return the archive on the storage. The first host that needs it has it verified or written."""
        if self.storage is None:
            raise ImageError(session.host.name, "there is no shared storage to take the image from", "use fanout")
        if self._archive is None:
            self._archive = asyncio.ensure_future(self._save())
        try:
            return await asyncio.shield(self._archive)
        except HostError as error:
            raise ImageError(session.host.name, f"the archive could not be written: {error.message}") from None

    async def _save(self) -> Archive:
        assert self._origin is not None
        reference_image = self._reference_image()
        for found in await archives.archives(self._origin, self._folder):
            if found.holds(reference_image) and (self.zstd or found.compression != "zstd"):
                if await archives.is_whole(self._origin, found, timeout=self.timeout):
                    return found
                self._note(f"{found.path} is damaged and is written again")
                await archives.discard(self._origin, found)
        if not await archives.has_room(self._origin, str(self.storage), reference_image):
            raise ImageError(
                self._origin.host.name,
                f"{self.storage} has no room for the image ({reference_image.size / 1e9:.1f} GB)",
                "make room there, or distribute it by pull or fanout",
            )
        zstd = self.zstd and (await self._origin.run("command -v zstd", timeout=30.0)).ok
        return await archives.write(
            self._origin, reference_image, self._folder, zstd=zstd, progress=self.progress, timeout=self.timeout
        )

    # -- the whole --------------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> str:
        return f"{self.storage}/images"

    def _reference_image(self) -> Image:
        if self.image is None:
            raise AssertionError("seed comes first")
        return self.image

    def _require_same(self, session: Session, image: Image | None) -> Image:
        reference_image = self._reference_image()
        if image is None or not image.same_as(reference_image):
            has = "has none of that name" if image is None else f"has {image.image_id[7:19]}"
            origin = self._origin.host.name if self._origin else "the first host"
            raise ImageError(
                session.host.name,
                f"{self.reference} is not the same image everywhere: {session.host.name} {has}, "
                f"{origin} {reference_image.image_id[7:19]}",
                "remove the odd one (docker image rm) and run setup again",
            )
        return image

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
