"""The stage that submits the training of a preset, once every host is ready."""

from __future__ import annotations

import time
from dataclasses import dataclass

from clusterkit.backends.base import RunRequest, SubmittedRun
from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.submit import dispatch
from clusterkit.provision.ray.token import read_token
from clusterkit.setup.model import State, StepFailedError
from clusterkit.setup.raystage import RayStage
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.setup import Setup, Stage
from clusterkit.ssh.api import HostError
from trainer.errors import UserError


@dataclass
class TrainStage(Stage):
    """Submit the training of a preset."""

    run_request: RunRequest | None  # None without a preset
    ray: RayStage  # the stage before, which knows whether the cluster is ready
    name: str = "train"
    submitted: SubmittedRun | None = None

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        """Wait: `finish` starts the training, when all hosts are ready."""
        runner.show(self.name, State.WAITING if setup.is_head(runner) and self.run_request else State.SKIPPED)

    def plan(self, setup: Setup, runner: HostRunner) -> list[str]:
        """Return that the training would be started."""
        if self.run_request is None or not setup.is_head(runner):
            return []
        return [f"train {self._title}, unless it runs or is complete"]

    async def finish(self, setup: Setup) -> None:
        """Start the training, or say why not."""
        if self.run_request is None:
            return
        head = setup.request.cluster.head_host.name
        runner = setup.runners.get(head)
        if setup.report.failed or self.ray.state is None or not self.ray.state.ready:
            if runner is not None and runner.report.failure is None:
                runner.show(self.name, State.SKIPPED, "not all hosts are ready")
            setup.note(f"the training of {self._title} was not started: not all hosts are ready")
            return
        began = time.monotonic()
        try:
            await self._start(setup, runner)
        except (HostError, UserError) as error:
            message, fix = (error.message, error.fix) if isinstance(error, HostError) else (str(error), "")
            failure = StepFailedError(self.name, message, fix=fix)
            setup.fail(runner or next(iter(setup.alive.values())), failure)
        finally:
            if runner is not None:
                runner.report.seconds[self.name] = time.monotonic() - began

    async def _start(self, setup: Setup, runner: HostRunner | None) -> None:
        assert self.run_request is not None
        cluster = setup.request.cluster

        def say(text: str) -> None:
            if runner is not None:
                runner.show(self.name, State.RUNNING, text)

        head = Head(setup.head_session, cluster, read_token(cluster.name))
        ready = await dispatch(head, self.run_request, say)
        self.submitted = ready
        if runner is not None:
            started = ready.state == "started"
            if started:
                runner.report.changes.append(f"start training {ready.run.name}")
            runner.show(self.name, State.CHANGED if started else State.OK, ready.state)

    @property
    def _title(self) -> str:
        assert self.run_request is not None
        return self.run_request.config.experiment_name
