"""Writing checkpoints beside the training: a copy in host memory, then a thread that writes them in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed._state_dict_utils import _copy_state_dict
from torch.utils._pytree import tree_map_only

from trainer.train.distributed import World, local_part, with_local_part
from trainer.train.offload import host_room

Record = dict[str, Any]
"""Numbers of a checkpoint, for metrics.jsonl."""


class HostCopy:
    """A copy of a state dict in host memory, pinned where there is a GPU; allocated once, filled for every checkpoint.

    Pinning takes seconds (7.8 s for SmolLM2-135M's state on an H200's host, where a copy takes 0.07 s), so it can be
    done ahead, in a thread. The copy is the function that PyTorch's own asynchronous saving uses: it knows sharded
    tensors.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """dtype: of floating-point tensors in the copy; None: as they are."""
        self._dtype = dtype
        self._room: Future[dict[str, Any]] | None = None

    @property
    def reserved(self) -> bool:
        """Whether memory is allocated, or is being allocated."""
        return self._room is not None

    def reserve(self, tensors: dict[str, Any]) -> None:
        """Begin to allocate memory for a state dict like this one; returns at once."""

        def shell(tensor: torch.Tensor) -> torch.Tensor:  # shape only: the thread must hold no GPU memory
            return torch.empty_like(tensor, device="meta", dtype=self._dtype if tensor.is_floating_point() else None)

        shells = tree_map_only(torch.Tensor, shell, tensors)
        gpu = torch.cuda.is_available()

        def room(shell: torch.Tensor) -> torch.Tensor:
            return with_local_part(shell, host_room(local_part(shell), gpu=gpu))

        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-room")
        self._room = pool.submit(tree_map_only, torch.Tensor, room, shells)
        pool.shutdown(wait=False)

    def take(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Copy the state dict; later changes of its tensors do not reach the copy."""
        if self._room is None:
            self.reserve(tensors)
        assert self._room is not None
        on_gpu = torch.cuda.is_available()
        copied = _copy_state_dict(tensors, self._room.result(), non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        return copied


class BackgroundWriter:
    """A thread that does one piece of work after the other, on every rank in the order in which they were given.

    After a failure nothing more is done until `wait` has raised it. So what is given later never becomes whole before
    what was given earlier: a recover checkpoint is never newer than a persistent one that is not there.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[Record] | None = None
        self._apart: World | None = None

    def start(self, world: World, work: Callable[[World], Record]) -> Future[Record]:
        """Have `work` done. Collective.

        Args:
            work: gets the ranks of `world` with a group for messages that nobody else uses: the training's collectives
                go on at the same time.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if self._apart is None:
            self._apart = world.apart()
        apart, before = self._apart, self._last

        def run() -> Record:
            if before is not None:
                before.result()
            return work(apart)

        self._last = self._pool.submit(run)
        return self._last

    @property
    def failed(self) -> bool:
        """Whether something could not be written, and `wait` has not yet raised it. Does not wait."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def wait(self) -> None:
        """Wait until nothing is being written; raises the error of what could not be."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def finish(self) -> BaseException | None:
        """Wait until nothing is being written; returns the error that `wait` would raise, and will."""
        return None if self._last is None else self._last.exception()
