"""Check what a run would resume from, and whether its settings fit; without PyTorch, and without changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from clusterkit.common.text_plot import duration, size
from clusterkit.config.fields import applies, setting_text
from clusterkit.config.overrides import parse_overrides, to_config
from clusterkit.config.presets import nest
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.metrics import read_history
from trainer.checkpoint.fingerprint import changes, fingerprint
from trainer.config import RunConfig, flatten
from trainer.errors import UserError


@dataclass(frozen=True)
class Check:
    """The recover checkpoints of a run, compared with a configuration."""

    run: RunDirectory
    found: dict[str, Any]  # by `trainer.checkpoint.slots.look`
    config: RunConfig  # with which the run would be started
    holder: str | None = None  # the process that works on it now

    @property
    def newest(self) -> dict[str, Any] | None:
        """The slot that the run would resume from."""
        return next((slot for slot in self.found["slots"] if slot["name"] == self.found["newest"]), None)

    @property
    def differences(self) -> list[tuple[str, Any, Any]]:
        """Settings that must stay and differ: key, value in the checkpoint, value now."""
        return [] if self.newest is None else changes(self.newest["fingerprint"], fingerprint(self.config))

    @property
    def fits(self) -> bool:
        """Whether a start would resume from a checkpoint."""
        return self.newest is not None and not self.differences and self.config.recover_mode != "disabled"

    @property
    def verdict(self) -> str:
        """What a start would do, as a sentence."""
        slot = self.newest
        if slot is None and self.found["slots"]:
            return "no recover checkpoint is whole: a start is refused"
        if self._goes_on_supervised:
            return "no step of reinforcement has a recover checkpoint: a start goes on with its supervised start"
        if slot is None:
            gone, none = "its recover checkpoints have gone: a start is refused", "there is no recover checkpoint"
            return gone if self._lost else f"{none}: a start begins at the beginning"
        if self.config.recover_mode == "disabled":
            return "recover_mode=disabled: a start begins at the beginning"
        if self.differences:
            return f"the checkpoint of step {slot['global_step']} was written with other settings: a start is refused"
        return f"a start goes on after step {slot['global_step']}, from {slot['name']}"

    @property
    def advice(self) -> str:
        """What to do next."""
        if self.holder:
            return f"it is being trained now by {self.holder}; the checkpoints will be newer once that ends"
        if self.newest is None:
            return self._advice_without_checkpoint()
        if self.config.recover_mode == "disabled":
            return "to go on from it: leave recover_mode=disabled out"
        if self.differences:
            return (
                "to go on with this run: put the settings back. With the new ones: a new trial from this checkpoint, "
                f"--recover-from {self.run.name} trial_name=NEW, or one from the beginning, trial_name=NEW"
            )
        total = self.config.train.total_steps
        if total and self.newest["global_step"] >= total:
            return f"it has reached train.total_steps={total}: a larger one trains on"
        return "repeat the train command"

    @property
    def _goes_on_supervised(self) -> bool:
        return not self.found["slots"] and self.run.keeps_supervised and self.config.recover_mode != "disabled"

    @property
    def _lost(self) -> bool:
        """Whether its records tell of recover checkpoints, and none is there."""
        written = bool(read_history(self.run.metrics).recovers)
        return written and not self.found["slots"] and self.config.recover_mode != "disabled"

    def _advice_without_checkpoint(self) -> str:
        if self._lost:
            return f"put {self.found['folder']} back; to start afresh: recover_mode=disabled, or trial_name=NEW"
        if self._goes_on_supervised:
            return "repeat the train command; it compares the settings and the bytes of the supervised start"
        afresh = "recover_mode=disabled, or trial_name=NEW" if self.found["slots"] else "the train command"
        return f"to start afresh: {afresh}"

    def as_dict(self) -> dict[str, Any]:
        """Return the shape of --json."""
        slots = [{key: value for key, value in slot.items() if key != "fingerprint"} for slot in self.found["slots"]]
        return {
            "experiment": self.run.experiment,
            "trial": self.run.trial,
            "folder": self.found["folder"],
            "fits": self.fits,
            "verdict": self.verdict,
            "resume": None
            if self.newest is None
            else {"slot": self.newest["name"], **(self.found["state"] or {}), "age_s": self.newest["age_s"]},
            "slots": slots,
            "problems": self.found["problems"],
            "differences": [{"key": key, "was": was, "now": now} for key, was, now in self.differences],
            "busy": self.holder,
            "advice": self.advice,
        }

    def lines(self) -> list[str]:
        """Return the check as text."""
        rows = [("run", self.run.name), ("verdict", self.verdict)]
        rows += [(slot["name"], _slot(slot)) for slot in self.found["slots"]]
        rows += [("problem", problem) for problem in self.found["problems"]]
        rows += [("differs", f"{key}: {_plain(was)} → {_plain(now)}") for key, was, now in self.differences]
        rows += [("folder", self.found["folder"]), ("next", self.advice)]
        return [f"{label:<9} {text}" for label, text in rows]


def own_config(run: RunDirectory, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration with which a run was last started, with overrides."""
    try:
        values = yaml.safe_load(run.config.read_text(encoding="utf-8"))
        config = to_config(values if isinstance(values, dict) else {})
    except (OSError, ValueError, yaml.YAMLError, UserError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"{run.config} cannot be read ({reason}): name what to compare with, --preset NAME and settings"
        ) from None
    typed = parse_overrides(overrides)
    values = {**flatten(config), **typed}
    return to_config(nest({key: value for key, value in values.items() if key in typed or applies(key, values)}))


def _slot(slot: dict[str, Any]) -> str:
    facts = f"written {duration(slot['age_s'])} ago, {size(slot['bytes'])}"
    return f"step {slot['global_step']}, whole, {facts}" if slot["whole"] else f"{slot['problem']} ({facts})"


def _plain(value: Any) -> str:
    return "(empty)" if value in (None, "") else setting_text(value)
