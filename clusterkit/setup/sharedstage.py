"""The stage that makes sure of one shared storage: every host against the head, as soon as both are ready."""

from __future__ import annotations

from clusterkit.common.finding import Level
from clusterkit.provision.checks.storage import storage_shared
from clusterkit.setup.model import State, StepFailedError
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.setup import Setup, Stage


class SharedStage(Stage):
    """Storage is shared when what the head writes is seen by all others, and the other way round."""

    name = "shared"

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        """Compare this host with the head."""
        cluster = setup.request.cluster
        if len(cluster.hosts) == 1:
            runner.show(self.name, State.SKIPPED)
            return
        if runner.host.name == cluster.head_host.name:
            await setup.head.reach("storage")
            runner.show(self.name, State.OK)
            return
        await setup.head.wait("storage", self.name)
        head = setup.sessions[cluster.head_host.name]
        assert runner.session is not None
        async with runner.timed(self.name):
            report = await storage_shared([head, runner.session], cluster.storage)
            for finding in report.findings:
                if finding.level is Level.FAIL:
                    raise StepFailedError(self.name, f"{finding.host}: {finding.message}", fix=finding.fix)
                if finding.level is Level.WARN:
                    setup.note(f"{finding.host or runner.host.name}: {finding.message} ({finding.fix})")
            runner.show(self.name, State.OK)

    async def observe(self, setup: Setup, head: HostRunner) -> None:  # noqa: ARG002
        """Its storage is there."""
        await setup.head.reach("storage")
