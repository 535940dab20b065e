"""The same image on all hosts: there already, pulled, loaded from shared storage, or sent from a host that has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from clusterkit.provision.images import archive as archives
from clusterkit.provision.images.archive import Archive
from clusterkit.provision.images.context import CONTENT_LABEL
from clusterkit.provision.images.errors import ImageError
from clusterkit.provision.images.holders import NoSeederError, Seeders
from clusterkit.provision.images.identity import Image, check_reference, inspect, is_id, is_tag
from clusterkit.provision.images.lock import Lock
from clusterkit.provision.images.meter import Progress
from clusterkit.provision.images.pull import pull, resolve
from clusterkit.provision.images.relay import relay
from clusterkit.ssh.api import HostError, Session
from clusterkit.ssh.uploads import UploadSlot, unlimited

PULLS_AT_ONCE = 4
PULL_UP_TO = 4
"""Hosts that pull for themselves; more of them take less of the registry from one another's hands."""
TRANSFER_SECONDS = 2 * 3600.0


class How(StrEnum):
    """How an image gets to a host."""

    AUTO = "auto"
    PRESENT = "present"
    PULL = "pull"
    STORAGE = "storage"
    FANOUT = "fanout"


@dataclass(frozen=True)
class ImageOutcome:
    """What became of one host. how: what worked. seconds: it took. error: why nothing did."""

    host: str
    how: How = How.PRESENT
    image: Image | None = None
    seconds: float = 0.0
    error: ImageError | HostError | None = None


