"""Where an attempt starts, at a recover checkpoint or at the beginning, and when it must not start."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.fingerprint import DATA, TRACES, differences, fingerprint, shared_changes
from trainer.checkpoint.slots import Slot, Slots
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.tasks.datafiles import data_digests
from trainer.tasks.evidence import MOST_SENTENCES


@dataclass(frozen=True, slots=True)
class Start:
    """Where an attempt starts.

    slot: what to go on from; None: at the beginning.
    notes: sentences about that choice, for people.
    done: steps whose trajectories are written (trainer.type=null).
    next_task: the first task after them.
    data: digests of the task's data files, from before its ranks were started: the others would wait while rank 0 reads
        a large one. None: it has read none yet.
    """

    slot: Slot | None
    notes: tuple[str, ...] = ()
    done: int = 0
    next_task: int = 0
    data: dict[str, str] | None = None

    @property
    def global_step(self) -> int:
        """Steps that are already done."""
        return self.slot.state.global_step if self.slot else self.done


def settings_and_data(config: RunConfig, data: dict[str, str] | None = None) -> dict[str, Any]:
    """The fingerprint with what tells the contents of the task's data files apart.

    Args:
        data: their digests; None: they are read for it.

    Raises:
        UserError: one is missing or cannot be read.
    """
    digests = data_digests(config) if data is None else data
    found = fingerprint(config) | {f"{DATA}{name}": digest for name, digest in digests.items()}
    traced = config.trainer.type == "sft" and config.supervised.dataset  # the start of a run, not chats of the user's
    return found | ({TRACES: f"{MOST_SENTENCES} sentences"} if traced else {})


def way_out(config: RunConfig, changed: list[str], checkpoint: str = "CHECKPOINT") -> str:
    """What to do where a run cannot go on since settings or data differ.

    Args:
        changed: lines of `differences`.
        checkpoint: folder of its weights.
    """
    text = "\nto go on: put them back. To start afresh: trial_name=NEW, or recover_mode=disabled"
    if config.model.path and all(line.startswith(DATA) for line in changed):
        text += (
            f". To train its weights further on the data as they are now: trial_name=NEW --recover-from {checkpoint}"
        )
        text += ", the path of a persistent checkpoint of this run" if checkpoint == "CHECKPOINT" else ""
    return text


def find_start(config: RunConfig, recover: Path, metrics: Path | None = None) -> Start:
    """The newest whole slot that fits the configuration. Changes nothing on disk.

    Args:
        metrics: the run's records, which tell of checkpoints that have gone.

    Raises:
        UserError: a checkpoint is demanded and missing, one was written and has gone, none is whole, or it was written
            with other settings or data.
    """
    store = Slots(recover)
    if config.recover_mode == "disabled":
        start = _from_another(config)
        if not store.occupied():
            return start
        note = (
            f"recover_mode=disabled: starting afresh; the earlier recover checkpoint under {recover} is kept until "
            "this run writes its own"
        )
        return Start(start.slot, (note, *start.notes))
    slot, problems = store.newest()
    if slot is None:
        if config.recover_mode == "resume" or problems:
            raise UserError(
                f"there is no whole recover checkpoint under {recover}"
                + "".join(f"\n  {p}" for p in problems)
                + "\nnothing was changed. To start afresh: recover_mode=disabled, or another trial_name"
            )
        if step := _last_written(metrics):
            raise UserError(
                f"this run has written a recover checkpoint of step {step}, and there is none under {recover}: put the "
                "folder back (was it left behind when the run was moved, or is its storage not mounted?). Nothing was "
                "changed. To start afresh: recover_mode=disabled, or another trial_name"
            )
        return _from_another(config)
    changed = differences(slot.fingerprint, settings_and_data(config))
    if changed:
        raise UserError(
            f"the recover checkpoint of step {slot.state.global_step} was written with other settings or data "
            "(checkpoint -> now):\n  " + "\n  ".join(changed) + way_out(config, changed)
        )
    notes = [f"{p}; going on from {slot.name} (step {slot.state.global_step})" for p in problems]
    if config.trainer.type == "sft" and config.supervised.dataset and TRACES not in slot.fingerprint:
        notes.append(
            "the recover checkpoint is of an earlier version: memories with sentences that mislead may have had 3 "
            f"sentences: from here on they have {MOST_SENTENCES} where {config.supervised.dataset} says no other number"
        )
    return Start(slot, tuple(notes))


def _last_written(metrics: Path | None) -> int:
    """Step of the last recover checkpoint that a run's records tell of; 0 without one."""
    step = 0
    if metrics is None or not metrics.exists():
        return 0
    with metrics.open("rb") as lines:
        for line in lines:
            if b'"kind": "recover"' in line:
                with suppress(ValueError, KeyError, TypeError):
                    step = int(json.loads(line)["global_step"])
    return step


def _from_another(config: RunConfig) -> Start:
    """Start of a run without a checkpoint of its own: that of another run where `recover_from` names one.

    Raises:
        UserError: no checkpoint there is whole, or it does not fit.
    """
    if not config.recover_from or config.model.path == config.recover_from:  # weights are loaded as any model's
        return Start(None)
    folder = Path(config.recover_from)
    slot, problems = Slots(folder).newest()
    if slot is None:
        raise UserError(
            f"recover_from={folder}: there is no whole recover checkpoint"
            + "".join(f"\n  {p}" for p in problems)
            + "\nname another run, or leave recover_from out to start at the beginning"
        )
    if changed := shared_changes(slot.fingerprint, settings_and_data(config)):
        raise UserError(
            f"recover_from={folder}: the checkpoint of step {slot.state.global_step} does not fit this run "
            "(checkpoint -> now):\n  "
            + "\n  ".join(f"{key}: {was} -> {now}" for key, was, now in changed)
            + "\nput them back, or name a folder of weights, such as a persistent checkpoint, to take these alone"
        )
    note = f"starting from the recover checkpoint of step {slot.state.global_step} of another run, {slot.path}"
    return Start(slot, (note, *problems))


def completed_step(logs: Path) -> int:
    """Global step at which the run was completed, from its summary; 0 when it was not."""
    try:
        summary: dict[str, Any] = json.loads((logs / "summary.json").read_text(encoding="utf-8"))
        return int(summary["global_step"]) if summary["status"] == "completed" else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
