"""How the first held-out tasks were read before and after training: rollouts/eval_before.jsonl.zst and eval_after….

Records as of a step (`trainer.rollout.record`), and beside them `sections`, the text of every section with the memory
after it, and `scores` of the answer.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.agents.base import AnyAgent
from trainer.rewards.qa import qa_metrics
from trainer.rollout.record import trajectory_record, write_records
from trainer.types import Group, Task, Trajectory

log = logging.getLogger(__name__)

BEFORE, AFTER = "before", "after"


class HeldoutTrajectories:
    """Keeps the trajectories of the first tasks of an evaluation.

    Args:
        count: of so many tasks.
        agent: tells what was read; one of the user's own need not.
    """

    def __init__(self, logs: Path, count: int, agent: AnyAgent, tokenizer: Any) -> None:
        self.folder, self.count, self.agent, self.tokenizer = logs / "rollouts", count, agent, tokenizer

    def write(self, groups: list[Group], name: str) -> None:
        """Write the file of an evaluation, of its first groups. name: BEFORE or AFTER."""
        if not self.count:
            return
        if name == BEFORE:  # an earlier run of this name may have left its end
            self._file(AFTER).unlink(missing_ok=True)
        write_records(
            self._file(name), (self._record(group.task, group.trajectories[0]) for group in groups[: self.count])
        )

    def _file(self, name: str) -> Path:
        return self.folder / f"eval_{name}.jsonl.zst"

    def _record(self, task: Task, trajectory: Trajectory) -> dict[str, Any]:
        counted = trajectory.reward if trajectory.accuracy is None else trajectory.accuracy
        scores = {} if task.questions else qa_metrics(trajectory.answer_text, task.answers)
        record = trajectory_record(task, 0, trajectory, self.tokenizer)
        return record | {"sections": self._sections(task, trajectory), "scores": {"accuracy": counted, **scores}}

    def _sections(self, task: Task, trajectory: Trajectory) -> list[dict[str, Any]] | None:
        """Return what was read; None where the agent does not tell."""
        read = getattr(self.agent, "sections_read", None)
        try:
            return [asdict(section) for section in read(task, trajectory)] if read else None
        except Exception as error:  # a class of the user's own on top of ours: no run ends for want of a record
            log.warning("task %s: sections_read of %s failed: %r", task.id, type(self.agent).__name__, error)
            return None
