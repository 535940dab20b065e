"""Publishing to a server on the trainer's own GPU: both take turns with its memory, and weights move through CUDA IPC.

In a step, rollouts end; `release` frees the server's weights and KV cache; the trainer trains; `publish` gives the
server memory for its weights, lets it read them from the trainer's buffer, bucket by bucket, and then gives it the
memory for its KV cache. SGLang must run with MEMORY_SAVER. Nothing of SGLang is needed in the trainer's process.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from trainer.engines.base import EngineError, EngineGoneError
from trainer.engines.http import Server
from trainer.engines.options import MEMORY_SAVER
from trainer.errors import RunError, UserError
from trainer.weights.buckets import Bucket
from trainer.weights.folders import FolderPublisher, offer
from trainer.weights.publisher import Outlet, PublishStats, measured
from trainer.weights.source import WeightSource

IDLE_SECONDS = 10.0
"""How long the server may take to finish on the GPU after its last answer."""
# Where `rebuild_cuda_tensor` takes the device; SGLang reads a UUID there, since numbers differ between processes.
_DEVICE_ARGUMENT = 6


class ColocatedPublisher:
    """Publisher for one trainer rank and one server without tensor parallel, on one GPU.

    Args:
        folders: writes folders where one is asked for, and knows the learner.
        outlet: the way to the server, which has joined.
        bucket_mb: MiB of the buffer that the server reads from.
        seconds: until the server must be idle, and for each call.

    Raises:
        UserError: there are more ranks or servers, or the server was not started for it.
    """

    def __init__(self, folders: FolderPublisher, outlet: Outlet, bucket_mb: int = 512, seconds: float = 60.0) -> None:
        self.source = WeightSource(folders.source.learner, bucket_mb << 20, folders.source.dtype)
        self._folders, self._outlet, self._seconds, self._released = folders, outlet, seconds, False
        usable = outlet.engine.pool.usable()
        if folders.world.size != 1 or len(usable) != 1:
            raise UserError(
                f"trainer and server share one GPU only one by one: there are {folders.world.size} ranks and "
                f"{len(usable)} servers; give them GPUs of their own"
            )
        info = outlet.submit(outlet.engine.pool.call(usable[0], "GET", "/server_info", None, seconds)).result()
        if not info.get("enable_memory_saver") or int(info.get("tp_size") or 1) != 1:
            raise UserError(
                f"{usable[0].name} cannot share its GPU: start it on one GPU with servers.flags={[MEMORY_SAVER]}"
            )

    def release(self) -> float:
        """Wait until the server is idle and free its GPU memory, until `publish`. Returns the seconds that it took.

        Raises:
            EngineError: it is not idle in time, or refused; it still has its memory then.
        """
        began = time.perf_counter()
        if not self._released:
            self._outlet.submit(self._release()).result()
            self._released = True
        return time.perf_counter() - began

    def publish(self, version: int, *, folder: bool = False) -> PublishStats:
        """See Publisher, but no lost server is waited for. Afterwards the server has its memory back."""
        began = time.perf_counter()
        written = self._folders.write(version) if folder else None
        self.source.open()
        prepared = time.perf_counter()
        buffer = self.source.buffer()

        async def load(server: Server) -> None:
            nonlocal buffer
            if self._released:
                await self._call(server, "/resume_memory_occupation", {"tags": ["weights"]})
            for number, bucket in enumerate(self.source.buckets):
                await asyncio.to_thread(self._fill, bucket, buffer)
                last = number == len(self.source.buckets) - 1
                body = {
                    "serialized_named_tensors": [serialized(buffer, bucket)],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,  # it was emptied when the server paused
                    "weight_version": str(version) if last else None,
                }
                await self._call(server, "/update_weights_from_tensor", body)
            buffer = torch.empty(0)
            if self.source.world.device.type == "cuda":
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()
            if self._released:
                await self._call(server, "/resume_memory_occupation", {"tags": ["kv_cache"]})

        async def update() -> None:
            await self._outlet.engine.update(version, load, written)
            if self._released:
                self._released = False
                await self._outlet.engine.resume()

        try:
            self._outlet.submit(update()).result()
        except EngineGoneError as error:  # not waited for: the run's job starts trainer and server again
            raise RunError(str(error)) from error
        finally:
            self.source.close()
        if written is not None:
            self._folders.used(written)
        stats = PublishStats(version, "ipc", self.source.nbytes, prepared - began)
        return replace(measured(self._outlet, stats), total_seconds=time.perf_counter() - began)

    def offer(self) -> None:
        """See Publisher."""
        offer(self._folders, self._outlet, self._outlet.engine.version)

    def close(self) -> None:
        """See Publisher."""
        self._folders.close()

    async def _release(self) -> None:
        engine = self._outlet.engine
        await engine.pause()
        try:
            server = engine.pool.choose("")  # raises where it was lost: says what became of it
            deadline = time.monotonic() + self._seconds
            while server.in_flight:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{server.name} still works on {server.in_flight} requests after {self._seconds:g} s, and its "
                        "GPU is wanted for training: end the rollouts first"
                    )
                await asyncio.sleep(0.01)
            # SGLang ends itself unless it is idle. After its last answer one more decoding step may still be on the
            # GPU; this call waits for that.
            await self._call(server, f"/flush_cache?timeout={IDLE_SECONDS:g}", {})
            await self._call(server, "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
        except BaseException:
            await engine.resume()
            raise

    async def _call(self, server: Server, path: str, body: dict[str, Any]) -> None:
        await self._outlet.engine.pool.call(server, "POST", path, body, self._seconds)

    def _fill(self, bucket: Bucket, flat: Tensor) -> None:
        self.source.fill(bucket, flat)
        if flat.is_cuda:  # another process reads it next, and knows nothing of our streams
            torch.cuda.synchronize(flat.device)


def serialized(flat: Tensor, bucket: Bucket) -> str:
    """A bucket as SGLang's `update_weights_from_tensor` takes it, in base64: a handle to GPU memory, or CPU bytes.

    SGLang unpickles it with a list of allowed modules; of the entries it reads attributes only, so plain namespaces do.
    The buffer must stay as it is until the server has answered.
    """
    metadata = [
        SimpleNamespace(
            name=piece.name,
            shape=torch.Size(piece.shape),
            dtype=piece.dtype,
            start_idx=start,
            end_idx=start + piece.nbytes,
            numel=piece.nbytes,
        )
        for piece, start in zip(bucket.pieces, bucket.starts, strict=True)
    ]
    part = flat[: bucket.nbytes]
    payload = {"flattened_tensor": _Handle(part) if part.is_cuda else part.clone(), "metadata": metadata}
    return base64.b64encode(pickle.dumps(payload)).decode()


class _Handle:
    """Pickles as a CUDA tensor that the reader maps into its own process."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        function, arguments = reductions.reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        return function, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