@dataclass
class Distribution:
    """One image on its way to many hosts, which may come one by one: first `seed` on one host, then `join` on each.

    reference: what is wanted. how: AUTO takes what works, in the order that suits. hosts: how many there will be.
    storage: folder that all hosts share, None where there is none. lock: what the reference meant last time.
    refresh: take what the tag means in its registry now, whatever the lock, the first host or the storage have.
    slot: where an image that has to go through this machine waits for its turn.
    progress: gets host, bytes, bytes in all. notes: what was chosen and what was given up, for the user.
    """

    reference: str
    how: How = How.AUTO
    hosts: int = 1
    storage: str | None = None
    lock: Lock | None = None
    refresh: bool = False
    progress: Progress | None = None
    timeout: float = TRANSFER_SECONDS
    zstd: bool = True
    slot: UploadSlot = unlimited
    image: Image | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_reference(self.reference)
        self._digest = ""
        self._holders = Seeders()
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE)
        self._origin: Session | None = None
        self._archive: asyncio.Task[Archive] | None = None

    # -- the first host ---------------------------------------------------------------------------------------------

    async def seed(self, session: Session) -> ImageOutcome:
        """Make sure that the first host has the image, and so what the image is; to be awaited before any `join`.

        Raises:
            ImageError: it is not there and cannot be had.
            HostError: as `Session.run`.

        """
        began, how = time.monotonic(), How.PRESENT
        self._origin = session
        there = await self._present(session)
        if self.refresh:
            there, how = await self._newest(session, there)
        elif there is None or self._outdated(there):
            try:
                there, how = await self._first(session)
            except ImageError as error:
                if there is None:
                    raise self._with_way_out(error) from error
                self._note(
                    f"{session.host.name}: {self.reference} is not what the lock file says ({error.message}); "
                    "--image-refresh takes what it means now"
                )
        self.image = there
        if not self._built_here(there):
            self._digest = self._digest or there.repo_digest
        await self._holders.add(session)
        return ImageOutcome(session.host.name, how, there, time.monotonic() - began)

    async def _present(self, session: Session) -> Image | None:
        """The image on the first host: by its name, or by the ID that the lock remembers where there is no tag."""
        image = await inspect(session, self.reference)
        if image is None and self._pinned is not None and not is_tag(self.reference):
            image = await inspect(session, self._pinned.image_id)
        return None if image is None else replace(image, reference=self.reference)

    async def _newest(self, session: Session, there: Image | None) -> tuple[Image, How]:
        """What the tag means in its registry now."""
        self._digest = await resolve(session, self.reference)
        if there is not None and self._digest and there.repo_digest == self._digest:
            return there, How.PRESENT
        image = await pull(session, self.reference, self._digest, progress=self.progress, timeout=self.timeout)
        return image, How.PRESENT if there is not None and image.same_as(there) else How.PULL

    def _with_way_out(self, error: ImageError) -> ImageError:
        """A pinned image that can no longer be had says how to get another one."""
        if self._pinned is None or not self._pinned.repo_digest:
            return error
        locked = f"the lock file pins {self.reference} to this digest since {self._pinned.date or 'an earlier set-up'}"
        return ImageError(
            error.host, f"{error.message}\n{locked}", f"--image-refresh takes what the tag means now; or {error.fix}"
        )

    async def _first(self, session: Session) -> tuple[Image, How]:
        if self.storage is not None and self.how in (How.AUTO, How.STORAGE):
            for found in await archives.archives(session, self._folder):
                if self._is_wanted(found) and (image := await self._from_archive(session, found)) is not None:
                    return image, How.STORAGE
        if is_id(self.reference):
            raise ImageError(session.host.name, f"there is no image {self.reference}", "name it by its tag or digest")
        self._digest = self._pinned.repo_digest if self._pinned else ""
        self._digest = self._digest or await resolve(session, self.reference)
        image = await pull(session, self.reference, self._digest, progress=self.progress, timeout=self.timeout)
        return image, How.PULL

    async def _from_archive(self, session: Session, found: Archive) -> Image | None:
        """The image out of an archive of an earlier set-up; None where that is damaged."""
        if not await archives.is_whole(session, found, timeout=self.timeout):
            self._note(f"{found.path} is damaged and is not used")
            return None
        await archives.load(session, found, progress=self.progress, timeout=self.timeout)
        image = await inspect(session, self.reference if is_tag(self.reference) else found.image_id)
        return replace(image, reference=self.reference) if image is not None and found.holds(image) else None

    @property
    def _pinned(self) -> Lock | None:
        """The lock, where it is of this reference."""
        return self.lock if self.lock is not None and self.lock.reference == self.reference else None

    @staticmethod
    def _built_here(image: Image) -> bool:
        """Built by `setup` and never pushed: some engines make up a digest for such images too."""
        return "/" not in image.reference and CONTENT_LABEL in dict(image.labels)

    def _outdated(self, image: Image) -> bool:
        """Whether the tag is not what the lock pinned; only a digest in a registry can be gone back to."""
        return self._pinned is not None and bool(self._pinned.repo_digest) and not self._pinned.names(image)

    def _is_wanted(self, found: Archive) -> bool:
        named = self.reference in (found.reference, found.image_id)
        return named and (self._pinned is None or found.content == self._pinned.content)

    # -- every other host -------------------------------------------------------------------------------------------

    async def join(self, session: Session) -> ImageOutcome:
        """Bring a host to the image that the first one has. Any number at once.

        Raises:
            ImageError: no way worked, or the host ended up with another image.
            HostError: as `Session.run`.

        """
        wanted, began = self._wanted(), time.monotonic()
        image = await inspect(session, wanted.run_as)
        if image is not None and image.same_as(wanted):
            await self._holders.add(session)
            return ImageOutcome(session.host.name, How.PRESENT, image, time.monotonic() - began)
        ways = self._ways()
        for position, way in enumerate(ways):
            try:
                await self._bring(session, way)
                image = await inspect(session, wanted.run_as)
                self._agree(session, image)
            except ImageError as error:
                # No other way makes room on this host's disk.
                if position == len(ways) - 1 or (error.disk_full and error.host == session.host.name):
                    raise
                self._note(f"{session.host.name}: {way} did not work ({error.message.splitlines()[0]})")
            else:
                await self._holders.add(session)
                return ImageOutcome(session.host.name, way, image, time.monotonic() - began)
        raise AssertionError("there is always a way to try")

    def _ways(self) -> list[How]:
        if self.how is not How.AUTO:
            return [self.how]
        storage = [How.STORAGE] if self.storage is not None else []
        published = [How.PULL] if self._digest else []
        few = self.hosts <= PULL_UP_TO
        # The way through this machine is the slowest: last.
        ways = [*published, *storage, How.FANOUT] if few else [*storage, *published, How.FANOUT]
        self._note(f"{self.reference}: distributed by {ways[0]}" + (f", else {ways[1]}" if len(ways) > 1 else ""))
        return ways

    async def _bring(self, session: Session, way: How) -> None:
        wanted = self._wanted()
        if way is How.PULL:
            if not self._digest:
                raise ImageError(session.host.name, f"{self.reference} is in no registry", "use storage or fanout")
            async with self._pulls:
                await pull(session, self.reference, self._digest, progress=self.progress, timeout=self.timeout)
        elif way is How.STORAGE:
            found = await self._saved(session)
            await archives.load(session, found, progress=self.progress, timeout=self.timeout)
        else:
            await self._hand_on(session, wanted)

    async def _hand_on(self, session: Session, wanted: Image) -> None:
        """Through this machine from any host that has it; from another one when that host is lost meanwhile."""
        while True:
            try:
                async with self._holders.one() as source:
                    async with self.slot(session.host.name):
                        await relay(source, session, wanted, progress=self.progress, timeout=self.timeout)
                    return
            except NoSeederError:
                raise ImageError(session.host.name, "every host with the image was lost", "run setup again") from None
            except HostError as error:
                if error.host == session.host.name:
                    raise

    async def _saved(self, session: Session) -> Archive:
        """The archive on the storage, verified or written when the first host asks for it."""
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
        wanted = self._wanted()
        for found in await archives.archives(self._origin, self._folder):
            if found.holds(wanted) and (self.zstd or found.compression != "zstd"):
                if await archives.is_whole(self._origin, found, timeout=self.timeout):
                    return found
                self._note(f"{found.path} is damaged and is written again")
                await archives.discard(self._origin, found)
        if not await archives.has_room(self._origin, str(self.storage), wanted):
            raise ImageError(
                self._origin.host.name,
                f"{self.storage} has no room for the image ({wanted.size / 1e9:.1f} GB)",
                "make room there, or distribute it by pull or fanout",
            )
        zstd = self.zstd and await all_have_zstd([self._origin])
        return await archives.write(
            self._origin, wanted, self._folder, zstd=zstd, progress=self.progress, timeout=self.timeout
        )

    # -- the whole --------------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> str:
        return f"{self.storage}/images"

    def _wanted(self) -> Image:
        if self.image is None:
            raise AssertionError("seed comes first")
        return self.image

    def _agree(self, session: Session, image: Image | None) -> None:
        wanted = self._wanted()
        if image is None or not image.same_as(wanted):
            has = "has none of that name" if image is None else f"has {image.image_id[7:19]}"
            origin = self._origin.host.name if self._origin else "the first host"
            raise ImageError(
                session.host.name,
                f"{self.reference} is not the same image everywhere: {session.host.name} {has}, "
                f"{origin} {wanted.image_id[7:19]}",
                "remove the odd one (docker image rm) and run setup again",
            )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Distributed:
    """The image and what became of every host, by name."""

    image: Image
    outcomes: dict[str, ImageOutcome]
    notes: tuple[str, ...] = ()

    def require_all(self) -> None:
        """Raise an ImageError that names the hosts without the image; none where all have it."""
        failed = [outcome for outcome in self.outcomes.values() if outcome.error is not None]
        if failed:
            names = ", ".join(outcome.host for outcome in failed)
            reasons = "\n".join(str(outcome.error) for outcome in failed)
            raise ImageError(names, f"{self.image.reference} is not the same on all hosts:\n{reasons}")


