"""The ranks of an attempt on the nodes of a Ray cluster: an actor for every rank keeps the rank's process on its node.

Actors reserve resources and carry messages. The training itself runs in a process of its own, as on one machine, so
that signals, exit codes and the end with the parent are the same.
"""

from __future__ import annotations

import logging
import math
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.errors import InterruptedRunError, RunError
from trainer.launch.nccl_settings import log_lines
from trainer.launch.rank_host import RankHost
from trainer.launch.rank_job import RankJob
from trainer.launch.ranks import RankedRun, conclude, last_step, patience
from trainer.launch.ray_placement import rank_order, reserve
from trainer.launch.ray_servers import RayServers, namespace
from trainer.signals import StopFlag

log = logging.getLogger("trainer")

POLL_SECONDS = 0.5
START_SECONDS = 600.0
"""How long a node may take to start the actors of its ranks."""
ANSWER_SECONDS = 60.0
"""A node whose actor does not answer for so long is given up; Ray takes about half a minute to notice a dead one."""


class RayRun(RankedRun):
    """A RankedRun whose ranks are spread over the cluster's nodes.

    With GPUs every rank has one of its own. `trainer.launch.ray_placement` says on which nodes they are.
    """

    def run(self) -> None:
        """See RankedRun; a rank whose node was lost is a RunError, too."""
        names = namespace(self.config.experiment_name, self.config.trial_name)
        ray.init(address="auto", namespace=names, logging_level=logging.WARNING)
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
        """The run's engine servers on the cluster's nodes; on the ranks' own GPUs where the allocation shares them."""
        allocation = self.config.allocation
        if allocation is None or not allocation.colocated:
            return RayServers(self.config, self.folder, self.stop)
        gpus = ranks.ask(lambda actor: actor.gpus.remote(), range(len(ranks.actors)))
        return RayServers(self.config, self.folder, self.stop, gpus)

    def _reserved_actors(self) -> list[Any]:
        """One actor for every rank, by rank."""
        group, bundles = reserve(self.config, self.stop)
        has_gpus = self.config.n_gpus_per_node > 0
        actor = ray.remote(max_restarts=0)(RankHost)
        actors = [
            actor.options(
                num_cpus=1,
                num_gpus=1 if has_gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote()
            for bundle in bundles
        ]
        places = self._first_answers([actor.gpus.remote() for actor in actors])
        here = "" if has_gpus else ray.get_runtime_context().get_node_id()
        return [actors[number] for number in rank_order(places, here)]

    def _first_answers(self, asked: list[Any]) -> list[Any]:
        """What new actors answer: a node that is busy takes its time to start their processes."""
        waiting, give_up = asked, time.monotonic() + START_SECONDS
        while waiting and time.monotonic() < give_up:
            if self.stop():
                raise InterruptedRunError("interrupted while the ranks' places in Ray were made ready")
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_SECONDS)
        return list(ray.get(asked, timeout=ANSWER_SECONDS))

    def _start(self, ranks: _Ranks) -> None:
        address, port = ranks.ask(lambda actor: actor.meeting_place.remote(), [0])[0]
        gpu, meet = 0 if self.config.n_gpus_per_node else None, f"tcp://{address}:{port}"
        job = RankJob(self.config, self.folder, self.attempt, self.start, Path(), meet, gpu)
        data = pickle.dumps(job)
        ray.get([actor.start.remote(rank, data) for rank, actor in enumerate(ranks.actors)], timeout=ANSWER_SECONDS)
        ranks.nodes = ranks.ask(lambda actor: actor.node.remote(), range(len(ranks.actors)))
        log.info("ranks run on %s", ", ".join(ranks.nodes))
        taken = ranks.ask(lambda actor: actor.settings.remote(), range(len(ranks.actors)))
        notes, warnings = log_lines(ranks.nodes, taken)
        for line in notes:
            log.info("%s", line)
        for line in warnings:
            log.warning("%s", line)

    def _conclude(self, ranks: _Ranks) -> None:
        with tempfile.TemporaryDirectory(prefix="clusterkit-") as name:
            meeting = Path(name)
            for rank in range(len(ranks.actors)):
                if rank in ranks.lost:
                    continue
                with suppress(Exception):  # its files are lost with it
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
    """The ranks' actors as the driver sees them.

    actors: by rank.
    nodes: addresses of their nodes, by rank.
    failed: exit codes of ranks that failed.
    lost: ranks that do not answer, and why.
    ended: ranks that have ended or are lost.
    """

    actors: list[Any]
    nodes: list[str] = field(default_factory=list)
    failed: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def ask(self, call: Callable[[Any], Any], ranks: Sequence[int]) -> list[Any]:
        """Call the actors of these ranks; returns their answers."""
        return list(ray.get([call(self.actors[rank]) for rank in ranks], timeout=ANSWER_SECONDS))

    def watch(self, stop: StopFlag) -> None:
        """Wait until every rank has ended; when one fails the others get a moment to notice."""
        forwarded, give_up = False, math.inf
        while len(self.ended) < len(self.actors) and time.monotonic() < give_up:
            if stop() and not forwarded:
                forwarded = True
                self._signal(signal.SIGTERM)
            self._look()
            give_up = min(give_up, time.monotonic() + patience(self.failed, bool(self.lost)))
            time.sleep(POLL_SECONDS)

    def _look(self) -> None:
        running = [rank for rank in range(len(self.actors)) if rank not in self.ended]
        polls = {rank: self.actors[rank].poll.remote() for rank in running}
        ray.wait(list(polls.values()), num_returns=len(polls), timeout=ANSWER_SECONDS)  # of all ranks together
        for rank, reference in polls.items():
            try:
                code = ray.get(reference, timeout=0)
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
