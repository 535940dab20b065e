"""The history of a run from its log, whose lines say less than metrics.jsonl.

Beside the kinds of docs/run-directory.md there are records of kind `stats` (numbers of a step, before or after its own
line), `recover_point` (where a restart would resume), `resume` and `restart` (a new attempt), `rpc` (seconds of one
part of a step), `error` and `failure`.
"""

from __future__ import annotations

from bisect import bisect_left
from math import isfinite
from typing import Any

from clusterkit.runs.log.metrics import History, Record, number
from clusterkit.runs.log.ours import is_ours, planned_steps

KEPT_STEPS = 50_000
KEPT_RECORDS = 200
KEPT_NUMBERS = 1000
"""Limits for hostile logs; a run of weeks has far fewer steps."""

DUMP_AND_POINT_SECONDS = 2.0
"""AReaL logs the restart point right after a dump; an attempt of ours logs it later."""

EVENTS = {"save", "eval", "resume", "restart", "attempt", "finish", "failure", "error", "warning"}


class LogHistory(History):
    """The history of a run by its log.

    `restarts` says why a launcher started again, the oldest first; `failure` is the master's last error unless more
    followed. `rpc_times` (seconds by part of a step), `recover_count` and `save_count` cover the whole log.
    """

    def __init__(self) -> None:
        super().__init__()
        self.restarts: list[Record] = []
        self.errors: list[Record] = []
        self.events: list[Record] = []
        self.failure: Record | None = None
        self.rpc_times: dict[str, float] = {}
        self.recover_count = 0
        self.save_count = 0
        self.dialect = ""
        self._fresh = False  # an attempt has begun and made no step yet
        self._sums: dict[str, list[float]] = {}  # of one step's statistics: sum and count over their parts
        self._means: dict[str, float] = {}
        self._early: dict[str, float] | None = None  # statistics that wait for the line of their step

    def take(self, record: Record) -> None:
        """Add the record of one line."""
        kind, time = record["kind"], number(record, "time")
        self.last_time = time if time is not None else self.last_time
        self.dialect = record.get("dialect") or self.dialect
        takers = {
            "step": self._step,
            "stats": self._stats,
            "recover": self._recover,
            "recover_point": self._recover_point,
            "resume": self._new_attempt,
            "restart": self._new_attempt,
            "rpc": self._rpc,
        }
        kept = {"save": self.saves, "eval": self.evals, "error": self.errors}
        if kind in takers:
            takers[kind](record)
        elif kind in kept:
            self.save_count += kind == "save"
            self._keep(kept[kind], record)
        elif kind == "finish":
            self.finish = {**record, "attempt": self.attempt}
        elif kind == "failure":
            self.failure = record
        elif kind == "warning":
            self.warnings = [*self.warnings[-KEPT_RECORDS:], record["message"]]
        if kind in EVENTS:
            self._keep(self.events, record)

    @property
    def attempt(self) -> int:
        """Number of the latest attempt, 1 if the log has none."""
        return len(self.attempts) or 1

    @property
    def total_steps(self) -> int:
        """Planned steps, 0 if unknown."""
        if self.steps and is_ours(self.steps[-1]):
            return planned_steps(self.steps) or 0
        return super().total_steps

    def eta(self) -> float | None:
        """Return the seconds of all steps to come; None before the first step."""
        estimate = super().eta()
        if estimate is None and self.steps:
            return number(self.steps[-1], "remaining_s")
        return estimate

    def time_split(self) -> dict[str, float]:
        """Return the seconds of the parts of the steps, if the log has them."""
        if self.rpc_times:
            return self.rpc_times
        split: dict[str, float] = {}
        for step in self.steps:
            for name, seconds in step.get("stats", {}).items():
                if name.startswith("timeperf/") and isfinite(seconds):
                    part = name.removeprefix("timeperf/")
                    split[part] = split.get(part, 0.0) + seconds
        return split

    # -- steps and their statistics ---------------------------------------------------------------------------------

    def _step(self, record: Record) -> None:
        if self._seen(record):
            return
        step, early = record["global_step"], self._early
        if not self.attempts or (not self._fresh and (step <= self.global_step or self.finish is not None)):
            self._begin({"kind": "attempt", "time": record["time"], "resume_step": step - 1})
        elif self._fresh and (self.attempts[-1]["resume_step"] is None or step <= self.global_step):
            self._go_back(step - 1)
        if record["step_time_s"] is None and not self._fresh and self.steps:
            record["step_time_s"] = _between(self.steps[-1], record)
        record["attempt"] = self.attempt
        record["stats"] = early or {}
        self._early = None
        self._fresh, self.failure = False, None
        self.steps.append(record)
        if len(self.steps) > KEPT_STEPS:
            del self.steps[: KEPT_STEPS // 10]
        if self.recovers and self.recovers[-1].get("global_step") is None and record.get("dialect") == "lite":
            self._amend_dump(global_step=step)  # Lite dumps before it logs the step

    def _seen(self, record: Record) -> bool:
        """Whether the same line came before, as in logs that were concatenated twice."""
        if record["time"] is None or not self.steps or record["global_step"] > self.global_step:
            return False
        index = bisect_left(self.steps, record["global_step"], key=lambda step: step["global_step"])
        return index < len(self.steps) and self.steps[index]["time"] == record["time"]

    def _stats(self, record: Record) -> None:
        if record["part"] <= 1:
            self._sums, self._means = {}, {}
        for name, value in record["values"].items():
            if name in self._sums or len(self._sums) < KEPT_NUMBERS:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = [total + value, count + 1]
                self._means[name] = (total + value) / (count + 1)
        means = self._means
        target = self._step_of_stats(record)
        if target is None:
            self._early = means
            return
        target["stats"] = means
        if target["step_time_s"] is None:
            parts = [seconds for name, seconds in means.items() if name.startswith("timeperf/")]
            target["step_time_s"] = sum(parts) if parts and sum(parts) > 0 else None

    def _step_of_stats(self, record: Record) -> Record | None:
        """Return the step of some statistics, or None if its line is still to come.

        v0.2 and v0.3 print them just before the step's line, Lite after it. In the output of grep they may come after
        the lines of all steps; then their time decides.
        """
        if not self.steps or self._fresh:
            return None
        if record.get("dialect") == "lite":
            return self.steps[-1]
        time, last = record["time"], self.steps[-1]["time"]
        if time is None or last is None or time > last:
            return None
        index = bisect_left(self.steps, time, key=lambda step: step["time"] or 0.0)
        step = self.steps[index] if index < len(self.steps) else None
        return step if step is not None and not step["stats"] else None

    def _rpc(self, record: Record) -> None:
        if len(self.rpc_times) < KEPT_NUMBERS or record["name"] in self.rpc_times:
            self.rpc_times[record["name"]] = self.rpc_times.get(record["name"], 0.0) + record["seconds"]

    # -- checkpoints and attempts -----------------------------------------------------------------------------------

    def _recover(self, record: Record) -> None:
        step: int | None = None
        if record.get("dialect") == "lite":
            if self.recovers and self.recovers[-1].get("global_step") is None:
                self._amend_dump(time=record["time"])  # another model, or another rank, of the same dump
                return
        else:
            step = self._dumped_step(record["time"])
        record["global_step"] = step
        self.recover_count += 1
        self._keep(self.recovers, record)
        self._keep(self.events, record)

    def _dumped_step(self, time: float | None) -> int | None:
        """Return the step after which a dump was made; None if its line seems to be missing."""
        if not self.steps:
            return None
        last = self.steps[-1]
        if time is None or last["time"] is None:
            return int(last["global_step"])
        index = bisect_left(self.steps, time, key=lambda step: step["time"] or 0.0)
        step = self.steps[index - 1] if index else None
        if step is None:
            return None
        usual = self.step_time() or 0.0
        return int(step["global_step"]) if time - (step["time"] or time) <= max(60.0, usual / 2) else None

    def _recover_point(self, record: Record) -> None:
        dump = self.recovers[-1] if self.recovers else None
        if dump is not None and not dump.get("point") and not self._fresh:
            times = number(dump, "time"), number(record, "time")
            if None in times or abs(times[1] - times[0]) <= DUMP_AND_POINT_SECONDS:  # type: ignore[operator]
                self._amend_dump(global_step=record["global_step"], point=True)
                return
        self._new_attempt({**record, "kind": "resume", "resume_step": record["global_step"]})

    def _amend_dump(self, **fields: Any) -> None:
        """Add fields to the last dump, and to its event, which is another dict once they were saved and loaded."""
        event = next((event for event in reversed(self.events) if event["kind"] == "recover"), {})
        for record in (self.recovers[-1], event):
            record.update(fields)

    def _new_attempt(self, record: Record) -> None:
        """Begin an attempt: a launcher restarts, or an attempt resumes; both lines may be about the same one."""
        if record["kind"] == "restart":
            self._keep(self.restarts, record)
        resume = record.get("resume_step")
        if self._fresh and record["kind"] == "resume":
            if resume is not None:
                self._go_back(resume)
        else:
            self._begin({"kind": "attempt", "time": record["time"], "resume_step": resume})

    def _begin(self, attempt: Record) -> None:
        self._fresh, self.failure, self.finish, self._early = True, None, None, None
        self.attempts.append({**attempt, "attempt": len(self.attempts) + 1})
        if attempt["resume_step"] is not None:
            self._go_back(attempt["resume_step"])

    def _go_back(self, step: int) -> None:
        """Resume after a step: drop the records of later ones."""
        self.attempts[-1]["resume_step"] = step
        for records in (self.steps, self.evals, self.saves):
            keep = len(records)
            while keep and (number(records[keep - 1], "global_step") or 0) > step:
                keep -= 1
            del records[keep:]

    @staticmethod
    def _keep(records: list[Record], record: Record) -> None:
        records.append(record)
        del records[:-KEPT_RECORDS]

    # -- between invocations ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the whole state for JSON."""
        return dict(vars(self))

    @classmethod
    def restored(cls, state: dict[str, Any]) -> LogHistory:
        """Restore a history from its state.

        Raises:
            ValueError, KeyError, TypeError: the state is damaged or of another version.
        """
        history = cls()
        if state.keys() != vars(history).keys() or not isinstance(state["steps"], list):
            raise ValueError("a history of another version")
        vars(history).update(state)
        return history


def _between(before: Record, after: Record) -> float | None:
    """Return the seconds between two steps of one attempt, by their time stamps; None if a clock was set back."""
    start, end = number(before, "time"), number(after, "time")
    if start is None or end is None or end <= start or after["global_step"] != before["global_step"] + 1:
        return None
    return end - start
