"""What every way of publishing weights has in common.

A publisher gives the trainer's present weights to the inference servers as a new version. It is collective: every
rank of the trainer calls it, rank 0 talks to the servers. Afterwards every server that is still in use has been asked
and holds that version; none is ever left in use with weights of two versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from trainer.engines.base import EngineGoneError
from trainer.engines.served import ServedEngine
from trainer.errors import RunError, UserError
from trainer.hf_folder import shapes_problem, tensor_shapes, ties_head
from trainer.train.distributed import World

log = logging.getLogger(__name__)

Submit = Callable[[Coroutine[Any, Any, Any]], "Future[Any]"]
"""Runs a coroutine on the engine's event loop, from another thread (`BackgroundLoop.submit`)."""

SIGN_SECONDS = 2.0
"""How often ranks that wait hear of rank 0."""


@dataclass(frozen=True, slots=True)
class PublishStats:
    """How one version was published, the same on every rank."""

    version: int
    transport: Literal["nccl", "disk", "ipc"]
    bytes: int
    """Of one copy of the weights."""
    prepare_seconds: float = 0.0
    """Before generation was interrupted: gathering, writing, meeting servers."""
    pause_seconds: float = 0.0
    """Until no request ran any more."""
    transfer_seconds: float = 0.0
    """Until every server held the weights."""
    resume_seconds: float = 0.0
    """Until requests flowed again."""
    interruption_seconds: float = 0.0
    """The last three together; 0 where requests flowed all the while."""
    total_seconds: float = 0.0
    """Of the whole call."""
    servers: int = 0
    """Servers that hold the version now."""


class Publisher(Protocol):
    """One way of bringing weights to servers."""

    def publish(self, version: int, *, folder: bool = False) -> PublishStats:
        """Give the present weights to all servers as `version`. Collective.

        Where no server is left, those that come back within the pool's patience get the version from a folder; when
        the run is to stop, none is waited for.

        folder: also leave them in a folder, so that servers can join (and ones that died come back) before the next
        version; rank 0's wish counts.

        Raises:
            RunError: no server holds the version; the same on every rank.
        """

    def offer(self) -> None:
        """Leave the version that was published last in a folder, where it is in none, so that servers can join now.

        Collective; the weights must not have changed since.

        Raises:
            RunError: it cannot be written.
        """

    def close(self) -> None:
        """Leave every group and remove what was written for servers. Rank 0 after its last `publish`; others too."""


@dataclass(frozen=True, slots=True)
class Outlet:
    """Rank 0's way to the servers: their engine, and what runs coroutines on its loop.

    stop: whether the run is to stop; then no server is waited for.
    """

    engine: ServedEngine
    submit: Submit
    stop: Callable[[], bool] = lambda: False

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise UserError unless the trained tensors are those of the model that the servers were started with."""
        model = self.engine.model
        try:
            served, tied = tensor_shapes(model), ties_head(model)
        except (OSError, ValueError) as error:
            raise UserError(f"the servers' model cannot be read: {error}") from error
        if problem := shapes_problem(shapes, served, tied, "the trained model", "the served one"):
            raise UserError(
                f"servers of {model} cannot take the trained weights: {problem}. Start them with that model"
            )


def agree(world: World, problem: BaseException | None) -> None:
    """Raise rank 0's error on every rank. Collective."""
    text = world.broadcast(f"{problem}" if isinstance(problem, UserError) else repr(problem) if problem else "")
    if problem is not None:
        raise problem
    if text:
        raise RunError(text)


def wait_together(world: World, ended: Future[Any] | None) -> None:
    """Wait for what rank 0 waits for, for however long: no rank is without a sign of life. Collective."""
    while True:
        done = ended is not None and bool(wait([ended], SIGN_SECONDS).done)
        if world.broadcast(done):
            return


def may_come_back(outlet: Outlet, problem: BaseException | None) -> bool:
    """Whether the problem is that all servers were lost on the way, and others are to be waited for; it is logged."""
    wait = isinstance(problem, EngineGoneError) and outlet.engine.pool.patience > 0
    if wait:
        log.warning("the last engine servers were lost while they were to get weights: %s", problem)
    return wait


def measured(outlet: Outlet, stats: PublishStats) -> PublishStats:
    """The stats with what the engine measured of its last update."""
    own = outlet.engine.stats
    return replace(
        stats,
        servers=len(outlet.engine.pool.usable()),
        pause_seconds=own.pause_seconds,
        transfer_seconds=own.transfer_seconds,
        resume_seconds=own.resume_seconds,
        interruption_seconds=own.interruption_seconds,
    )


def same_host(engine: ServedEngine) -> bool:
    """Whether there are servers in use, and all listen on this host's loopback address."""
    hosts = {server.url.partition("://")[2].rpartition(":")[0] for server in engine.pool.usable()}
    return bool(hosts) and hosts <= {"127.0.0.1", "localhost", "[::1]"}
