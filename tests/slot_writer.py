"""Writes recover slots as files, for tests of what looks at them without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.checkpoint.fingerprint import fingerprint
from trainer.checkpoint.slots import LATEST, MANIFEST, STATE
from trainer.config import RunConfig
from trainer.files import sha256


def write_slot(
    recover: Path,
    name: str,
    serial: int,
    step: int,
    config: RunConfig,
    *,
    data: dict[str, Any] | None = None,
    **state: Any,
) -> Path:
    """A whole slot; the last one written is LATEST. data: what its fingerprint has of data files."""
    slot = recover / name
    slot.mkdir(parents=True)
    plain = {"global_step": step, "next_task": 4 * step, "optimizer_steps": step, "version": step, "seconds": 1.0}
    record = {"serial": serial, "state": {**plain, **state}, "fingerprint": fingerprint(config) | (data or {})}
    (slot / STATE).write_text(json.dumps(record))
    (slot / ".metadata").write_bytes(b"metadata")
    (slot / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    files = sorted(path for path in slot.iterdir())
    manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
    (slot / MANIFEST).write_text(json.dumps(manifest))
    (recover / LATEST).write_text(name + "\n")
    return slot
