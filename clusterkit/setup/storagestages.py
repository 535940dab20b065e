"""The stages of the shared storage: all hosts see the same folder, and it has the run's models and data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterkit.common.finding import Level
from clusterkit.common.text_plot import progress_bar
from clusterkit.provision.assets.hub import Hub
from clusterkit.provision.assets.model import NodeAsset
from clusterkit.provision.assets.provide import compare, planned, provide
from clusterkit.provision.checks.storage import storage_shared
from clusterkit.provision.steps.step import Action
from clusterkit.setup.imagestage import ImageStage
from clusterkit.setup.model import State, StepFailedError
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.setup import Setup, Stage
from clusterkit.ssh.api import Session


class SharedStage(Stage):
    """Check every host against the head: each sees what the other writes to the storage."""

    name = "shared"

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        """Compare this host with the head."""
        cluster = setup.request.cluster
        if len(cluster.hosts) == 1:
            runner.show(self.name, State.SKIPPED)
            return
        if setup.is_head(runner):
            await setup.head.reach("storage")
            runner.show(self.name, State.OK)
            return
        await setup.head.wait("storage", self.name)
        head = setup.head_session
        async with runner.timed(self.name):
            report = await storage_shared([head, runner.connected], cluster.storage)
            for finding in report.findings:
                if finding.level is Level.FAIL:
                    raise StepFailedError(self.name, f"{finding.host}: {finding.message}", fix=finding.fix)
                if finding.level is Level.WARN:
                    setup.note(f"{finding.host or runner.host.name}: {finding.message} ({finding.fix})")
            runner.show(self.name, State.OK)

    async def observe(self, setup: Setup, head: HostRunner) -> None:  # noqa: ARG002
        """The head has its storage from its own set-up."""
        await setup.head.reach("storage")


@dataclass
class AssetStage(Stage):
    """The head provides models and data sets; the others check that they see the same."""

    assets: Sequence[NodeAsset]  # what the preset needs; none without a preset
    hub: Hub  # how the head reaches the hub
    image: ImageStage  # the stage before: downloads run in its runtime image
    name: str = "assets"

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        """Provide on the head; compare elsewhere."""
        if not self.assets:
            runner.show(self.name, State.SKIPPED)
            return
        session = runner.connected
        if setup.is_head(runner):
            await self._provide(setup, runner, session)
            await setup.head.reach("assets")
            return
        await setup.head.wait("assets", self.name)
        head = setup.head_session
        async with runner.timed(self.name):
            for asset in self.assets:
                if difference := await compare(head, session, asset):
                    raise StepFailedError(
                        self.name,
                        f"{asset.folder}: {difference}",
                        fix=f"look whether {setup.request.cluster.storage} is the same file system here as on the head",
                    )
            runner.show(self.name, State.OK)

    async def _provide(self, setup: Setup, runner: HostRunner, session: Session) -> None:
        async def apply(actions: Sequence[Action]) -> None:
            await runner.apply(self.name, actions)

        hub, changed = replace(self.hub, image=self.image.reference), False
        async with runner.timed(self.name):
            for asset in self.assets:

                def tell(done: int, total: int, asset: NodeAsset = asset) -> None:
                    runner.show(self.name, State.RUNNING, f"{asset.name} {progress_bar(done, total)}")

                before = len(runner.report.changes)
                new = await provide(
                    session,
                    asset,
                    setup.request.cluster,
                    hub,
                    apply,
                    say=runner.log.line,
                    on_bytes=tell,
                    slot=setup.uploads.slot,
                )
                if new and len(runner.report.changes) == before:
                    runner.report.changes.append(planned(asset))
                changed = changed or new
            runner.show(self.name, State.CHANGED if changed else State.OK)

    def plan(self, setup: Setup, runner: HostRunner) -> list[str]:
        """Return what the head would provide where it is missing."""
        is_head = setup.is_head(runner)
        return [f"{planned(asset)}, unless it is there" for asset in self.assets] if is_head else []

    async def observe(self, setup: Setup, head: HostRunner) -> None:  # noqa: ARG002
        """The head has the assets from its own set-up."""
        await setup.head.reach("assets")
