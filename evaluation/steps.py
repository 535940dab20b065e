"""Checkpoints of a run by where they lie: their training step, those of a folder, and what is kept beside the run.

A run's files are FILEROOT/checkpoints/USER/EXPERIMENT/TRIAL/actor/epoch…globalstepN and FILEROOT/logs/USER/…; that of
its supervised start is …/TRIAL/supervised.
"""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from evaluation.progress import say
from trainer.adapter_folder import CONFIG, INSIDE, WEIGHTS, is_adapter_folder, tokenizer_files
from trainer.assets import adapter_base, cache_root
from trainer.files import sha256, write_atomic
from trainer.paths import SUPERVISED

SCORES = "scores"
_STEP = re.compile(r"epoch\d+epochstep\d+globalstep(\d+)$")
_LEFT_OUT = ("questions", "inputs", "notes")


def global_step(folder: Path) -> int | None:
    """The training step of a checkpoint by its folder's name; None for a folder of another name."""
    found = _STEP.search(folder.name)
    return int(found.group(1)) if found else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints anywhere below a folder, by their step; those that are still being written are left out."""
    found = [path for path in folder.rglob("epoch*") if path.is_dir() and global_step(path) is not None]
    return sorted((path for path in found if (path / "config.json").is_file()), key=lambda p: (global_step(p) or 0, p))


def place_of_run(checkpoint: Path) -> tuple[Path, str, str, str] | None:
    """Fileroot, user, experiment and trial that a checkpoint's place says; None for another place."""
    parts = checkpoint.absolute().parts
    if parts[-1:] == (INSIDE,):  # the adapter of one
        parts = parts[:-1]
    if parts[-1:] == (SUPERVISED,):
        parts = (*parts, "")  # the one of a supervised start lies a folder higher than the run's own
    # fileroot / checkpoints / user / experiment / trial / actor / epoch…
    if len(parts) < 7 or parts[-6] != "checkpoints":
        return None
    return Path(*parts[:-6]), parts[-5], parts[-4], parts[-3]


def keep_scores(results: dict[str, Any], place: Path) -> Path | None:
    """Write the numbers of results into the folder of the run that the checkpoint is of; the file, None without a run.

    place: the results' folder, whose name the file gets. Raises OSError where the run's folder cannot be written.
    """
    run = place_of_run(Path(results["model_path"]))
    if run is None:
        return None
    fileroot, *names = run
    logs = Path(fileroot, "logs", *names)
    if not (logs / "config.yaml").is_file():
        return None
    rows = [{key: value for key, value in row.items() if key not in _LEFT_OUT} for row in results["rows"]]
    summary = {key: results[key] for key in ("status", "model_path", "time", "engine")} | {"rows": rows}
    file = logs / SCORES / f"{place.name}.json"
    file.parent.mkdir(exist_ok=True)
    write_atomic(file, json.dumps(summary, ensure_ascii=False) + "\n")
    return file


_WEIGHTS = (".safetensors", ".bin", ".gguf")


def weights_stamp(folder: Path) -> list[tuple[str, int, int, int]]:
    """Name, size, time and inode of every file of weights: whether they are still those that were there."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    return [(path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path in files for stat in [path.stat()]]


_KINDS = (".safetensors", ".bin", ".json", ".model", ".jinja", ".txt", ".gguf")


def told_base(folder: Path, cache_dir: str = "") -> Path | None:
    """The base model that an adapter's folder is merged into, which is said; None for a whole model."""
    if not is_adapter_folder(folder):
        return None
    base = adapter_base(folder, cache_dir)
    say(f"{folder} is an adapter: it is merged into its base model, {base}")
    return base


def checkpoint_sha256(folder: Path, cache_dir: str = "") -> str:
    """Hash of names and contents of weights, configuration and tokenizer.

    It is kept by path, size and time of every file: only a checkpoint that was not seen before is read. An adapter's
    hash is also of its base's.
    """
    if is_adapter_folder(folder):
        parts = [sha256(file) for file in (folder / CONFIG, folder / WEIGHTS, *tokenizer_files(folder))]
        parts.append(checkpoint_sha256(adapter_base(folder, cache_dir), cache_dir))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _KINDS)
    stamps = []
    for path in files:
        stat = path.stat()
        stamps.append([path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino])
    stamp = hashlib.sha256(json.dumps([str(folder.resolve()), stamps]).encode()).hexdigest()
    kept = cache_root(cache_dir) / "checkpoint-hashes" / stamp
    with suppress(OSError):
        if len(found := kept.read_text(encoding="ascii").strip()) == 64:
            return found
    with ThreadPoolExecutor(4) as pool:  # hashing leaves the interpreter's lock
        sums = pool.map(sha256, files)
    text = "".join(f"{path.name} {total}\n" for path, total in zip(files, sums, strict=True))
    found = hashlib.sha256(text.encode()).hexdigest()
    with suppress(OSError):  # a cache that cannot be written costs time only
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, found + "\n")
    return found
