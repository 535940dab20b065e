"""One version on its way from rank 0 to the servers, over links.

The trainer's thread fills buffers; the engine's event loop asks the servers to receive and has the links send. The two
meet here: the trainer's thread waits until a buffer is free, the loop until one is filled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.engines.base import EngineError
from trainer.engines.dialect import UntouchedError
from trainer.engines.http import Server, ServerFailedError, ServerLostError
from trainer.weights.buckets import Bucket
from trainer.weights.nccl_group import Link, LinkError, PeerGoneError
from trainer.weights.publisher import Outlet

# Seconds that servers get to answer after a link has failed.
GRACE_SECONDS = 10.0


class Transfer:
    """Transfer of one version. `load` runs on the engine's loop, everything else on the trainer's thread.

    Args:
        buffers: two (one for a single bucket).
        seconds: how long each bucket may take.
        folder: holds the version too, for servers that join.
        repairs: whether servers whose link fails wait for `repair`.
    """

    def __init__(
        self,
        outlet: Outlet,
        links: list[Link],
        buckets: list[Bucket],
        buffers: list[Tensor],
        version: int,
        seconds: float,
        folder: Path | None,
        repairs: bool,
    ) -> None:
        self.started = time.perf_counter()
        self._outlet, self._links, self._buckets, self._buffers = outlet, links, buckets, buffers
        self._version, self._seconds, self._folder, self._repairs = version, seconds, folder, repairs
        self._filled: list[Future[torch.cuda.Event | None]] = [Future() for _ in buckets]
        self._repaired: Future[Path | None] = Future()
        self._update: Future[None] | None = None
        self._changed = threading.Condition()
        self._sent = dict.fromkeys(links, 0)  # link -> buckets that have left it
        self._over: set[Link] = set()
        self._failures: list[LinkError] = []
        self._deliveries: dict[Link, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Interrupt generation and begin to send."""
        if self._buffers[0].is_cuda:  # what is gathered already then takes no time of the interruption
            torch.cuda.current_stream(self._buffers[0].device).synchronize()
        self.started = time.perf_counter()
        self._update = self._outlet.submit(self._outlet.engine.update(self._version, self.load, self._folder))
        self._update.add_done_callback(lambda _: self._tell())

    def buffer(self, number: int) -> Tensor:
        """The buffer for a bucket, once every link that still works has sent what was in it."""
        ahead = len(self._buffers)

        def free() -> bool:
            behind = [link for link in self._links if link not in self._over and self._sent[link] <= number - ahead]
            return not behind or (self._update is not None and self._update.done())

        with self._changed:
            self._changed.wait_for(free)  # bounded: every send has its deadline, and so has every call of the update
        return self._buffers[number % ahead]

    def offer(self, number: int) -> None:
        """The bucket's buffer is filled (GPU: will be, once the work queued so far is done)."""
        ready: torch.cuda.Event | None = None
        if self._buffers[0].is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._filled[number].set_result(ready)

    def failures(self) -> list[LinkError]:
        """Wait until every link has delivered or failed; the failures that left servers answering but torn."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._over) == len(self._links) or (self._update is not None and self._update.done())
            )
            return list(self._failures)

    def repair(self, folder: Path | None) -> None:
        """Have servers whose link failed load this folder; None: there is none, they are used no more."""
        self._repaired.set_result(folder)

    def result(self) -> None:
        """Wait for the end of the update. Raises EngineError when no server took the version."""
        assert self._update is not None
        self._update.result()

    def give_up(self) -> None:
        """Let nobody wait for this thread any longer, whatever happened to it."""
        waited_for: list[Future[Any]] = [*self._filled, self._repaired]
        for future in waited_for:
            if not future.done():
                future.set_exception(LinkError("the trainer gave the update up"))

    async def load(self, server: Server) -> None:
        """Bring the version onto one paused server; called for all of them at the same moment."""
        pool = self._outlet.engine.pool
        if not self._deliveries:
            usable = set(pool.usable())
            for one in self._links:
                task = asyncio.create_task(self._run(one, set(one.servers) <= usable))
                task.add_done_callback(lambda t: t.cancelled() or t.exception())  # maybe no server asks any more
                self._deliveries[one] = task
        link = next((link for link in self._links if server in link.servers), None)
        if link is None:
            raise UntouchedError(f"{server.name} joined while weight version {self._version} was being published")
        try:
            await asyncio.shield(self._deliveries[link])
        except EngineError:
            folder = await asyncio.wrap_future(self._repaired) if self._repairs and not server.problem else None
            if folder is None:
                raise
            await self._outlet.engine.dialect.load_folder(pool, server, folder, self._version)

    async def _run(self, link: Link, complete: bool) -> None:
        """Deliver to one link, and note how it went."""
        failure: LinkError | None = None
        try:
            if not complete:
                raise PeerGoneError("a server of the same weight transfer group is gone")
            await self._deliver(link)
        except EngineError as error:
            link.abandon()
            failure = error if isinstance(error, LinkError) else LinkError(str(error))
            raise failure from error
        finally:
            with self._changed:
                if self._repairs and failure is not None and not all(server.problem for server in link.servers):
                    self._failures.append(failure)
                self._over.add(link)
                self._changed.notify_all()

    async def _deliver(self, link: Link) -> None:
        """Bucket after bucket: ask the link's servers to receive it, and send it."""
        for number, bucket in enumerate(self._buckets):
            ready = await asyncio.wrap_future(self._filled[number])
            body = self._request(link, bucket, number == len(self._buckets) - 1)
            requests = {asyncio.create_task(self._ask(server, body)): server for server in link.servers}
            flat = self._buffers[number % len(self._buffers)][: bucket.nbytes]
            sending = asyncio.ensure_future(link.send(flat, ready, self._seconds))
            await asyncio.wait({sending, *requests}, return_when=asyncio.FIRST_EXCEPTION)
            await self._judge(link, sending, requests)
            with self._changed:
                self._sent[link] = number + 1
                self._changed.notify_all()

    async def _judge(
        self, link: Link, sending: asyncio.Future[None], requests: dict[asyncio.Task[None], Server]
    ) -> None:
        """Raise what went wrong with a bucket; servers that do not answer any more are used no more.

        One that waits within a broadcast for another that is gone may hear of nothing else until its own deadline, and
        then it goes with it. Those that answer are only torn.
        """
        done = [task for task in (sending, *requests) if task.done()]
        errors = [error for task in done if (error := task.exception()) is not None]
        if not errors:
            return
        link.abandon()
        await asyncio.wait({sending, *requests}, timeout=min(GRACE_SECONDS, self._seconds))
        lost = [
            server
            for task, server in requests.items()
            if not task.done() or isinstance(task.exception(), ServerLostError | ServerFailedError)
        ]
        for task in requests:
            task.cancel()
        sending.cancel()
        if lost:
            names = ", ".join(server.name for server in lost)
            for server in lost:
                server.discard(f"{names} stopped answering in the middle of a weight update: {errors[0]}")
            raise PeerGoneError(f"{names} of the same weight transfer group stopped answering")
        raise errors[0]

    async def _ask(self, server: Server, body: dict[str, Any]) -> None:
        pool = self._outlet.engine.pool
        await pool.call(server, "POST", "/update_weights_from_distributed", body, self._seconds + 5.0)

    def _request(self, link: Link, bucket: Bucket, last: bool) -> dict[str, Any]:
        return {
            "names": [piece.name for piece in bucket.pieces],
            "dtypes": [str(piece.dtype).removeprefix("torch.") for piece in bucket.pieces],
            "shapes": [list(piece.shape) for piece in bucket.pieces],
            "group_name": link.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # it was emptied when the server paused
            "weight_version": str(self._version) if last else None,
        }

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
