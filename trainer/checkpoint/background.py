"""Writing a recover checkpoint beside the training: a copy in host memory, then a thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict


class HostCopy:
    """A copy of a state dict in host memory, pinned where there is a GPU; made once, filled again for every checkpoint.

    The two functions of PyTorch's that it rests on are those that its own asynchronous saving uses; they know how a
    sharded tensor is copied.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Any] | None = None

    def take(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The state dict as it is now; later changes of its tensors do not reach what is returned."""
        on_gpu = torch.cuda.is_available()
        if self._buffers is None:
            self._buffers = _create_cpu_state_dict(tensors, pin_memory=on_gpu)
        copied = _copy_state_dict(tensors, self._buffers, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        return copied


class BackgroundWriter:
    """One piece of work at a time in a thread. Its error is raised by the next `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: dict[str, Any] | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], dict[str, Any]]) -> None:
        """Begin; nothing else may be under way."""

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:  # handed to the training's thread
                self._error = error

        assert self._thread is None
        self._thread = threading.Thread(target=run, name="recover-checkpoint")
        self._thread.start()

    def poll(self) -> dict[str, Any] | None:
        """What was made since the last call, if it is done; does not wait, and raises nothing."""
        if self._thread is None or self._thread.is_alive() or self._error is not None:
            return None
        return self.wait()

    def wait(self) -> dict[str, Any] | None:
        """Wait for what is under way and return what it made; None where nothing is. Raises what went wrong in it."""
        self.settle()
        result, error = self._result, self._error
        self._thread = self._result = self._error = None
        if error is not None:
            raise error
        return result

    def settle(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        if self._thread is not None:
            self._thread.join()
