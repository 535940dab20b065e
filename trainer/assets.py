"""Where downloaded models and data are kept, and how `model.path` becomes a folder that can be loaded.

Standard library only: the operator side reads the names and places from here too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from trainer.adapter_folder import CONFIG, AdapterFolder, is_adapter_folder
from trainer.errors import UserError
from trainer.files import LFS_MARK, refuse_pointer

SHARED_DATASETS = Path("/storage/datasets")
"""Where `clusterkit setup` puts data sets on the shared storage."""
MODEL_ASSETS = ("smollm2-135m",)
"""Models that `clusterkit assets get` can fetch."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def cache_root(cache_dir: str = "") -> Path:
    """Folder of the asset cache: `cache_dir`, else $CLUSTERKIT_CACHE, else ~/.cache/clusterkit."""
    return Path(cache_dir or os.environ.get("CLUSTERKIT_CACHE") or "~/.cache/clusterkit").expanduser()


def data_places(name: str, cache_dir: str = "") -> list[Path]:
    """Where a data set is looked for: $CLUSTERKIT_DATA/name, /storage/datasets/name, and name in the asset cache."""
    own = os.environ.get("CLUSTERKIT_DATA")
    roots = [*([Path(own).expanduser()] if own else []), SHARED_DATASETS, cache_root(cache_dir)]
    return [root / name for root in roots]


def model_folder(name: str, cache_dir: str = "") -> Path:
    """Where the model of that asset name is, or will be, in the cache."""
    return cache_root(cache_dir) / "models" / name


def resolve_model(path: str, cache_dir: str = "") -> Path:
    """Folder of the checkpoint that `model.path` names: a folder, or the name of a fetched asset.

    It may be an adapter's, whose base is there, too.

    Raises UserError when it is neither, or when the folder lacks a config, weights or a tokenizer, or holds Git LFS
    pointers in their place.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        name = path.lower()
        if folder.exists():
            raise UserError(f"model.path={path} is a file: give the folder of a Hugging Face checkpoint")
        if name not in MODEL_ASSETS:
            raise UserError(
                f"model.path={path} is neither a folder nor the name of an asset ({', '.join(MODEL_ASSETS)}): give the "
                "folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer)"
            )
        folder = model_folder(name, cache_dir)
        if not folder.is_dir():
            where = f" --cache-dir {cache_dir}" if cache_dir else ""
            raise UserError(
                f"model.path={path} has not been fetched yet ({folder} does not exist): "
                f"run clusterkit assets get {name}{where}"
            )
    if is_adapter_folder(folder):
        adapter_base(folder, cache_dir)
    else:
        check_model(folder)
    return folder


def adapter_base(folder: Path, cache_dir: str = "") -> Path:
    """Folder of the model that an adapter's folder belongs to.

    Raises UserError when the adapter is incomplete, or its base is not here or is an adapter, too.
    """
    adapter = AdapterFolder.read(folder)
    beside = folder / adapter.base
    named = str(beside) if adapter.base and beside.is_dir() else adapter.base
    if named and is_adapter_folder(Path(named).expanduser()):
        raise UserError(f"{folder} is an adapter of {named}, which is an adapter, too: merge that one first")
    try:
        base = resolve_model(named, cache_dir)
    except UserError as error:
        why = str(error) if Path(adapter.base).expanduser().is_dir() else "it is not here"
        raise UserError(
            f"{folder} is an adapter of the model {adapter.base or '(none is named)'}: {why}. Fetch that model, and "
            f"name its folder as base_model_name_or_path in {folder / CONFIG}"
        ) from error
    if _is_quantised(base / "config.json"):
        raise UserError(
            f"{folder} is an adapter of {base}, whose weights are quantised: name the model that it was quantised from "
            f"as base_model_name_or_path in {folder / CONFIG}"
        )
    return base


def _is_quantised(config: Path) -> bool:
    try:
        return bool(json.loads(config.read_text(encoding="utf-8")).get("quantization_config"))
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{config} cannot be read ({error}): copy or download the checkpoint again") from error


def check_model(folder: Path) -> None:
    """Raise UserError when a checkpoint folder is incomplete or holds Git LFS pointers; nothing heavy is loaded."""
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(f"{folder} is no Hugging Face checkpoint: it has no config.json")
    tokenizer = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not tokenizer:
        raise UserError(f"{folder} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}): save one beside the weights")
    for file in (config, *tokenizer, *_weights(folder)):
        if not file.is_file():
            raise UserError(f"{folder} is incomplete: {file.name} is missing: copy or download the checkpoint again")
        refuse_pointer(file)
        if not file.stat().st_size:
            raise UserError(f"{file} is empty: copy or download the checkpoint again")


def _weights(folder: Path) -> list[Path]:
    for name in _WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
    for name in _WEIGHT_INDEXES:
        index = folder / name
        if not index.is_file():
            continue
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            # A pointer is told apart from a damaged index by the caller's own check.
            if index.read_bytes().startswith(LFS_MARK):
                return [index]
            raise UserError(f"{index} is damaged: copy or download the checkpoint again") from None
        return [index, *(folder / str(shard) for shard in sorted(shards))]
    raise UserError(f"{folder} has no weights ({', '.join(_WEIGHT_FILES[:1] + _WEIGHT_INDEXES[:1])})")
