"""The ranks of an attempt on the nodes of a Ray cluster: one actor a rank, which keeps the rank's process on its node.

Actors reserve places and carry messages; the training itself runs in processes of their own, as on one machine, so
that signals, exit codes and the end with the parent are the same there and here.
"""

from __future__ import annotations

import logging
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.errors import InterruptedRunError, RunError
from trainer.launch.rank import RankJob
from trainer.launch.ranks import GRACE_SECONDS, conclude, last_step
from trainer.launch.ray_servers import GpusOfNode, RayServers, namespace_of
from trainer.paths import RunPaths
from trainer.signals import SIGNALS, StopFlag

log = logging.getLogger("trainer")

POLL_SECONDS = 0.5
ANSWER_SECONDS = 60.0
"""A node whose actor says nothing for so long is given up; Ray takes about half a minute to notice a dead one."""
WAITING_SECONDS = 60.0
"""How often a run that waits for places says so."""


class RayRun:
    """As `trainer.launch.ranks.RankedRun`, with the ranks spread over the cluster's nodes.

    Without GPUs rank 0 stays on the driver's node, which writes the same log; ranks are spread as far as there are
    nodes. With GPUs every rank has one of its own.
    """

    def __init__(self, config: RunConfig, folder: Path, attempt: int, stop: StopFlag, start: Start) -> None:
        self.config, self.folder, self.attempt, self.stop, self.start = config, folder, attempt, stop, start
        self.global_step = start.global_step

    def run(self) -> None:
        """Train to the end.

        Raises:
            UserError: as rank 0 raised it; RunError when a rank or its node was lost.

        """
        ray.init(address="auto", namespace=namespace_of(self.config), logging_level=logging.WARNING)
        self.stop.install()  # Ray has put handlers of its own in place, which end the process at once
        with ExitStack() as ending:
            ending.callback(ray.shutdown)
            ranks = _Ranks(self._reserved_actors())
            ending.callback(ranks.kill)
            if self.config.engine != "embedded":
                ending.enter_context(self._servers(ranks))
                ending.callback(ranks.kill)  # before the servers that they ask
            self._start(ranks)
            ranks.watch(self.stop)
            self._conclude(ranks)

    def _servers(self, ranks: _Ranks) -> RayServers:
        """The run's engine servers on the cluster's nodes, on the ranks' own GPUs where they share them."""
        wanted = self.config.allocation
        if wanted is None or not wanted.colocated:
            return RayServers(self.config, self.folder, self.stop)
        gpus = ranks.ask(lambda actor: actor.gpus.remote(), range(len(ranks.actors)))
        return RayServers(self.config, self.folder, self.stop, gpus)

    def _reserved_actors(self) -> list[Any]:
        """One actor for every rank, each in its own place."""
        gpus = self.config.n_gpus_per_node > 0
        bundles: list[dict[str, float]] = [{"CPU": 1, **({"GPU": 1} if gpus else {})} for _ in range(self.config.ranks)]
        if not gpus:
            bundles[0][f"node:{ray.util.get_node_ip_address()}"] = 0.001
        group = placement_group(bundles, strategy="PACK" if gpus else "SPREAD")
        self._await(group, bundles)
        actor = ray.remote(max_restarts=0)(RankHost)
        return [
            actor.options(
                num_cpus=1,
                num_gpus=1 if gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote(rank)
            for rank in range(self.config.ranks)
        ]

    def _await(self, group: Any, bundles: Sequence[dict[str, float]]) -> None:
        """Wait for places: a node that is to come back may take its time. Says what is missing."""
        told = time.monotonic()
        while not group.wait(timeout_seconds=POLL_SECONDS):
            if self.stop():
                raise InterruptedRunError(f"interrupted by {self.stop.signal_name} while waiting for places in Ray")
            if time.monotonic() - told > WAITING_SECONDS:
                told = time.monotonic()
                kind = "GPU" if "GPU" in bundles[0] else "CPU"
                free, have = (int(f().get(kind, 0)) for f in (ray.available_resources, ray.cluster_resources))
                log.warning(
                    f"waiting for places: {len(bundles)} ranks want a {kind} each; the cluster has {have}, {free} free"
                )

    def _start(self, ranks: _Ranks) -> None:
        address, port = ranks.ask(lambda actor: actor.meeting_place.remote(), [0])[0]
        job = RankJob(
            self.config,
            self.folder,
            self.attempt,
            self.start,
            Path(),
            f"tcp://{address}:{port}",
            gpu=0 if self.config.n_gpus_per_node else None,
        )
        ranks.ask(lambda actor: actor.start.remote(pickle.dumps(job)), range(len(ranks.actors)))
        ranks.nodes = ranks.ask(lambda actor: actor.node.remote(), range(len(ranks.actors)))
        log.info("ranks run on %s", ", ".join(ranks.nodes))

    def _conclude(self, ranks: _Ranks) -> None:
        with tempfile.TemporaryDirectory(prefix="clusterkit-") as name:
            meeting = Path(name)
            for rank in range(len(ranks.actors)):
                if rank in ranks.lost:
                    continue
                with suppress(Exception):  # what it would tell is lost with it
                    for file, text in ranks.ask(lambda actor: actor.left.remote(), [rank])[0].items():
                        (meeting / file).write_text(text, encoding="utf-8")
            self.global_step = last_step(meeting, self.global_step)
            if ranks.lost:
                for rank, reason in ranks.lost.items():
                    log.error("rank %d: %s", rank, reason)
                rank = next(iter(ranks.lost))
                raise RunError(
                    f"rank {rank} of {len(ranks.actors)} was lost: the node {ranks.nodes[rank]} or its Ray has gone; "
                    "the run goes on from the last recover checkpoint"
                )
            conclude(meeting, ranks.failed, len(ranks.actors))


@dataclass
class _Ranks:
    """The actors as the driver sees them, and the addresses of their nodes.

    failed: exit codes by rank. lost: why, by rank, those that do not answer.
    """

    actors: list[Any]
    nodes: list[str] = field(default_factory=list)
    failed: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def ask(self, call: Callable[[Any], Any], ranks: Sequence[int]) -> list[Any]:
        """Answers of these ranks' actors."""
        return list(ray.get([call(self.actors[rank]) for rank in ranks], timeout=ANSWER_SECONDS))

    def watch(self, stop: StopFlag) -> None:
        """Wait until every rank has ended; when one fails the others get a moment to notice."""
        forwarded, give_up = False, float("inf")
        while len(self.ended) < len(self.actors) and time.monotonic() < give_up:
            if stop() and not forwarded:
                forwarded = True
                self._signal(signal.SIGTERM)
            self._look()
            if (self.failed or self.lost) and give_up == float("inf"):
                give_up = time.monotonic() + GRACE_SECONDS
            time.sleep(POLL_SECONDS)

    def _look(self) -> None:
        running = [rank for rank in range(len(self.actors)) if rank not in self.ended]
        asked = {rank: self.actors[rank].poll.remote() for rank in running}
        for rank, reference in asked.items():
            try:
                code = ray.get(reference, timeout=ANSWER_SECONDS)
            except GetTimeoutError:
                self._lose(rank, f"its node did not answer for {ANSWER_SECONDS:.0f} s")
            except RayError as error:
                self._lose(rank, " ".join(str(error).split())[:300])
            else:
                if code is not None:
                    self.ended.add(rank)
                if code:
                    self.failed[rank] = code

    def _lose(self, rank: int, reason: str) -> None:
        self.lost[rank] = reason
        self.ended.add(rank)

    def _signal(self, number: int) -> None:
        for rank, actor in enumerate(self.actors):
            if rank not in self.ended:
                actor.signal.remote(number)

    def kill(self) -> None:
        """End the actors, and with them their ranks' processes."""
        for actor in self.actors:
            with suppress(Exception):  # gone already
                ray.kill(actor)


class RankHost:
    """The actor: on the node of one rank, keeps the rank's process. The process ends when the actor does."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._folder = tempfile.TemporaryDirectory(prefix="clusterkit-")
        self._process: subprocess.Popen[bytes] | None = None

    def node(self) -> str:
        """Address of this node."""
        return str(ray.util.get_node_ip_address())

    def gpus(self) -> GpusOfNode:
        """The GPUs of this rank."""
        return GpusOfNode(ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids())))

    def meeting_place(self) -> tuple[str, int]:
        """Address of this node and a port that is free here."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return self.node(), int(probe.getsockname()[1])

    def start(self, job: bytes) -> None:
        """Start the rank. job: a pickled RankJob, without its meeting folder."""
        rank_job: RankJob = replace(pickle.loads(job), meeting=Path(self._folder.name))
        console = RunPaths.of(rank_job.config).logs / f"attempt_{rank_job.attempt}" / f"rank_{self._rank}.log"
        # Held back in the rank until it can take them: one that comes during its imports is not lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with console.open("ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "trainer.launch.ray_rank", str(self._rank)],
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        told = pickle.dumps(rank_job)
        # The pipe stays open: its end tells the rank that this actor is no more.
        self._process.stdin.write(len(told).to_bytes(8, "big") + told)
        self._process.stdin.flush()

    def poll(self) -> int | None:
        """Exit code of the rank; None while it runs."""
        return self._process.poll() if self._process else None

    def signal(self, number: int) -> None:
        """Send the rank a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def left(self) -> dict[str, str]:
        """Name and content of what the rank has left."""
        return {path.name: path.read_text(encoding="utf-8") for path in Path(self._folder.name).iterdir()}
