"""start.json: what a run's folder says of its supervised start once that is done (`trainer.sft.start`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trainer.files import write_atomic
from trainer.hf_folder import weights_digest
from trainer.paths import RunPaths

MARK = "start.json"
BEGAN_WITH = "began_with"


def start_facts(paths: RunPaths) -> dict[str, Any]:
    """What start.json says; empty where it or the checkpoint is missing. paths: of the supervised start."""
    try:
        facts = json.loads((paths.logs / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(facts, dict) and "fingerprint" in facts and (paths.checkpoints / "config.json").is_file()
    return facts if whole else {}


def mark_done(paths: RunPaths, settings: dict[str, Any], began_with: str, facts: dict[str, Any]) -> None:
    """Write start.json, then remove the recover checkpoints.

    Args:
        paths, settings (with data): of the start.
        began_with: digest of the weights that it began with, taken then: what servers beside it were started with.
    """
    told = {"fingerprint": settings, BEGAN_WITH: began_with, **facts}
    write_atomic(paths.logs / MARK, json.dumps(told, indent=1))
    shutil.rmtree(paths.recover, ignore_errors=True)


def summary_facts(run: RunPaths) -> dict[str, Any]:
    """What a run's summary says of its supervised start; nothing where it had none."""
    facts = start_facts(run.supervised)
    told = {key: value for key, value in facts.items() if key not in ("fingerprint", BEGAN_WITH)}
    return {"supervised": told} if facts else {}


def digest_before(run: RunPaths) -> str:
    """Digest of the weights that a run's supervised start began with (`hf_folder.weights_digest`); empty without one,
    or where an older version wrote start.json.
    """
    return str(start_facts(run.supervised).get(BEGAN_WITH, ""))


def digest_of(model: Path) -> str:
    """Digest of the weights in a folder; empty where they cannot be read."""
    try:
        return weights_digest(model)
    except (OSError, ValueError):
        return ""
