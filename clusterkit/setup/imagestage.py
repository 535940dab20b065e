"""The stage that brings one runtime image to all hosts: the head gets it first, then every other host."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from clusterkit.common.text_plot import progress_bar
from clusterkit.provision.bundle.folder import Bundle
from clusterkit.provision.images import lock as locks
from clusterkit.provision.images.build import build, find_built
from clusterkit.provision.images.context import Recipe
from clusterkit.provision.images.distribute import Distribution, ImageOutcome, Method
from clusterkit.provision.images.identity import ImageError, check_reference, inspect
from clusterkit.provision.images.needs import ImageNeeds, check_image
from clusterkit.setup.model import State
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.setup import Setup, Stage
from clusterkit.ssh.api import Session

LOAD_SECONDS = 3600.0


@dataclass(frozen=True)
class ImageRequest:
    """Which runtime image the user asked for, and how hosts get it."""

    reference: str = ""  # empty: build one on the head
    method: str = "auto"  # see `Method`
    refresh: bool = False  # take what the reference means now, not what the lock file says
    base: str = ""  # image that a build starts from
    torch: bool = True
    pip_find_links: str = ""
    torch_index: str = ""
    bundle: Bundle | None = None

    def __post_init__(self) -> None:
        if self.reference:
            check_reference(self.reference)


@dataclass
class ImageStage(Stage):
    """The stage, and what it has found out."""

    request: ImageRequest
    needs: ImageNeeds | None = None  # packages that the preset's run imports; None without a run
    name: str = "image"
    reference: str = ""  # of the containers' image, known once the head has it
    image_id: str = ""
    _distribution: Distribution | None = field(default=None, repr=False)
    _own: dict[str, State] = field(default_factory=dict, repr=False)  # of hosts that pack the image for others

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        """Get the image to this host."""
        session = runner.connected
        if setup.is_head(runner):
            async with runner.timed(self.name):
                await self._first(setup, runner, session)
            await setup.head.reach("image")
            return
        await setup.head.wait("image", self.name)
        assert self._distribution is not None
        async with runner.timed(self.name):
            self._note(setup, runner, await self._distribution.join(session))

    async def observe(self, setup: Setup, head: HostRunner) -> None:
        """Let the others get the image that the head's Ray runs on."""
        self.reference = self._wanted(head)
        async with head.timed(self.name):
            self._distribution = self._prepare(setup, await self._lock(setup, head.connected))
            outcome = await self._distribution.seed(head.connected)
        self.image_id = outcome.image.image_id
        await setup.head.reach("image")

    async def finish(self, setup: Setup) -> None:
        """Show of the hosts that packed the image for others what came of their own part."""
        for host, state in self._own.items():
            setup.runners[host].show(self.name, state)

    def plan(self, setup: Setup, runner: HostRunner) -> list[str]:
        """Return what would be done where the image is missing."""
        self.reference = reference = self._wanted(setup.head_runner)
        self.image_id = setup.head_runner.facts.docker.images.get(reference, "")
        present = reference in runner.facts.docker.images
        if present and not self.request.refresh:
            return []
        if not setup.is_head(runner):
            which = f"the runtime image {reference}" + (", should a newer one be there" if present else "")
            return [f"get {which} from the head, the storage or a registry"]
        if present:
            return [f"get the runtime image {reference} anew, should a newer one be there"]
        otherwise = "" if self.request.refresh else ", unless the storage has it"
        return [f"{'pull' if self.request.reference else 'build'} the runtime image {reference}{otherwise}"]

    async def _first(self, setup: Setup, runner: HostRunner, session: Session) -> None:
        self.reference = self._wanted(runner)
        made = False
        if self.request.bundle is not None and (stored := self.request.bundle.image(self.reference)) is not None:
            made = await self._from_bundle(setup, runner, session, *stored)
        elif not self.request.reference:
            made = await self._build(setup, runner, session)
        if self.request.refresh:
            # An image of a bundle is what the reference means now; without a bundle the registry is asked.
            self._distribution = self._prepare(setup, None, refresh=self.request.bundle is None)
        else:
            self._distribution = self._prepare(setup, await self._lock(setup, session))
        outcome = await self._distribution.seed(session)
        if self.needs is not None:  # before others get it, and before Ray starts from it
            await check_image(session, self.reference, self.needs)
        self.image_id = outcome.image.image_id
        await locks.write(
            setup.request.cluster.name, locks.Lock.of(outcome.image), session, setup.request.cluster.storage
        )
        if made:
            runner.show(self.name, State.CHANGED)
        else:
            self._note(setup, runner, outcome)

    async def _build(self, setup: Setup, runner: HostRunner, session: Session) -> bool:
        recipe, desired = self._recipe(runner), setup.request.desired
        if await find_built(session, recipe) is not None:
            return False
        if not self.request.refresh and await self._from_storage(setup, runner, session, recipe):
            return True
        runner.show(self.name, State.RUNNING, f"build {recipe.reference}")
        runner.log.heading(f"image: build {recipe.reference}")
        await build(
            session,
            recipe,
            ca_bundle=desired.ca_bundle,
            apt_mirror=desired.apt_mirror,
            pip_index_url=desired.pip_index_url,
            pip_find_links=self.request.pip_find_links,
            torch_index=self.request.torch_index or None,
            proxies={
                "http_proxy": desired.http_proxy,
                "https_proxy": desired.https_proxy,
                "no_proxy": desired.no_proxy,
            },
            on_output=runner.log.line,
        )
        runner.report.changes.append(f"build the runtime image {recipe.reference}")
        return True

    async def _from_storage(self, setup: Setup, runner: HostRunner, session: Session, recipe: Recipe) -> bool:
        """Load what an earlier set-up has built from this very recipe, in place of building it again."""
        distribution = self._prepare(setup, await self._lock(setup, session))
        stored = await distribution.stored(session)
        for note in distribution.notes:
            setup.note(note)
        if stored is None or await find_built(session, recipe) is None:
            return False
        runner.report.changes.append(f"get the runtime image {recipe.reference} ({Method.STORAGE})")
        return True

    async def _from_bundle(
        self, setup: Setup, runner: HostRunner, session: Session, image_id: str, archive: Path
    ) -> bool:
        present = await inspect(session, self.reference)
        if present is not None and not (self.request.refresh and present.image_id != image_id):
            return False
        target, size = f"/var/lib/clusterkit/{archive.name}", archive.stat().st_size

        def tell(sent: int) -> None:
            runner.show(self.name, State.RUNNING, f"of the bundle: {progress_bar(sent, size)}")

        await session.run(f"mkdir -p {shlex.quote('/var/lib/clusterkit')}", root=True, timeout=30.0)
        async with setup.uploads.slot(runner.host.name):
            await session.put(archive, target, root=True, on_bytes=tell)
        load = f"trap 'rm -f {shlex.quote(target)}' EXIT\ndocker load -i {shlex.quote(target)}\n"
        result = await session.run(load, root=True, timeout=LOAD_SECONDS, on_output=runner.log.line)
        if not result.ok:
            raise ImageError(runner.host.name, f"docker load failed: {result.stderr.strip()[-300:]}", "see its log")
        runner.report.changes.append(f"load the runtime image {self.reference} from the bundle")
        return True

    def _prepare(self, setup: Setup, lock: locks.Lock | None, *, refresh: bool = False) -> Distribution:
        looked = [runner.facts for runner in setup.runners.values() if runner.facts.hostname]

        def progress(host: str, done: int, total: int) -> None:
            runner = setup.runners.get(host)
            if runner is None:
                return
            if (state := runner.report.states[self.name]) in (State.OK, State.CHANGED):
                self._own[host] = state
            ended = host in self._own and done == total
            runner.show(self.name, self._own[host] if ended else State.RUNNING, progress_bar(done, total))

        return Distribution(
            self.reference,
            Method(self.request.method),
            hosts=len(setup.runners),
            storage=setup.request.cluster.storage,
            lock=lock,
            refresh=refresh,
            slot=setup.uploads.slot,
            progress=progress,
            zstd=all("zstd" in facts.commands for facts in looked),
        )

    async def _lock(self, setup: Setup, session: Session) -> locks.Lock | None:
        return locks.read_local(setup.request.cluster.name) or await locks.read_shared(
            session, setup.request.cluster.storage
        )

    def _wanted(self, head: HostRunner) -> str:
        return self.request.reference or self._recipe(head).reference

    def _recipe(self, head: HostRunner) -> Recipe:
        return Recipe("gpu" if head.facts.gpus else "cpu", self.request.base, self.request.torch)

    def _note(self, setup: Setup, runner: HostRunner, outcome: ImageOutcome) -> None:
        if outcome.method is Method.PRESENT:
            runner.show(self.name, State.OK)
            return
        runner.report.changes.append(f"get the runtime image {self.reference} ({outcome.method})")
        runner.show(self.name, State.CHANGED)
        assert self._distribution is not None
        for note in self._distribution.notes:
            setup.note(note)
