"""The tensors of a checkpoint by name, read in parts: a rank takes from the files what it is going to keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from trainer.hf_folder import header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Shape = tuple[int, ...]
Region = Sequence[slice]
"""A slice of every dimension, with both ends given."""


class Weights(Protocol):
    """Where the values of a model come from."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of every tensor, by its name in the model."""

    def read(self, name: str, region: Region) -> Tensor:
        """That part of a tensor, in host memory and in the dtype that it is kept in; only to be copied from."""

    def place(self, name: str) -> str:
        """What tensors that are best read one after the other have in common."""

    def close(self) -> None:
        """Let go of what is open; it is opened again where it is needed."""


class WeightFiles:
    """A folder's safetensors, one file or several with an index. At most one file is open, and mapped, at a time.

    Raises:
        OSError, ValueError: there are none, or one of them is not whole; with its path.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, Shape] = {}
        for file in _files(folder):
            for name, entry in header(file).items():
                self._files[name], self.shapes[name] = file, tuple(entry["shape"])
        self._open: tuple[Path, Any] | None = None

    def read(self, name: str, region: Region) -> Tensor:
        """See Weights."""
        file = self._files[name]
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = file, safe_open(file, framework="pt").__enter__()
        handle = self._open[1]
        part: Tensor = handle.get_slice(name)[tuple(region)] if region else handle.get_tensor(name)
        return part

    def place(self, name: str) -> str:
        """See Weights."""
        return str(self._files[name])

    def close(self) -> None:
        """See Weights."""
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None


class WholeWeights:
    """Tensors of a model that had to be loaded whole into host memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str, region: Region) -> Tensor:
        """See Weights."""
        return self._tensors[name][tuple(region)]

    def place(self, name: str) -> str:  # noqa: ARG002 (all are in one place)
        """See Weights."""
        return ""

    def close(self) -> None:
        """See Weights."""


def has_safetensors(folder: Path) -> bool:
    """Whether a checkpoint's weights are in safetensors, and not in an older format only."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: fetch the checkpoint again") from error
    return [folder / name for name in sorted(names)]
