"""The two slots of a run's recover checkpoints as files: which is whole, which is newer, what it was written with.

Standard library only, and no other module of ours: `python3 - FOLDER < slots.py` prints what is there as JSON, on any
host.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SLOTS = ("slot-a", "slot-b")
STATE, MANIFEST, LATEST = "state.json", "MANIFEST.json", "LATEST"
_BLOCK = 1 << 20
_READERS = 8


@dataclass(frozen=True)
class RunState:
    """Where a run is at the end of a step: plain numbers, beside the tensors.

    global_step: steps that are done.
    next_task: number of the next training task.
    optimizer_steps: optimizer steps that are done.
    version: weight version.
    seconds: run time so far, over all attempts.
    seconds_saved: run time at the last persistent checkpoint.
    eval_due: an interruption came before this step's evaluation.
    taken: numbers of tasks above `next_task` that are consumed already.
    """

    global_step: int
    next_task: int
    optimizer_steps: int
    version: int
    seconds: float
    seconds_saved: float = 0.0
    eval_due: bool = False
    taken: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slot:
    """A complete recover checkpoint.

    serial: its number among all that the run has written.
    base: digest of the model that its adapters belong to; empty where it has none, or an earlier version wrote it.
    """

    name: str
    path: Path
    state: RunState
    fingerprint: dict[str, Any]
    serial: int
    base: str = ""


class Slots:
    """The slots under a run's recover folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self) -> tuple[Slot | None, list[str]]:
        """The newest slot whose files are whole, and a sentence for every problem."""
        return self.newest_of(self.read())

    def read(self) -> dict[str, tuple[Slot | None, str]]:
        """Check all files of every slot; by name, the slot or what is wrong with it."""
        return {name: read_slot(self.folder / name) for name in SLOTS if (self.folder / name).is_dir()}

    def newest_of(self, slots: dict[str, tuple[Slot | None, str]]) -> tuple[Slot | None, list[str]]:
        """As `newest`, from the result of `read`."""
        latest, problems = self._pointer(list(slots))
        problems += [
            f"recover checkpoint {self.folder / name} {problem}" for name, (_, problem) in slots.items() if problem
        ]
        whole = [slot for slot, _ in slots.values() if slot is not None]
        return max(whole, key=lambda slot: (slot.serial, slot.name == latest), default=None), problems

    def occupied(self) -> bool:
        """Whether there is any slot, whole or not."""
        return any((self.folder / name).is_dir() for name in SLOTS)

    def _pointer(self, present: list[str]) -> tuple[str, list[str]]:
        """The slot that LATEST names, and what is wrong with that."""
        try:
            latest = (self.folder / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return "", [f"{self.folder / LATEST} is missing"] if present else []
        except (OSError, ValueError) as error:
            return "", [f"{self.folder / LATEST} cannot be read ({error})"]
        if latest not in SLOTS:
            return "", [f"{self.folder / LATEST} names no slot ({latest[:40]!r})"]
        if latest not in present:
            return latest, [f"recover checkpoint {self.folder / latest} is missing, though LATEST names it"]
        return latest, []


def read_slot(path: Path) -> tuple[Slot | None, str]:
    """A slot that is whole, or what is wrong with it (`is damaged: …`)."""
    if problem := damage(path):
        return None, f"is damaged: {problem}"
    try:
        saved = json.loads((path / STATE).read_text(encoding="utf-8"))
        state = RunState(**saved["state"] | {"taken": tuple(saved["state"].get("taken", ()))})
        base = str(saved.get("base", ""))
        return Slot(path.name, path, state, dict(saved["fingerprint"]), int(saved["serial"]), base), ""
    except (KeyError, TypeError, ValueError):
        return None, "was written by another version of the trainer"


def damage(path: Path) -> str:
    """What is wrong with a slot's files; empty when all are as the manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected = {str(name): (int(facts["bytes"]), str(facts["sha256"])) for name, facts in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    if missing := {STATE, ".metadata"} - expected.keys():
        return f"its {MANIFEST} does not list {min(missing)}"
    with ThreadPoolExecutor(_READERS) as pool:  # hashing leaves the interpreter to others
        problems = pool.map(lambda name: _file_damage(path / name, name, *expected[name]), expected)
        return next(filter(None, problems), "")


def serial_of(path: Path) -> int:
    """Number of the checkpoint in a slot, be its tensors whole or not; -1 where it cannot be told."""
    try:
        return int(json.loads((path / STATE).read_text(encoding="utf-8"))["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def look(folder: Path) -> dict[str, Any]:
    """Describe the slots for somebody who does not train now; changes nothing.

    Returns:
        slots: name, bytes, age_s (since its last file was written), whole, problem, and of a whole slot global_step,
            serial and fingerprint.
        newest: name of the slot to go on from, or None.
        problems: sentences.
        state: of the newest slot.
        model: config.json, where the folder holds weights instead of slots.
    """
    found = Slots(folder).read()
    newest, problems = Slots(folder).newest_of(found)
    slots = []
    for name, (slot, problem) in found.items():
        path = folder / name
        files = [file.stat() for file in path.rglob("*") if file.is_file()]
        written = max((file.st_mtime for file in files), default=time.time())
        slots.append(
            {
                "name": name,
                "path": str(path),
                "bytes": sum(file.st_size for file in files),
                "age_s": max(time.time() - written, 0.0),
                "whole": slot is not None,
                "problem": problem,
                "global_step": slot.state.global_step if slot else None,
                "serial": slot.serial if slot else None,
                "fingerprint": slot.fingerprint if slot else None,
            }
        )
    return {
        "folder": str(folder),
        "slots": slots,
        "newest": newest.name if newest else None,
        "problems": problems,
        "state": asdict(newest.state) if newest else None,
        "model": _model_of(folder),
    }


def _model_of(folder: Path) -> Any:
    """config.json of a folder of weights; None where it is none."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")) if any(folder.glob("*.safe*")) else None
    except (OSError, ValueError):
        return None


def _file_damage(file: Path, name: str, size: int, digest: str) -> str:
    try:
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        return "" if _sha256(file) == digest else f"{name} has other bytes than were written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _sha256(path: Path) -> str:
    """As trainer.files.sha256, for the Python of any host."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]))))
