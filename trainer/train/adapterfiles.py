"""Adapters on disk: written as PEFT reads them, and merged into a whole model where only such a one will do."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.adapter_folder import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    AdapterFolder,
    adapter_config,
    is_adapter_folder,
    tokenizer_files,
)
from trainer.assets import adapter_base, cache_root
from trainer.config_lora import LoraConfig
from trainer.errors import UserError
from trainer.files import disk_error, sha256, write_atomic
from trainer.hf_folder import tensor_shapes
from trainer.staging import staged_folder
from trainer.train.lora import A, Adapter, B

MADE_OF, RUN = ".made-of.json", ".begun-by"
"""Files of a merged model: its adapter, with the time of its last use as their own; and a run that began with it."""
UNUSED = ".unused-"
"""How the name of one begins that is being removed."""
SUPERSEDED_SECONDS, UNUSED_SECONDS = 86400.0, 30 * 86400.0
"""After so long without use a merged model is removed: one whose adapter has changed since, and any other."""


def write_adapter(folder: Path, base: str, config: LoraConfig, adapters: dict[str, Adapter]) -> None:
    """Write adapters into a folder in PEFT's format.

    Args:
        base: path of the model that they belong to; written as an absolute one, as the adapter may be moved.
        adapters: whole, by the name of the weight that each belongs to.
    """
    tensors, targets = {}, set()
    for name, adapter in adapters.items():
        layer = name.removesuffix(".weight")
        targets.add(layer.rpartition(".")[2])
        tensors[f"{PREFIX}{layer}{A}"] = adapter.a.detach().cpu().contiguous()
        tensors[f"{PREFIX}{layer}{B}"] = adapter.b.detach().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if base and Path(base).is_dir():
        base = str(Path(base).absolute())
    facts = adapter_config(base, config.rank, config.alpha, list(targets))
    (folder / CONFIG).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def whole_model(folder: Path, cache_dir: str = "", *, run: str = "") -> Path:
    """A folder that holds a whole model: the same one, or where it holds an adapter, its base with it merged in.

    That is made once, in the folder `merged` of the cache; of several processes that make it one is the first. Others
    that nobody has used for long are removed there.

    Args:
        run: a run that begins with it. What it is given stays: its servers read it again, and adapters that it saves
            have it as their base. So it is not one that only somebody else can keep; who just reads it now takes that.

    Raises:
        UserError: the adapter or its base cannot be read, or they do not belong together.
        RunError: the disk is full.
    """
    if not is_adapter_folder(folder):
        return folder
    adapter, base = AdapterFolder.read(folder), adapter_base(folder, cache_dir)
    place = cache_root(cache_dir) / "merged" / f"{folder.name}-{_digest(folder, base)}"
    _make(place, adapter, base)
    if not _noted(place, run) and (run or not place.is_dir()):  # somebody else's, who may remove it: one of our own
        place = place.with_name(f"{place.name}-{os.getuid()}")
        _make(place, adapter, base)
        _noted(place, run)
    _remove_unused(place, str(folder.resolve()))
    return place


def _make(place: Path, adapter: AdapterFolder, base: Path) -> None:
    """Merge an adapter into a folder, unless that is there."""
    if place.is_dir():
        return
    try:
        with staged_folder(place) as staging:
            _merge(adapter, base, staging)
            (staging / MADE_OF).write_text(json.dumps({"adapter": str(adapter.folder.resolve())}), encoding="utf-8")
    except UserError:
        if not place.is_dir():  # else another process was faster
            raise


def _noted(place: Path, run: str) -> bool:
    """Note that a merged model is used now, and by which run; whether that could be done."""
    try:
        os.utime(place / MADE_OF)
        if run:
            write_atomic(place / RUN, run + "\n")
    except OSError:
        return False
    return True


def _remove_unused(place: Path, adapter: str) -> None:
    """Remove what nobody has used for long beside a merged model, and what was made of its adapter as it was before.

    What a run began with stays, and what earlier versions merged: they have not noted what it is for.
    """
    for other in place.parent.iterdir():
        if other.name.startswith(UNUSED):  # of a removal that was cut short
            shutil.rmtree(other, ignore_errors=True)
            continue
        with suppress(OSError, ValueError, KeyError):
            made_of = json.loads((other / MADE_OF).read_text(encoding="utf-8"))
            longest = SUPERSEDED_SECONDS if made_of["adapter"] == adapter else UNUSED_SECONDS
            unused = time.time() - (other / MADE_OF).stat().st_mtime > longest
            if unused and other != place and not (other / RUN).exists():
                gone = other.rename(other.with_name(f"{UNUSED}{os.getpid()}-{other.name}"))  # what is there is whole
                shutil.rmtree(gone)


def _merge(adapter: AdapterFolder, base: Path, target: Path) -> None:
    adapters = _read(adapter)
    try:
        shapes = tensor_shapes(base)
    except ValueError as error:
        raise UserError(f"an adapter is merged into safetensors: {error}") from error
    for name, one in adapters.items():
        wanted, has = (one.b.shape[0], one.a.shape[1]), shapes.get(name)
        if has != wanted:
            found = f"has shape {list(has)}" if has else "is not there"
            raise UserError(
                f"{adapter.folder} does not belong to {base}: by the adapter {name} is {list(wanted)}, and in the "
                f"model it {found}: name its own base as base_model_name_or_path in {CONFIG}"
            )
    for file in (*base.glob("*.json"), *base.glob("*.jinja"), *tokenizer_files(base), *tokenizer_files(adapter.folder)):
        shutil.copyfile(file, target / file.name)
    for file in sorted(base.glob("*.safetensors")):
        with _told(f"{file} cannot be read: copy or download the model again"):
            tensors: dict[str, Tensor] = load_file(file)
        for name in tensors.keys() & adapters.keys():
            tensors[name] = adapters[name].merged(tensors[name]).to(tensors[name].dtype)
        with _told(f"{target / file.name} cannot be written"):
            save_file(tensors, target / file.name, metadata={"format": "pt"})


@contextmanager
def _told(problem: str) -> Iterator[None]:
    """Turn an error of safetensors into that of the disk behind it, or else into a UserError."""
    try:
        yield
    except SafetensorError as error:
        if (system := disk_error(error)) is not None:
            raise system from error
        raise UserError(f"{problem} ({error})") from error


def _read(adapter: AdapterFolder) -> dict[str, Adapter]:
    """The adapters of a folder, by the name of the weight that each belongs to."""
    path = adapter.folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): copy or download the adapter again") from error
    layers = {name.removeprefix(PREFIX).removesuffix(A) for name in stored if name.endswith(A)}
    found = {}
    for layer in layers:
        a, b = (stored.pop(f"{PREFIX}{layer}{end}", None) for end in (A, B))
        if a is None or b is None:
            raise UserError(f"{path} lacks the other half of the adapter of {layer}: copy or download it again")
        found[f"{layer}.weight"] = Adapter(a, b, adapter.scale(layer, a.shape[0]))
    if stored or not found:
        raise UserError(
            f"{path}: {min(stored, default='nothing')} is no adapter of a linear layer: merge it with PEFT "
            "(merge_and_unload) and give the folder of the whole model"
        )
    return found


def _digest(folder: Path, base: Path) -> str:
    """By what a merge is made of: the adapter's content and tokenizer, and its base's files as they are now."""
    files = [file for file in sorted(base.iterdir()) if file.is_file() and file.name not in (MADE_OF, RUN)]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    own = [(file.name, sha256(file)) for file in sorted((folder / CONFIG, folder / WEIGHTS, *tokenizer_files(folder)))]
    return hashlib.sha256(json.dumps([own, str(base.resolve()), stamps]).encode()).hexdigest()[:16]
