"""The closing table: held-out accuracy before and after, at greater lengths, and with the memory blanked."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.config_tasks import FactsConfig, RecallConfig
from trainer.evaluate import EvalResult, EvalSpec
from trainer.files import write_atomic

BEFORE = "before.json"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: what is evaluated, and with which document length."""

    chunks: int
    blank_memory: bool


TRAINING_MIXTURE = Line(chunks=0, blank_memory=False)


def trained_chunks(config: RunConfig) -> list[int]:
    """Fewest and most chunks of a training document; empty where the task does not choose them."""
    task = config.task
    return [task.min_chunks, task.max_chunks] if isinstance(task, RecallConfig | FactsConfig) else []


def time_split(folder: Path) -> dict[str, float]:
    """Seconds by phase over all attempts of a run, warm-up and closing measurements included, from its metrics.jsonl.

    Steps that were done twice, because the run went back to a recover checkpoint, count twice: so did the time.
    """
    seconds: dict[str, float] = defaultdict(float)
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if record["kind"] == "step":
            for name, value in record["timings"].items():
                seconds[name] += value
        elif record["kind"] == "warmup":
            seconds["warmup"] += record.get("seconds", 0.0)
        elif record["kind"] == "eval" and record["name"] != "heldout":
            seconds["eval"] += record["seconds"]
    return {name: round(value, 3) for name, value in seconds.items()}


def lines(config: RunConfig) -> list[Line]:
    """The training mixture first, then the longer documents, then the mixture with the memory blanked."""
    # A task of the user's own need not know lengths, nor an agent of theirs a memory.
    lengths = [] if "task.name" in config.custom else config.eval.final_chunks
    table = [TRAINING_MIXTURE, *(Line(chunks, False) for chunks in lengths)]
    return [*table, Line(0, True)] if config.eval.blank_memory and "agent.name" not in config.custom else table


def spec(line: Line, config: RunConfig, refusal_ids: tuple[int, ...]) -> EvalSpec:
    """How a line is measured: greedy; with the memory blanked the policy is forced to answer something."""
    split = config.eval.split
    assert split != "train"  # RunConfig allows it only where nothing is learned
    return EvalSpec(
        split=split,
        num_tasks=config.eval.num_tasks,
        chunks=line.chunks,
        blank_memory=line.blank_memory,
        banned_final_ids=refusal_ids if line.blank_memory else (),
    )


def store_before(folder: Path, results: dict[Line, EvalResult]) -> None:
    """Keep the measurements from before the first step, for a run that is interrupted."""
    rows = [
        {
            "chunks": line.chunks,
            "blank_memory": line.blank_memory,
            "accuracy": r.accuracy,
            "sampled_accuracy": r.sampled_accuracy,
            "metrics": r.metrics,
        }
        for line, r in results.items()
    ]
    write_atomic(folder / BEFORE, json.dumps(rows))


def table(folder: Path, after: dict[Line, EvalResult]) -> list[dict[str, Any]]:
    """Rows of summary.json. `before` is null where it was not measured (a run recovered without its record)."""
    try:
        stored = json.loads((folder / BEFORE).read_text())
    except (OSError, ValueError):
        stored = []
    before = {Line(row["chunks"], row["blank_memory"]): row for row in stored}
    return [
        {
            "chunks": line.chunks,
            "blank_memory": line.blank_memory,
            "before": before[line]["accuracy"] if line in before else None,
            "after": result.accuracy,
            "sampled_before": before[line].get("sampled_accuracy") if line in before else None,
            "sampled_after": result.sampled_accuracy,
            "metrics_before": before[line]["metrics"] if line in before else None,
            "metrics_after": result.metrics,
        }
        for line, result in after.items()
    ]
