"""Recover checkpoints: two slots, written in turn, each complete or absent, and a pointer to the newer one.

    recover/USER/EXPERIMENT/TRIAL/
      slot-a/  slot-b/    DCP shards, state.json, MANIFEST.json (size and SHA-256 of every file)
      LATEST              name of the slot to go on from

A slot is written under a temporary name, synced, and renamed; only then does LATEST change. Whatever is killed
whenever, one complete slot is left. A slot whose files do not match its manifest is passed over for the other one.
Slots are numbered by when they were written (`serial`), so that the newer one is known even without LATEST.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from trainer.errors import RunError
from trainer.files import disk_error, is_full, sha256, sync_folder, sync_tree, tree_bytes, write_atomic
from trainer.train.distributed import World
from trainer.train.learner import Learner

SLOTS = ("slot-a", "slot-b")
STATE, MANIFEST, LATEST = "state.json", "MANIFEST.json", "LATEST"


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands at the end of a step: plain numbers, beside the tensors.

    global_step: steps done. next_task: number of the next training task. optimizer_steps: for the schedule.
    version: weight version. seconds: run time so far, over all attempts. seconds_saved: run time at the last persistent
    save. eval_due: an interruption came before this step's evaluation.
    """

    global_step: int
    next_task: int
    optimizer_steps: int
    version: int
    seconds: float
    seconds_saved: float = 0.0
    eval_due: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """A complete recover checkpoint that was found. serial: it is the so manieth that the run has written."""

    name: str
    path: Path
    state: RunState
    fingerprint: dict[str, Any]
    serial: int


class RecoverStore:
    """The two slots of one run. `folder` is made when the first checkpoint is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = ""  # the slot that holds the present run's last checkpoint
        self._kept_step = 0

    def newest(self) -> tuple[Slot | None, list[str]]:
        """The newest slot whose files are whole, and a sentence for everything that is not as it should be."""
        present = [name for name in SLOTS if (self.folder / name).is_dir()]
        latest, problems = self._pointer(present)
        found: list[Slot] = []
        for name in present:
            path = self.folder / name
            if problem := damage(path):
                problems.append(f"recover checkpoint {path} is damaged: {problem}")
                continue
            try:
                found.append(_read(path))
            except (KeyError, TypeError, ValueError):
                problems.append(f"recover checkpoint {path} was written by another version of the trainer")
        if not found:
            return None, problems
        return max(found, key=lambda slot: (slot.serial, slot.name == latest)), problems

    def occupied(self) -> bool:
        """Whether there is any slot, whole or not."""
        return any((self.folder / name).is_dir() for name in SLOTS)

    def save(self, learner: Learner, state: RunState, fingerprint: dict[str, Any], world: World) -> dict[str, Any]:
        """Write the older slot and make it the latest. Collective: every rank calls it. Returns a metrics record.

        Raises:
            RunError: the disk is full or the folder cannot be written; the other slot is untouched.

        """
        began = time.perf_counter()
        name, serial = world.gather(self._turn() if world.is_main else ("", 0))[0]
        temporary, final = self.folder / f"{name}.tmp", self.folder / name
        with self._reporting(temporary, world):
            if world.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
        with self._reporting(temporary, world):
            with _one_process_is_fine():
                dcp_save(_tensors(learner), checkpoint_id=temporary, no_dist=world.size == 1)
            if world.is_main:
                record = {"serial": serial, "state": asdict(state), "fingerprint": fingerprint}
                _finish(temporary, final, record)
                write_atomic(self.folder / LATEST, name + "\n")
                if not self._kept:
                    # A fresh start leaves an earlier run's checkpoint until here; from now on it would only mislead.
                    _remove(self.folder / SLOTS[name == SLOTS[0]])
        self._kept, self._kept_step = name, state.global_step
        return {
            "global_step": state.global_step,
            "slot": name,
            "path": str(final),
            "bytes": tree_bytes(final) if world.is_main else 0,
            "seconds": round(time.perf_counter() - began, 4),
        }

    def load(self, learner: Learner, slot: Slot) -> None:
        """Put a slot's tensors into the learner. Collective. The number of ranks may differ from the writer's."""
        tensors = _tensors(learner)
        try:
            with _one_process_is_fine():
                dcp_load(tensors, checkpoint_id=slot.path, no_dist=learner.world.size == 1)
        except CheckpointException as error:
            raise RunError(
                f"the recover checkpoint {slot.path} is whole but does not fit this model: {_reason(error)}. Was "
                "model.path changed? To start afresh: trial_name=NEW, or recover_mode=disabled"
            ) from error
        set_state_dict(
            learner.policy,
            learner.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )
        torch.set_rng_state(tensors["rng"])
        learner.optimizer_steps = slot.state.optimizer_steps
        self._kept, self._kept_step = slot.name, slot.state.global_step

    def _pointer(self, present: list[str]) -> tuple[str, list[str]]:
        """What LATEST says, and what is wrong with that."""
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

    def _turn(self) -> tuple[str, int]:
        """The slot to write now (never the one to go on from), and its serial number."""
        serials = {name: _serial(self.folder / name) for name in SLOTS}
        kept = self._kept or max(SLOTS, key=lambda name: serials[name])
        fresh = max(serials.values()) < 0
        return SLOTS[0] if fresh or kept == SLOTS[1] else SLOTS[1], max(serials.values()) + 1

    @contextmanager
    def _reporting(self, temporary: Path, world: World) -> Iterator[None]:
        """Tell all ranks of a failure to write on any of them, so that none waits for another."""
        problem = ""
        try:
            yield
        except (Exception, CheckpointException) as error:
            if (system := disk_error(error)) is None:
                raise RuntimeError(f"the recover checkpoint could not be written: {_reason(error)}") from error
            problem = self._explain(system)
        problem = next((p for p in world.gather(problem) if p), "")
        if problem:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(problem)

    def _explain(self, error: OSError) -> str:
        kept = f"the one of step {self._kept_step} is untouched" if self._kept else "this run has none yet"
        if is_full(error):
            return (
                f"no space left for a recover checkpoint under {self.folder} ({kept}): free some space there, then "
                "start the same command again to go on"
            )
        return (
            f"cannot write a recover checkpoint under {self.folder}: {error.strerror or error} ({kept}): make the "
            "folder writable, then start the same command again to go on"
        )


def damage(path: Path) -> str:
    """What is wrong with a slot's files; empty when all are as the manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        expected = {str(name): (int(facts["bytes"]), str(facts["sha256"])) for name, facts in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    if missing := {STATE, ".metadata"} - expected.keys():
        return f"its {MANIFEST} does not list {min(missing)}"
    problems = (_file_damage(path / name, name, *facts) for name, facts in expected.items())
    return next(filter(None, problems), "")


