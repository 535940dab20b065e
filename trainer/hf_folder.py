"""Whether a folder of published weights is what a running server can take, told from its files' headers alone.

A server that is given an incomplete or foreign folder finds out half-way, with some weights replaced. So it is
checked before any server hears of it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trainer.adapter_folder import PREFIX, is_adapter_folder

TIED_HEAD = "lm_head.weight"
ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Layers that choose among experts; like these they get no adapters."""
SAMPLED_BYTES = 4096
"""Of a tensor, for `weights_digest`."""


def folder_problem(folder: Path, reference: Path) -> str:
    """Why the weights in `folder` cannot replace those of `reference`; empty when they can.

    Both are Hugging Face folders with safetensors; the first may be an adapter's. Compared are names and shapes, not
    values.
    """
    try:
        new, served, tied = tensor_shapes(folder), tensor_shapes(reference), ties_head(reference)
    except (OSError, ValueError) as error:
        return str(error)
    if is_adapter_folder(folder):
        return _adapter_problem(new, served, str(folder))
    return shapes_problem(new, served, tied, str(folder), "the served model")


def shapes_problem(
    new: dict[str, tuple[int, ...]], served: dict[str, tuple[int, ...]], tied: bool, new_is: str, served_is: str
) -> str:
    """Why tensors of these names and shapes cannot replace the served ones; empty when they can.

    tied: whether the served model's head is its embedding. new_is, served_is: what to call the two.
    """
    new, served = dict(new), dict(served)
    if tied:  # then the head is the embedding, and may be stored once or twice
        new.pop(TIED_HEAD, None)
        served.pop(TIED_HEAD, None)
    if missing := sorted(served.keys() - new.keys()):
        return f"{new_is} lacks {len(missing)} of {len(served)} tensors, {missing[0]} for one"
    if foreign := sorted(new.keys() - served.keys()):
        return f"{new_is} holds {len(foreign)} tensors that {served_is} lacks, {foreign[0]} for one"
    for name, shape in served.items():
        if new[name] != shape:
            return f"{new_is}: {name} has shape {new[name]}, that of {served_is} has {shape}"
    return ""


def _adapter_problem(adapter: dict[str, tuple[int, ...]], served: dict[str, tuple[int, ...]], adapter_is: str) -> str:
    """Why an adapter does not fit the served model; empty where it does."""
    for name, shape in adapter.items():
        layer, half, _ = name.removeprefix(PREFIX).rpartition(".lora_")
        weight = served.get(f"{layer}.weight") if half else None
        if weight is None:
            return f"{adapter_is} holds {name}, and the served model has no such layer"
        wanted, found = (weight[1], shape[1]) if name.endswith("lora_A.weight") else (weight[0], shape[0])
        if wanted != found:
            return f"{adapter_is}: {name} has shape {shape}, and its layer in the served model {weight}"
    return ""


def ties_head(folder: Path) -> bool:
    """Whether the folder's config.json says that the head is the embedding. Raises OSError or ValueError."""
    return bool(_json(folder / "config.json").get("tie_word_embeddings"))


def served_dtype(folder: Path) -> str:
    """Name of the dtype that servers of this folder keep weights in. Raises OSError or ValueError."""
    config = _json(folder / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the folder's safetensors files. Raises OSError or ValueError, with the path."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= {name: tuple(entry["shape"]) for name, entry in header(file).items()}
    return shapes


def linear_layers(folder: Path) -> list[str]:
    """Names of the linear layers of a checkpoint's decoder layers, such as q_proj. Raises OSError or ValueError."""
    inside = (name.split(".") for name, shape in tensor_shapes(folder).items() if len(shape) == 2)
    layers = {
        parts[-2]
        for parts in inside
        if parts[:2] == ["model", "layers"] and parts[-1] == "weight" and "experts" not in parts
    }
    return sorted(layers - ROUTERS)


def weights_digest(folder: Path) -> str:
    """Digest of a folder's weights by the first bytes of every tensor: it tells models apart, and reads little.

    Training changes all of a tensor, so those of another start, another step or another merge differ. It does not
    depend on paths, times, and how tensors are spread over files, which differ between copies.
    Raises OSError or ValueError.
    """
    found: dict[str, bytes] = {}
    for file in folder.glob("*.safetensors"):
        entries = header(file)
        with file.open("rb") as stream:
            first = 8 + int.from_bytes(stream.read(8), "little")
            for name, entry in entries.items():
                start, end = entry["data_offsets"]
                stream.seek(first + start)
                told = f"{name} {entry['dtype']} {entry['shape']} ".encode()
                found[name] = hashlib.sha256(told + stream.read(min(end - start, SAMPLED_BYTES))).digest()
    if not found:
        raise ValueError(f"{folder} holds no .safetensors file")
    return hashlib.sha256(b"".join(found[name] for name in sorted(found))).hexdigest()


def header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors: dtype, shape and data_offsets by name.

    Raises:
        OSError, ValueError: it cannot be read, or is not whole; with the path.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length < 1 << 28 else b""
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no whole safetensors file: write it again") from error
    if file.stat().st_size != 8 + length + end:
        raise ValueError(f"{file} is cut short: {file.stat().st_size} of {8 + length + end} bytes. Write it again")
    return entries


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
