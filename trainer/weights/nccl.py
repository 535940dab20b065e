"""Publishing over NCCL: bucketed broadcasts from the trainer's rank 0 into the GPUs of SGLang servers.

One bucket is gathered from the trainer's shards while the one before is sent. Every wait has a deadline. A server that
took only a part of a version is never used with it: it loads the version from a folder (transport auto), or is used no
more.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from trainer.config_parts import WeightsConfig
from trainer.engines.http import Server
from trainer.weights.folders import FolderPublisher, caught, offer
from trainer.weights.nccl_group import Link, LinkError, MissingPeerError, PeerGoneError, meet
from trainer.weights.publisher import Outlet, PublishStats, agree, may_come_back, measured
from trainer.weights.source import WeightSource
from trainer.weights.transfer import Transfer

log = logging.getLogger(__name__)

_generation = itertools.count(1)


class NcclPublisher:
    """Publisher over process groups; with a CPU policy they are gloo's.

    Args:
        folders: what transport auto falls back to, and what writes folders for servers that join.
        outlet: rank 0's way to the servers; None on other ranks.
        config: transport (auto or nccl), bucket size, deadline, servers per group.
    """

    def __init__(self, folders: FolderPublisher, outlet: Outlet | None, config: WeightsConfig) -> None:
        self.world = folders.world
        self.source = WeightSource(folders.source.learner, config.bucket_mb << 20, folders.source.dtype)
        self._folders, self._outlet, self._config = folders, outlet, config
        self._links: list[Link] = []
        self._given_up = ""  # why everything goes through the folder from now on; the same on every rank
        self._buffers: list[Tensor] = []
        self._last = 0

    def publish(self, version: int, *, folder: bool = False) -> PublishStats:
        """See Publisher."""
        alone = self._outlet is not None and not self._outlet.engine.pool.usable()
        self._last = version
        stats = None if self.world.broadcast(alone) or self._given_up else self._publish(version, folder)
        return stats or self._folders.publish(version)

    def _publish(self, version: int, folder: bool) -> PublishStats | None:
        """Publish over links; None where the folder is to be taken: servers cannot be met, or none is left."""
        began = time.perf_counter()
        problem = caught(self._meet) if self._outlet is not None else None
        if self._fall_back(problem) or self._nobody(problem):
            return None
        agree(self.world, problem)
        written = self._folders.write(version) if self.world.broadcast(folder) else None
        transfer = self._transfer(version, written)
        try:
            self._send(transfer)
            stats = self._end(transfer, version, written, began)
        finally:
            if transfer is not None:
                transfer.give_up()
        return stats

    def offer(self) -> None:
        """See Publisher."""
        offer(self._folders, self._outlet, self._last)

    def close(self) -> None:
        """See Publisher."""
        outlet, links, self._links, self._buffers = self._outlet, self._links, [], []
        if outlet is not None:
            for link in links:
                outlet.submit(link.dissolve(outlet.engine.pool)).result()
        self._folders.close()

    def _fall_back(self, problem: Exception | None) -> bool:
        """Whether to leave NCCL for good, because the servers cannot be met. Collective; the same on every rank."""
        if isinstance(problem, LinkError) and self._config.transport == "auto":
            self._given_up = str(problem)
            log.warning("weights go through %s from now on, not over NCCL: %s", self._folders.root, problem)
        self._given_up = self.world.broadcast(self._given_up)
        return bool(self._given_up)

    def _meet(self) -> None:
        """Form links with servers that have none, close those of servers that are gone. Rank 0.

        Raises:
            LinkError: servers that are well refused (transport auto).
            EngineError: no server is left.
        """
        outlet = self._outlet
        assert outlet is not None
        pool = outlet.engine.pool
        while True:
            usable = pool.usable()
            if not usable:
                pool.choose("")  # raises: says what became of them
            count = self._config.servers_per_group or len(usable)
            keep = [
                link
                for link in self._links
                if link.whole and (self._config.servers_per_group or set(link.servers) == set(usable))
            ]
            for link in self._links:
                if link not in keep:
                    outlet.submit(link.dissolve(pool)).result()
            self._links = keep
            linked = {server for link in keep for server in link.servers}
            new = [server for server in usable if server not in linked]
            try:
                groups = math.ceil(len(new) / count)
                for number in range(groups):  # of equal size, give or take one
                    servers = tuple(new[number * len(new) // groups : (number + 1) * len(new) // groups])
                    self._links.append(self._meet_group(outlet, servers))
                return
            except MissingPeerError as error:
                if self._config.transport == "auto" and error.refused:
                    raise
                for server in error.servers:
                    server.discard(str(error))

    def _meet_group(self, outlet: Outlet, servers: tuple[Server, ...]) -> Link:
        # Names are never used twice, not even after the trainer was started again beside the same servers.
        name = f"weights-{time.time_ns():x}-{next(_generation)}"
        pool, seconds = outlet.engine.pool, self._config.deadline_s
        return outlet.submit(meet(pool, servers, name, self.world.device, seconds)).result()

    def _transfer(self, version: int, written: Path | None) -> Transfer | None:
        if self._outlet is None:
            return None
        if not self._buffers:
            self._buffers = [self.source.buffer() for _ in self.source.buckets[:2]]
        repairs, seconds = self._config.transport == "auto" or written is not None, self._config.deadline_s
        return Transfer(
            self._outlet, self._links, self.source.buckets, self._buffers, version, seconds, written, repairs
        )

    def _send(self, transfer: Transfer | None) -> None:
        """Gather every bucket on all ranks and have rank 0 send it. Generation runs on until two are ready."""
        self.source.open()
        ahead = min(2, len(self.source.buckets))
        for number, bucket in enumerate(self.source.buckets):
            flat = transfer.buffer(number) if transfer is not None else None
            self.source.fill(bucket, flat)
            if transfer is not None:
                transfer.offer(number)
                if number == ahead - 1:
                    transfer.start()
        self.source.close()

    def _nobody(self, problem: Exception | None) -> bool:
        """Whether all servers were lost on the way, and others may come: they load a folder. Collective."""
        return self.world.broadcast(self._outlet is not None and may_come_back(self._outlet, problem))

    def _end(self, transfer: Transfer | None, version: int, written: Path | None, began: float) -> PublishStats | None:
        """Wait until the servers hold the version, through the folder where the links failed; None: all were lost.

        Collective.
        """
        failed = transfer.failures() if transfer is not None else []
        torn = self.world.broadcast(bool(failed))
        if torn and self._config.transport == "auto" and written is None:
            written = self._folders.write(version)
        outlet = self._outlet
        problem: Exception | None = None
        if transfer is not None:
            transfer.repair(written)
            problem = caught(transfer.result)
        if self._nobody(problem):
            return None
        agree(self.world, problem)
        if outlet is not None and written is not None:
            self._folders.used(written)
        if torn and self._config.transport == "auto":
            self._fall_back(next((error for error in failed if not isinstance(error, PeerGoneError)), None))
        stats = PublishStats(version, "disk" if torn else "nccl", self.source.nbytes)
        if transfer is not None and outlet is not None:
            stats = measured(outlet, stats)
            stats = replace(stats, prepare_seconds=transfer.started - began, total_seconds=time.perf_counter() - began)
        return self.world.broadcast(stats)
