"""A buffer of weights that another process on the same device reads, and its handle as SGLang takes it."""

from __future__ import annotations

import base64
import os
import pickle
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from trainer.weights.buckets import Bucket
from trainer.weights.folders import SHARED_MEMORY
from trainer.weights.source import WeightSource

# Where `rebuild_cuda_tensor` takes the device; SGLang reads a UUID there, since numbers differ between processes.
_DEVICE_ARGUMENT = 6


class SharedBuffer:
    """Room for any bucket of a source, on this rank's device; on a CPU in a file of shared memory.

    flat: [bytes] uint8.
    """

    def __init__(self, source: WeightSource) -> None:
        self.flat, self._file = source.buffer(), ""
        if not self.flat.is_cuda:
            folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            descriptor, self._file = tempfile.mkstemp(prefix="clusterkit-weights-", dir=folder)
            os.ftruncate(descriptor, max(len(self.flat), 1))
            os.close(descriptor)
            self.flat = torch.from_file(self._file, shared=True, size=len(self.flat), dtype=torch.uint8)

    def serialized(self, bucket: Bucket) -> str:
        """The bucket that is in the buffer, as SGLang's `update_weights_from_tensor` takes it, in base64.

        SGLang unpickles it with a list of allowed modules; of the entries it reads attributes only, so plain namespaces
        do. The buffer must stay as it is until the server has answered.
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
        if self.flat.is_cuda:  # another process reads it next, and knows nothing of our streams
            torch.cuda.synchronize(self.flat.device)
        payload = {"flattened_tensor": _Handle(self.flat[: bucket.nbytes], self._file), "metadata": metadata}
        return base64.b64encode(pickle.dumps(payload)).decode()

    def free(self) -> None:
        """Give the memory back."""
        on_gpu, self.flat = self.flat.is_cuda, torch.empty(0)
        if self._file:
            Path(self._file).unlink(missing_ok=True)
        if on_gpu:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class _Handle:
    """Pickles as a tensor that the reader maps into its own process. file: of a tensor on a CPU."""

    def __init__(self, tensor: Tensor, file: str) -> None:
        self.tensor, self.file = tensor, file

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self.file:
            return partial(torch.from_file, dtype=torch.uint8), (self.file, True, len(self.tensor))
        function, arguments = reductions.reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(self.tensor.device).uuid)
        return function, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
