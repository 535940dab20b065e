"""The loop of a supervised start, and what the run's own log and numbers get of it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.base_run import Attempt
from trainer.checkpoint.recover import RecoverStore
from trainer.config import RunConfig
from trainer.errors import InterruptedRunError
from trainer.metrics import Monitor, log_file, make_sinks
from trainer.paths import RunPaths
from trainer.sft.loop import SftRun
from trainer.start_mark import digest_of, mark_done

PHASE = "supervised"
RECORD_EVERY_S = 1.0
LINE_EVERY_S = 10.0


class StartRun(SftRun):
    """One attempt at a supervised start: its config is from `start_config`, its monitor that of the run."""

    monitor: StartMonitor

    def __init__(self, attempt: Attempt) -> None:
        paths = RunPaths.of(attempt.config).supervised
        own = StartMonitor(attempt.monitor, attempt.config, paths.logs if attempt.world.is_main else None)
        super().__init__(replace(attempt, monitor=own))
        self._began_with = digest_of(attempt.model_folder) if attempt.world.is_main else ""
        self.paths, self.store = paths, RecoverStore(paths.recover, self.writer)

    def run(self) -> None:
        """See SftRun."""
        try:
            super().run()
        finally:
            self.monitor.close()

    def _persistent_folder(self, number: int) -> Path:  # noqa: ARG002 (there is only the last one)
        return self.paths.checkpoints

    def _interrupt(self) -> None:
        try:
            super()._interrupt()
        except InterruptedRunError as error:
            told = str(error).replace("interrupted", "interrupted in the supervised start", 1)
            raise InterruptedRunError(told) from None

    def _close(self, **facts: Any) -> None:
        super()._close(**facts)
        if self.world.is_main:
            told = {"global_step": self.state.global_step, "seconds": round(self.state.seconds, 3), **facts}
            told["checkpoint"] = str(self.paths.checkpoints)
            mark_done(self.paths, self.fingerprint, self._began_with, told)


class StartMonitor(Monitor):
    """Keeps everything in the start's own folder; the run's log and numbers get its progress.

    Its steps are none of the run's, so the run's files have them as `warmup` records and in lines of another shape.

    Args:
        folder: of the start's log and numbers; None on all ranks but 0.
    """

    def __init__(self, run: Monitor, config: RunConfig, folder: Path | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, run.attempt, [] if folder is None else make_sinks(config, folder))
        self._run = run
        self._lines = None if folder is None else log_file(folder / "main.log")
        self._recorded = time.monotonic()
        self._told = 0.0
        self._latest: dict[str, Any] = {}
        self._recent: list[float] = []

    def record(self, kind: str, **fields: Any) -> None:
        """See Monitor."""
        super().record(kind, **fields)
        if kind == "recover":
            self._progress(recover_step=fields["global_step"])
        elif kind == "attempt":
            at = f" It goes on after step {fields['resume_step']}." if fields["resume_step"] else ""
            self._run.info(f"Supervised start: {fields['total_steps']} steps before reinforcement.{at}")
            kept = fields["resume_step"] or None
            self._progress(step=fields["resume_step"], steps=fields["total_steps"], recover_step=kept)
        elif kind == "step":
            self._step(fields)
        elif kind == "eval":
            self._run.info(
                f"Supervised start: held-out loss {fields['loss']:.4f} per answer token on {fields['num_tasks']} "
                f"examples ({fields['name']})."
            )

    def info(self, message: str) -> None:
        """A line in the start's own log."""
        self._line(logging.INFO, message)

    def warn(self, message: str) -> None:
        """As Monitor, in the run's files, too."""
        self._line(logging.WARNING, message)
        self.record("warning", message=message)
        self._run.warn(f"supervised start: {message}")

    def close(self) -> None:
        """Close the start's own files."""
        super().close()
        if self._lines is not None:
            self._lines.close()

    def _line(self, level: int, message: str) -> None:
        if self._lines is not None:
            self._lines.handle(logging.LogRecord("trainer", level, "", 0, message, None, None))

    def _step(self, fields: dict[str, Any]) -> None:
        number, total, now = fields["global_step"], fields["total_steps"], time.monotonic()
        self._recent = [*self._recent[-19:], fields["step_time_s"]]
        remaining = (total - number) * sum(self._recent) / len(self._recent)
        loss, speed, last = fields["stats"].get("loss"), fields["tokens_per_s"], number == total
        self._latest |= {"step": number, "loss": loss, "tokens_per_s": speed, "remaining_s": round(remaining, 1)}
        if last or now - self._recorded >= RECORD_EVERY_S:
            self._progress()
        if last or not self._told or now - self._told >= LINE_EVERY_S:
            self._told = now
            told = "" if loss is None else f", loss {loss:.4f}"
            self._run.info(
                f"Supervised start: step {number} of {total}{told}, {speed:.0f} tokens/s, about {remaining:.0f} s left."
            )

    def _progress(self, **news: Any) -> None:
        self._latest |= news
        now = time.monotonic()
        seconds, self._recorded = round(now - self._recorded, 3), now
        self._run.record("warmup", phase=PHASE, **self._latest, seconds=seconds, cached=False)
