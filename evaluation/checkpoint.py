"""Which checkpoint an evaluation is of: a hash of its files, kept beside other caches so that it is made once."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from trainer.assets import cache_root
from trainer.files import sha256, write_atomic

_KINDS = (".safetensors", ".bin", ".json", ".model", ".jinja", ".txt", ".gguf")


def checkpoint_sha256(folder: Path, cache_dir: str = "") -> str:
    """Hash of names and contents of weights, configuration and tokenizer.

    It is kept by path, size and time of every file: only a checkpoint that was not seen before is read.
    """
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