async def distribute(
    sessions: Sequence[Session],
    reference: str,
    how: str = "auto",
    *,
    storage: str | None = None,
    lock: Lock | None = None,
    refresh: bool = False,
    progress: Progress | None = None,
    timeout: float = TRANSFER_SECONDS,
) -> Distributed:
    """Bring an image to all hosts. A host that fails holds no other one up; it is in the outcomes.

    It comes from the first host that has it; where none has, the first one gets it.

    Raises:
        ImageError: no host has the image and none can get it.
        HostError: the first host is lost.

    """
    held = await asyncio.gather(*(inspect(session, reference) for session in sessions), return_exceptions=True)
    first = next((n for n, image in enumerate(held) if isinstance(image, Image)), 0)
    wanted = Distribution(
        reference,
        How(how),
        hosts=len(sessions),
        storage=storage,
        lock=lock,
        refresh=refresh,
        progress=progress,
        timeout=timeout,
        zstd=await all_have_zstd(sessions),
    )
    outcomes = {sessions[first].host.name: await wanted.seed(sessions[first])}

    async def one(session: Session) -> ImageOutcome:
        try:
            return await wanted.join(session)
        except (ImageError, HostError) as error:
            return ImageOutcome(session.host.name, wanted.how, error=error)

    for outcome in await asyncio.gather(*(one(session) for n, session in enumerate(sessions) if n != first)):
        outcomes[outcome.host] = outcome
    assert wanted.image is not None
    return Distributed(wanted.image, outcomes, tuple(wanted.notes))


async def all_have_zstd(sessions: Sequence[Session]) -> bool:
    """Whether an archive may be compressed with zstd."""
    look = (session.run("command -v zstd", timeout=30.0) for session in sessions)
    results = await asyncio.gather(*look, return_exceptions=True)
    return all(not isinstance(result, BaseException) and result.ok for result in results)