def _file_damage(file: Path, name: str, size: int, digest: str) -> str:
    try:
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        return "" if sha256(file) == digest else f"{name} has other bytes than were written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _read(path: Path) -> Slot:
    saved = json.loads((path / STATE).read_text(encoding="utf-8"))
    return Slot(path.name, path, RunState(**saved["state"]), saved["fingerprint"], int(saved["serial"]))


def _serial(path: Path) -> int:
    """Number of the checkpoint in a slot, be its tensors whole or not; -1 where it cannot be told."""
    try:
        return int(json.loads((path / STATE).read_text(encoding="utf-8"))["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _reason(error: BaseException) -> str:
    """The first line of what was wrong on the first rank; DCP's own text is a traceback (and no Exception at all)."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _tensors(learner: Learner) -> dict[str, Any]:
    """State dict in DCP's form, keyed by parameter name so that it does not depend on the number of ranks."""
    unused = not learner.optimizer.state
    model, optimizer = get_state_dict(learner.policy, learner.optimizer)
    if unused:
        # DCP steps an unused optimizer once, by nothing, to have a state to save. That step must not count: Adam's bias
        # correction would differ from that of a run which was saved at another moment.
        for state in learner.optimizer.state.values():
            state["step"].zero_()
    return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state()}


def _finish(temporary: Path, final: Path, record: dict[str, Any]) -> None:
    """Add state and manifest, make everything durable, and give the slot its name."""
    (temporary / STATE).write_text(json.dumps(record, indent=1), encoding="utf-8")
    files = sorted(p for p in temporary.rglob("*") if p.is_file())
    manifest = {str(p.relative_to(temporary)): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync_tree(temporary)
    _remove(final)
    temporary.rename(final)
    sync_folder(final.parent)


def _remove(slot: Path) -> None:
    """Take a slot away in one move: killed half-way, it is whole or gone, never a damaged slot."""
    old = slot.with_name(slot.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if slot.exists():
        slot.rename(old)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """One rank means to save without a process group; DCP warns of that every time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
