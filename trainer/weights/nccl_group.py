"""A process group between the trainer's rank 0 and all ranks of some inference servers, for SGLang's weight updates.

Meeting and sending both have deadlines, and whatever may block (NCCL's first contact can, and cannot be called back)
runs in a thread that may be left behind. A link that failed once is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from trainer.engines.base import EngineError
from trainer.engines.http import RefusedError, Server, ServerPool
from trainer.train.rendezvous import tcp_store

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.0002
END_SECONDS = 5.0
"""How long each side may take to close a group."""
# A failed link must not end the trainer: its deadlines are ours, not those of NCCL's own watchdog.
_UNWATCHED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_FOREVER = timedelta(days=30)
_environment = threading.Lock()
_left_behind: list[Any] = []  # groups whose destructor might wait for a dead peer


class LinkError(EngineError):
    """A weight transfer over a process group failed."""


class PeerGoneError(LinkError):
    """Another server of the same group is gone: nothing is wrong with this way of sending."""


class MissingPeerError(LinkError):
    """Servers that did not come to a rendezvous.

    servers: those that are missing.
    refused: they answered that they cannot, and may be served in another way; else they do not answer or still wait.
    """

    def __init__(self, message: str, servers: list[Server], refused: bool) -> None:
        super().__init__(message)
        self.servers, self.refused = servers, refused


class Link:
    """One group that was met; made by `meet`, used from one event loop."""

    def __init__(self, name: str, servers: tuple[Server, ...], group: Any, device: torch.device) -> None:
        self.name, self.servers, self.broken = name, servers, False
        self._group, self._device = group, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def whole(self) -> bool:
        """Whether it may be used: no transfer has failed, and every server of it is in use."""
        return not self.broken and not any(server.problem for server in self.servers)

    async def send(self, flat: Tensor, ready: torch.cuda.Event | None, seconds: float) -> None:
        """Broadcast a buffer [bytes] uint8 from here; returns when all of it has left this device.

        ready: recorded once the buffer is filled (GPU). Raises LinkError when it fails or takes longer than `seconds`;
        the link is broken then.
        """
        work = _in_thread(lambda: self._broadcast(flat, ready, seconds))
        done, _ = await asyncio.wait({work}, timeout=seconds + 1.0)
        if not done:
            self.abandon()
            raise LinkError(f"{self._names} did not take a weight broadcast within {seconds:g} s")
        try:
            work.result()
        except LinkError:
            raise
        except Exception as error:
            self.abandon()
            raise LinkError(f"the weight broadcast to {self._names} failed: {_first_line(error)}") from error

    def abandon(self) -> None:
        """Give the link up, whatever it is doing. Returns at once."""
        if self.broken:
            return
        self.broken = True
        _left_behind.append(self._group)
        threading.Thread(target=self._abort, name=f"abort {self.name}", daemon=True).start()

    async def dissolve(self, pool: ServerPool) -> None:
        """Close it on every side that still answers."""
        closing = None if self.broken else _in_thread(lambda: dist.destroy_process_group(self._group))
        self.broken = True
        await asyncio.gather(*(_destroy(pool, server, self.name) for server in self.servers if not server.problem))
        if closing is not None:
            await asyncio.wait({closing}, timeout=END_SECONDS)
            if closing.done():
                closing.exception()  # it is gone either way

    @property
    def _names(self) -> str:
        return ", ".join(server.name for server in self.servers)

    def _broadcast(self, flat: Tensor, ready: torch.cuda.Event | None, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            if ready is not None:
                ready.wait()  # the stream waits, not this thread
            work = self._group.broadcast([flat], options)
            while not work.is_completed():
                if self.broken:
                    raise LinkError(f"the weight broadcast to {self._names} was given up")
                if time.monotonic() > deadline:
                    self.abandon()
                    raise LinkError(f"{self._names} did not take a weight broadcast within {seconds:g} s")
                time.sleep(POLL_SECONDS)
            work.wait()

    def _abort(self) -> None:
        with contextlib.suppress(Exception):  # gloo may not know how; its own deadline ends it
            self._group.abort()


async def meet(pool: ServerPool, servers: tuple[Server, ...], name: str, device: torch.device, seconds: float) -> Link:
    """Form a group with all ranks of the servers; rank 0 is this process.

    Args:
        name: name of the group, never used before.
        device: where the weights are; on a CPU the group is gloo's.

    Raises:
        MissingPeerError: some servers did not come in time, or refused; says which.
    """
    sizes = await asyncio.gather(*(_ranks(pool, server, seconds) for server in servers))
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = _address_towards([server.url for server in servers])
    size = 1 + sum(sizes)
    store = tcp_store(address, 0, size, True, timedelta(seconds=seconds))
    own = _in_thread(lambda: _join(name, backend, store, size, seconds))
    joins: dict[asyncio.Task[Any], Server] = {}
    for server, offset in zip(servers, accumulate(sizes[:-1], initial=1), strict=True):
        body = {
            "master_address": address, "master_port": store.port, "rank_offset": offset, "world_size": size,
            "group_name": name, "backend": backend,
        }  # fmt: skip
        call = pool.call(server, "POST", "/init_weights_update_group", body, seconds)
        joins[asyncio.create_task(call)] = server
    started = {own, *joins}
    await asyncio.wait(started, timeout=seconds + 1.0, return_when=asyncio.FIRST_EXCEPTION)
    refused = {server: error for task, server in joins.items() if task.done() and (error := task.exception())}
    silent = [server for task, server in joins.items() if not task.done()]
    if not refused and not silent and own.done() and not own.exception():
        return Link(name, servers, own.result(), device)
    for task in joins:
        task.cancel()
    own.add_done_callback(_forget)
    # While one is missing the others wait for it too: those that are not even well are the ones to name.
    if not refused:
        well = await asyncio.gather(*(pool.healthy(server) for server in silent))
        silent = [server for server, is_well in zip(silent, well, strict=True) if not is_well] or silent
    missing = list(refused) or silent or list(servers)
    await asyncio.gather(*(_destroy(pool, server, name) for server in servers if server not in missing))
    reason = "; ".join(_first_line(error) for error in refused.values())
    if not reason and own.done() and own.exception():
        reason = _first_line(own.exception())
    raise MissingPeerError(
        f"{', '.join(server.name for server in missing)} did not join the weight transfer group within {seconds:g} s"
        f"{': ' if reason else ''}{reason}. It must reach {address}; without such a way set weights.transport=disk",
        missing,
        bool(refused) and all(isinstance(error, RefusedError) for error in refused.values()),
    )


async def _ranks(pool: ServerPool, server: Server, seconds: float) -> int:
    """How many processes one server is."""
    try:
        info = await pool.call(server, "GET", "/server_info", None, seconds)
    except EngineError as error:
        message = f"{server.name} did not join the weight transfer group: {error}"
        raise MissingPeerError(message, [server], refused=False) from error
    return int(info.get("tp_size") or 1)


async def _destroy(pool: ServerPool, server: Server, name: str) -> None:
    with contextlib.suppress(EngineError):
        await pool.call(server, "POST", "/destroy_weights_update_group", {"group_name": name}, END_SECONDS)


def _address_towards(urls: list[str]) -> str:
    """This host's address as servers see it: loopback only where all of them are on it."""
    found = "127.0.0.1"
    for url in urls:
        host = url.partition("://")[2].rpartition(":")[0].strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # asks the routing table, sends nothing
            try:
                probe.connect((host, 9))
            except OSError as error:
                raise LinkError(f"there is no way to {url}: {error.strerror}") from error
            address = str(probe.getsockname()[0])
        if address not in ("127.0.0.1", "::1"):
            found = address
    return found


def _join(name: str, backend: str, store: Any, size: int, seconds: float) -> Any:
    """Rank 0's side of the group, with the same keys in the store as SGLang's `init_custom_process_group`."""
    with _environment:
        before = {key: os.environ.get(key) for key in _UNWATCHED}
        os.environ.update(_UNWATCHED)
        if backend == "gloo" and store.host in ("127.0.0.1", "::1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            group, _ = c10d._new_process_group_helper(
                size,
                0,
                [],
                c10d.Backend(backend),
                c10d.PrefixStore(name, store),
                group_name=name,  # type: ignore[arg-type]  # (newer torch has a type of its own for names)
                timeout=_FOREVER if backend == "nccl" else timedelta(seconds=seconds),
            )
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a daemon thread, which nobody has to wait for at the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="weight transfer", daemon=True).start()
    return future


def _forget(future: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more: its error is no news."""
    if not future.cancelled() and future.exception() is None:
        _left_behind.append(future.result())


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
