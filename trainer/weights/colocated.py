"""Publishing to servers on the trainer's own GPUs: both take turns with the memory, and weights move through CUDA IPC.

In a step, rollouts end; `release` frees the servers' weights and KV cache; the trainer trains; `publish` gives the
servers memory for their weights, lets each read them from the buffer of the rank on its GPU, bucket by bucket, and then
gives them the memory for their KV cache. SGLang must run with MEMORY_SAVER for that. Nothing of SGLang is needed in the
trainer's processes. verl and slime share GPUs in the same way: one handle from the rank of every GPU.

On a CPU a file in shared memory stands in for CUDA IPC, so that the same protocol can be tested without GPUs.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from trainer.engines.base import EngineError, EngineGoneError
from trainer.engines.http import Server, ServerFailedError, ServerLostError
from trainer.engines.options import MEMORY_SAVER
from trainer.errors import CrashError, RunError
from trainer.weights.buckets import Bucket
from trainer.weights.folders import FolderPublisher, caught, offer
from trainer.weights.ipc import SharedBuffer
from trainer.weights.publisher import Outlet, PublishStats, agree, measured
from trainer.weights.source import WeightSource

log = logging.getLogger(__name__)

CALL_SECONDS = 60.0
"""Until a server must be idle, and for each call."""
IDLE_SECONDS = 10.0
"""How long a server may take to finish on the GPU after its last answer."""


class ColocatedPublisher:
    """Publisher for servers that together have the GPUs of all ranks, one rank a GPU.

    Tensor parallel rank j of server-N is on the GPU of training rank N * t + j, where a server has t GPUs:
    `placement.local_places` and `ray_placement.rank_order` see to that.

    Args:
        folders: writes folders where one is asked for, and knows the learner.
        outlet: rank 0's way to the servers, which have joined; None on other ranks.
        bucket_mb: MiB of the buffer on every GPU that its server reads from.
        trades: the servers free their memory while the trainer learns; False: both have theirs all the time.

    Raises:
        CrashError: a server was lost since it joined.
        RunError: the servers do not have the ranks' GPUs, or were not started to give memory away.
    """

    def __init__(
        self, folders: FolderPublisher, outlet: Outlet | None, bucket_mb: int = 512, *, trades: bool = True
    ) -> None:
        self.world = folders.world
        self.source = WeightSource(folders.source.learner, bucket_mb << 20, folders.source.dtype, everywhere=True)
        self._folders, self._outlet, self.trades = folders, outlet, trades
        self._released = False
        self._gpus_each, self._servers = 1, 0
        agree(self.world, caught(lambda: self._look(outlet)) if outlet is not None else None)

    def _look(self, outlet: Outlet) -> None:
        """See how many GPUs the servers have, and whether these are the ranks'.

        The run's settings made sure of that, so what is wrong happened to the servers. Raises CrashError or RunError.
        """
        pool = outlet.engine.pool
        usable = pool.usable()
        try:
            asked = [outlet.submit(pool.call(one, "GET", "/server_info", None, CALL_SECONDS)) for one in usable]
            found = [answer.result() for answer in asked]
        except (ServerLostError, ServerFailedError) as error:
            raise CrashError(str(error)) from error
        for server, info in zip(usable, found, strict=True):
            if self.trades and not info.get("enable_memory_saver"):
                raise RunError(
                    f"{server.name} cannot share its GPU, as it runs without {MEMORY_SAVER}: end it, and start the run "
                    "again, which starts one of its own"
                )
        sizes = {int(info.get("tp_size") or 1) for info in found}
        self._gpus_each, self._servers = max(sizes, default=1), len(usable)
        numbers = sorted(number_of(server) for server in usable)
        if len(sizes) == 1 and numbers == list(range(self.world.size // self._gpus_each)):
            return
        if len(usable) < len(pool.servers):
            raise CrashError(f"servers on the trainer's GPUs were lost ({pool.fates()})")
        raise RunError(
            f"trainer and servers share GPUs one for one: there are {self.world.size} ranks, and "
            f"{', '.join(server.name for server in usable)} with {' and '.join(map(str, sorted(sizes)))} GPUs each; "
            "start the run again, and leave it the servers that it starts itself"
        )

    def release(self) -> float:
        """Wait until the servers are idle and free their GPU memory, until `publish`. Collective.

        Returns:
            Seconds that it took.

        Raises:
            EngineError: one is not idle in time, or refused; those that answer have their memory then.
            CrashError: one was lost.
        """
        began = time.perf_counter()
        if self.trades and not self._released:
            outlet = self._outlet
            agree(self.world, caught(outlet.submit(self._release()).result) if outlet is not None else None)
            self._released = True
        return time.perf_counter() - began

    def publish(self, version: int, *, folder: bool = False) -> PublishStats:
        """See Publisher, but no lost server is waited for. Afterwards the servers have their memory back.

        Raises:
            CrashError: a server was lost that had given its memory away: where it starts again, the trainer has it.
        """
        began = time.perf_counter()
        written = self._folders.write(version) if self.world.broadcast(folder) else None
        self.source.open()
        prepared = time.perf_counter()
        outlet, delivery = self._outlet, None
        if outlet is not None:
            delivery = _Delivery(outlet, len(self.source.buckets), version, self._gpus_each)
            update = outlet.submit(self._update(outlet, delivery, version, written))
            update.add_done_callback(delivery.end)
        try:
            self._hand_over(delivery)
        finally:
            self.source.close()
            if delivery is not None:
                delivery.give_up()
        problem = caught(update.result) if outlet is not None else None
        if isinstance(problem, EngineGoneError):  # not waited for: the run's job starts trainer and servers again
            problem = CrashError(str(problem))
        agree(self.world, problem)
        self._released = False
        stats = PublishStats(version, "ipc", self.source.nbytes, prepared - began)
        if outlet is not None:
            if written is not None:
                self._folders.used(written)
            stats = replace(measured(outlet, stats), total_seconds=time.perf_counter() - began)
        return self.world.broadcast(stats)

    def offer(self) -> None:
        """See Publisher."""
        version = self._outlet.engine.version if self._outlet is not None else 0
        offer(self._folders, self._outlet, self.world.broadcast(version))

    def close(self) -> None:
        """See Publisher."""
        self._folders.close()

    def _hand_over(self, delivery: _Delivery | None) -> None:
        """Gather every bucket on all ranks, and let the servers read it there. Collective."""
        buffer = SharedBuffer(self.source)
        try:
            for number, bucket in enumerate(self.source.buckets):
                handles = self.world.collect(self._filled(bucket, buffer))
                if delivery is not None:
                    delivery.hand_over(number, handles)
                self.world.broadcast(None)  # until all servers have read it, no rank fills its buffer again
        finally:
            buffer.free()
        self.world.collect(None)  # the memory of every rank is free
        if delivery is not None:
            delivery.memory_is_free()

    def _filled(self, bucket: Bucket, buffer: SharedBuffer) -> str:
        self.source.fill(bucket, buffer.flat)
        return buffer.serialized(bucket)

    async def _update(self, outlet: Outlet, delivery: _Delivery, version: int, written: Any) -> None:
        delivery.resumes = self._released
        await outlet.engine.update(version, delivery.load, written)
        if self._released:
            lost = [f"{server.name}: {server.problem}" for server in outlet.engine.pool.servers if server.problem]
            if len(outlet.engine.pool.usable()) < self._servers:
                raise CrashError(f"servers on the trainer's GPUs were lost ({'; '.join(lost)})")
            await outlet.engine.resume()

    async def _release(self) -> None:
        assert self._outlet is not None
        engine = self._outlet.engine
        await engine.pause()
        try:
            engine.pool.choose("")  # raises where all were lost: says what became of them
            servers = engine.pool.usable()
            if len(servers) < self._servers:
                raise CrashError(
                    f"{len(servers)} of the {self._servers} servers on the trainer's GPUs answer: the others may take "
                    "the memory that is wanted for training"
                )
            for answer in await asyncio.gather(*map(self._free, servers), return_exceptions=True):
                if isinstance(answer, BaseException):
                    raise answer
        except BaseException:
            await engine.resume()
            raise

    async def _free(self, server: Server) -> None:
        deadline = time.monotonic() + CALL_SECONDS
        while server.in_flight:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{server.name} still works on {server.in_flight} requests after {CALL_SECONDS:g} s, and its GPU "
                    "is wanted for training: end the rollouts first"
                )
            await asyncio.sleep(0.01)
        # SGLang ends itself unless it is idle. After its last answer one more decoding step may still be on the GPU;
        # this call waits for that.
        assert self._outlet is not None
        pool, memory = self._outlet.engine.pool, {"tags": ["kv_cache", "weights"]}
        await pool.call(server, "POST", f"/flush_cache?timeout={IDLE_SECONDS:g}", {}, CALL_SECONDS)
        await pool.call(server, "POST", "/release_memory_occupation", memory, CALL_SECONDS)


class _Delivery:
    """One version on its way from the ranks' buffers to the servers; on rank 0.

    Its main thread hands over what the ranks have gathered, while the engine's loop runs `load` for every server.
    """

    def __init__(self, outlet: Outlet, buckets: int, version: int, gpus_each: int) -> None:
        self._pool, self._version, self._gpus_each = outlet.engine.pool, version, gpus_each
        self._handles: list[Future[list[str]]] = [Future() for _ in range(buckets)]
        self._free: Future[None] = Future()
        self._changed = threading.Condition()
        self._read: dict[Server, int] = {}  # how many buckets each server has read
        self._ended = False
        self.resumes = False
        """Whether the servers have given their memory away and get it back."""

    async def load(self, server: Server) -> None:
        """Bring the version onto one paused server; called for all of them at the same moment."""
        with self._changed:
            if not self._read:
                self._read = dict.fromkeys(self._pool.usable(), 0)
        try:
            if self.resumes:
                await self._call(server, "/resume_memory_occupation", {"tags": ["weights"]})
            first = number_of(server) * self._gpus_each
            for number, coming in enumerate(self._handles):
                handles = await asyncio.wrap_future(coming)
                last = number == len(self._handles) - 1
                body = {
                    "serialized_named_tensors": handles[first : first + self._gpus_each],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,  # it was emptied when the server paused
                    "weight_version": str(self._version) if last else None,
                }
                await self._call(server, "/update_weights_from_tensor", body)
                self._note(server, number + 1)
        finally:
            self._note(server, len(self._handles))  # it needs no buffer any more, whatever became of it
        await asyncio.wrap_future(self._free)
        if self.resumes:
            await self._call(server, "/resume_memory_occupation", {"tags": ["kv_cache"]})

    def hand_over(self, number: int, handles: Sequence[str]) -> None:
        """Let the servers read a bucket; returns when all that are left have. handles: by training rank."""
        self._handles[number].set_result(list(handles))
        with self._changed:  # bounded: every call of a server has its deadline
            self._changed.wait_for(lambda: self._ended or (self._read and min(self._read.values()) > number))

    def memory_is_free(self) -> None:
        """The ranks have freed their buffers."""
        self._free.set_result(None)

    def give_up(self) -> None:
        """Let no server wait for this thread any longer, whatever happened to it."""
        waited_for: list[Future[Any]] = [*self._handles, self._free]
        for future in waited_for:
            if not future.done():
                future.set_exception(EngineError("the trainer gave the update up"))

    def end(self, _: object) -> None:
        """The update has ended, in whatever way."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _note(self, server: Server, buckets: int) -> None:
        with self._changed:
            self._read[server] = buckets
            self._changed.notify_all()

    async def _call(self, server: Server, path: str, body: dict[str, Any]) -> None:
        await self._pool.call(server, "POST", path, body, CALL_SECONDS)


def number_of(server: Server) -> int:
    """N of `server-N`; -1 where the name has no number."""
    found = re.search(r"(\d+)$", server.name)
    return int(found[1]) if found else -1
