"""Lines of the closing table that are measured: logs/after.json, with which a run goes on that ended among them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.evaluate import EvalResult, EvalSpec
from trainer.files import write_atomic

FILE = "after.json"


class MeasuredLines:
    """Keeps results of the weights after the last step, for the same settings; not those with failed trajectories.
    Nothing is kept where a judge or classes of the user's own measure: they may be other ones in the next attempt.

    Args:
        folder: the run's logs.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.path = folder / FILE
        judged = config.reward.name == "memalpha" and config.judge.reader == "server"
        self._keeps = not (config.custom or judged)
        text = config.model_dump_json(exclude={"recover_mode"})  # which an interrupted run has another one of
        self._settings = hashlib.sha256(text.encode()).hexdigest()

    def read(self, step: int) -> dict[EvalSpec, EvalResult]:
        """What is kept of the weights after this step; empty where the file is missing, damaged, of other settings."""
        try:
            stored = json.loads(self.path.read_text())
            if not self._keeps or (stored["step"], stored["settings"]) != (step, self._settings):
                return {}
            return dict(_line(row) for row in stored["lines"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def keep(self, step: int, results: dict[EvalSpec, EvalResult]) -> None:
        """Write what is measured. Raises OSError."""
        if self._keeps:
            lines = [
                {"spec": asdict(spec), "result": asdict(result)}
                for spec, result in results.items()
                if not result.num_failed
            ]
            write_atomic(self.path, json.dumps({"step": step, "settings": self._settings, "lines": lines}))

    def forget(self) -> None:
        """The table is written, or the weights will be other ones."""
        self.path.unlink(missing_ok=True)


def _line(row: dict[str, Any]) -> tuple[EvalSpec, EvalResult]:
    spec, result = row["spec"], row["result"]
    banned, (low, high) = tuple(spec.pop("banned_final_ids")), result.pop("interval")
    return EvalSpec(**spec, banned_final_ids=banned), EvalResult(**result, interval=(low, high))
