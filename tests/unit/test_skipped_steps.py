"""A run whose gradients are not finite: steps are skipped and counted, and the run is given up in words."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
from builders import grouped_query_lm, learner, sampled_rows, small_config

from trainer.base_run import Attempt, SteppedRun
from trainer.checkpoint.start import Start
from trainer.errors import RunError
from trainer.metrics import Monitor
from trainer.train.distributed import single_world
from trainer.types import Row


class Run(SteppedRun):
    """The part of a run that makes optimizer steps."""

    def __init__(self, folder: Path, *settings: str) -> None:
        config = small_config(f"fileroot={folder}", *settings)
        super().__init__(Attempt(config, folder, single_world(), Monitor(folder, 1), lambda: False, Start(None)))
        self.learner = learner(grouped_query_lm(), config)

    def run(self) -> None:
        raise NotImplementedError

    def _publish(self, version: int) -> None:
        raise NotImplementedError

    def step(self, number: int, *minibatches: list[Row]) -> dict[str, float]:
        return self._optimize(list(minibatches), number).values


def batches() -> tuple[list[Row], list[Row]]:
    lm = grouped_query_lm()
    good = sampled_rows(lm, 5, lm.config.vocab_size)
    bad = copy.deepcopy(good)
    bad[1].advantage = math.nan
    return good, bad


def test_a_run_that_learns_nothing_any_more_is_given_up(tmp_path: Path) -> None:
    good, bad = batches()
    run = Run(tmp_path, "train.max_skipped_steps=3", "train.minibatches=2")

    assert run.step(1, good, bad)["skipped_steps"] == 1
    assert run.step(2, bad, good)["skipped_steps"] == 1  # two in a row, then one that counts
    assert run.step(3, good, bad)["skipped_steps"] == 1
    with pytest.raises(
        RunError, match=r"step 4: the gradient was not finite for 3 optimizer steps in a row.*--recover"
    ):
        run.step(4, bad, bad)

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [line["message"] for line in lines if line["kind"] == "warning"]
    assert told[-1] == "step 4: the gradient was not finite, 2 optimizer step(s) skipped"
    assert len(told) == 4


def test_zero_bears_any_number_of_them(tmp_path: Path) -> None:
    good, bad = batches()
    run = Run(tmp_path, "train.max_skipped_steps=0")

    assert [run.step(number, bad)["skipped_steps"] for number in range(1, 9)] == [1.0] * 8
    assert run.step(9, good)["skipped_steps"] == 0


def test_steps_without_anything_to_learn_count_as_neither(tmp_path: Path) -> None:
    _, bad = batches()
    idle = copy.deepcopy(bad)
    for row in idle:
        row.advantage = 0.0
    run = Run(tmp_path, "train.max_skipped_steps=2")
    run.step(1, bad)
    run.step(2, idle)

    with pytest.raises(RunError, match="2 optimizer steps in a row"):
        run.step(3, bad)
