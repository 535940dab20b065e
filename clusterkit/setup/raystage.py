"""The stage that starts Ray: the head first, then every worker that is ready, then a check of the whole cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from clusterkit.provision.facts.model import Gpu
from clusterkit.provision.ray.addresses import head_address
from clusterkit.provision.ray.model import WORKER, RaySettings
from clusterkit.provision.ray.plan import MustReplace, plan_node
from clusterkit.provision.ray.start import (
    NodeEndedError,
    NodeFailedError,
    NotReadyError,
    require_replaceable,
    settings_for_plan,
    wait_for_head,
    wait_until_ready,
)
from clusterkit.provision.ray.state import ClusterState
from clusterkit.provision.ray.token import cluster_token, read_token
from clusterkit.provision.steps.step import Refused
from clusterkit.setup.imagestage import ImageStage
from clusterkit.setup.model import State, StepFailedError
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.setup import Setup, Stage
from clusterkit.ssh.api import Session

STARTS = 3
"""Tries where Ray ends during its start: it allows itself 30 s, which may be too short on a busy machine."""


@dataclass
class RayStage(Stage):
    """Start labelled containers with Ray as their main process, and wait until all of them are alive in Ray."""

    image: ImageStage  # a stage before, which knows the runtime image
    privileged: bool = False
    recreate: bool = False
    shm: int = 0  # bytes of /dev/shm; 0: half of the memory
    name: str = "ray"
    state: ClusterState | None = None  # the last one that was seen
    gpus: tuple[Gpu, ...] = ()  # of all hosts of this set-up
    _settings: RaySettings | None = field(default=None, repr=False)

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        """Start this host's node unless it runs with the right settings."""
        if setup.is_head(runner):
            await self._head(setup, runner)
        else:
            await setup.head.wait("ray", self.name)
            assert self._settings is not None
            async with runner.timed(self.name):
                head = setup.head_session
                await self._node(runner, self._settings, head)

    async def observe(self, setup: Setup, head: HostRunner) -> None:
        """Let workers join the Ray that the head runs."""
        async with head.timed(self.name):
            token = await cluster_token(head.connected, setup.request.cluster.name)
            settings = replace(self._ray_settings(setup, head), token=token)
            await self._wait_for_head(head, settings)
        await setup.head.reach("ray")

    async def _head(self, setup: Setup, runner: HostRunner) -> None:
        cluster = setup.request.cluster
        async with runner.timed(self.name):
            settings = replace(
                self._ray_settings(setup, runner), token=await cluster_token(runner.connected, cluster.name)
            )
            runner.log.secrets = (*runner.log.secrets, settings.token)
            for left in reversed(range(STARTS)):
                await self._node(runner, settings, runner.connected)
                try:
                    await self._wait_for_head(runner, settings)
                    break
                except StepFailedError as failure:
                    if not left or not isinstance(failure.__cause__, NodeEndedError):
                        raise
                    await self._look_again(setup, runner, failure.lines)
        await setup.head.reach("ray")

    async def _look_again(self, setup: Setup, runner: HostRunner, lines: Sequence[str]) -> None:
        """Log the last lines of a Ray that ended during its start, and read the host's facts again."""
        runner.log.heading(f"{self.name}: Ray ended while it started; its last lines:")
        for line in lines:
            runner.log.line(line)
        setup.note(f"{runner.host.name}: Ray ended while it started and was started again")
        runner.facts = await runner.look(runner.connected)

    async def _wait_for_head(self, head: HostRunner, settings: RaySettings) -> None:
        try:
            container = await wait_for_head(head.connected, settings.cluster.name, settings.ports)
        except NodeFailedError as error:
            raise StepFailedError(self.name, error.message, lines=error.lines, fix=error.fix) from error
        self._settings = replace(settings, head_container=container.id)

    async def _node(self, runner: HostRunner, settings: RaySettings, head: Session) -> None:
        try:
            actions = plan_node(runner.host, runner.facts, replace(settings, recreate=False))
        except MustReplace as refusal:
            await require_replaceable(refusal, head, settings)
            actions = plan_node(runner.host, runner.facts, settings)
        if not actions:
            runner.show(self.name, State.OK)
            return
        await runner.apply(self.name, actions)
        runner.facts = await runner.look(runner.connected)
        runner.show(self.name, State.CHANGED)

    def _ray_settings(self, setup: Setup, head: HostRunner) -> RaySettings:
        cluster, desired = setup.request.cluster, setup.request.desired
        return RaySettings(
            cluster=cluster,
            image=self.image.reference,
            image_id=self.image.image_id,
            head_address=head_address(cluster, head.facts),
            gpus=desired.gpus,
            privileged=self.privileged,
            recreate=self.recreate,
            shm=self.shm,
        )

    def plan(self, setup: Setup, runner: HostRunner) -> list[str]:
        """Return what would be started or replaced by the present facts."""
        cluster = setup.request.cluster
        head = setup.head_runner
        if not head.facts.hostname:
            return ["start its Ray node (the head node was not looked at)"]
        try:
            settings = replace(self._ray_settings(setup, head), token=read_token(cluster.name))
            settings = settings_for_plan(settings, head.facts)
            return [action.title for action in plan_node(runner.host, runner.facts, settings)]
        except Refused as refusal:
            raise StepFailedError(self.name, refusal.message, fix=refusal.fix) from refusal

    async def finish(self, setup: Setup) -> None:
        """Wait until every host that has not failed is alive in Ray."""
        cluster = setup.request.cluster
        self.gpus = tuple(gpu for runner in setup.runners.values() for gpu in runner.facts.gpus)
        alive = setup.alive
        head = cluster.head_host.name
        if not alive or (head not in alive and setup.observed is None) or head not in setup.sessions:
            return
        sessions = {name: session for name, session in setup.sessions.items() if name in {*alive, head}}
        began = time.monotonic()
        try:
            for left in reversed(range(STARTS)):
                try:
                    self.state = await wait_until_ready(sessions, cluster, dict.fromkeys(setup.alive))
                    return
                except NotReadyError as error:
                    self.state = error.state
                    if not left or not await self._started_again(setup, error.state, sessions[head]):
                        self._report(setup, error.state)
                        return
        finally:
            if head in setup.report.hosts:  # it is the head that is asked
                seconds = setup.report.hosts[head].seconds
                seconds[self.name] = seconds.get(self.name, 0.0) + time.monotonic() - began

    async def _started_again(self, setup: Setup, state: ClusterState, head: Session) -> bool:
        """Start workers again whose Ray ended. Return whether there were any."""
        ended = [node for node in state.nodes if node.role == WORKER and node.container.startswith("exited")]
        ended = [node for node in ended if node.name in setup.alive]
        assert self._settings is not None
        for node in ended:
            runner = setup.runners[node.name]
            try:
                async with runner.timed(self.name):
                    await self._look_again(setup, runner, node.log)
                    await self._node(runner, self._settings, head)
            except StepFailedError as failure:
                setup.fail(runner, failure)
        return bool(ended)

    def _report(self, setup: Setup, state: ClusterState) -> None:
        """Report every problem as a failure of its host, and those of the whole cluster as a failure of the head."""
        alive = setup.alive
        for node in state.nodes:
            if node.problem and node.name in alive:
                fix = "run setup again; docker logs on that host has all that Ray said"
                setup.fail(alive[node.name], StepFailedError(self.name, node.problem, lines=node.log, fix=fix))
        alive = setup.alive
        if state.problems and alive:
            first = alive.get(setup.request.cluster.head_host.name) or next(iter(alive.values()))
            setup.fail(first, StepFailedError(self.name, "; ".join(state.problems)))
