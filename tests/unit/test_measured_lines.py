"""What is kept of an interrupted closing table, and when it does not count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config import RunConfig
from trainer.evaluate import EvalResult, EvalSpec
from trainer.measured import FILE, MeasuredLines

RESULTS = {
    EvalSpec("test", 8): EvalResult(0.5, (0.25, 0.75), {"f1": 0.5}, 8, 0, 2.5, 0.375, "ab"),
    EvalSpec("test", 8, documents=32, method="rag"): EvalResult(0.25, (0.0, 0.5), {}, 8, 0, 1.5, None, "cd"),
    EvalSpec("test", 8, blank_memory=True, banned_final_ids=(3, 4)): EvalResult(0.0, (0.0, 0.0), {}, 8, 0, 1.0),
}


def lines(folder: Path, **settings: object) -> MeasuredLines:
    return MeasuredLines(folder, RunConfig.model_validate(settings))


def test_the_next_attempt_reads_what_was_measured(tmp_path: Path) -> None:
    lines(tmp_path).keep(7, RESULTS)

    found = lines(tmp_path, recover_mode="disabled").read(7)

    assert found == RESULTS
    assert list(found) == list(RESULTS)


def test_other_weights_and_other_settings_are_measured_anew(tmp_path: Path) -> None:
    kept = lines(tmp_path)
    assert kept.read(7) == {}
    kept.keep(7, RESULTS)

    assert kept.read(8) == {}
    assert lines(tmp_path, rollout={"temperature": 0.5}).read(7) == {}
    kept.forget()
    assert kept.read(7) == {}
    kept.forget()


def test_a_reward_of_ones_own_may_have_changed(tmp_path: Path) -> None:
    own = lines(tmp_path, reward={"name": "mine:Reward"})

    own.keep(7, RESULTS)

    assert not (tmp_path / FILE).exists()


def test_a_line_with_failed_trajectories_is_measured_again(tmp_path: Path) -> None:
    first, *others = RESULTS
    lines(tmp_path).keep(7, RESULTS | {first: replace(RESULTS[first], num_failed=1)})

    assert list(lines(tmp_path).read(7)) == others


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 7, "settings": "x"', '{"step": 7, "settings": 1}'])
def test_a_damaged_file_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)

    assert lines(tmp_path).read(7) == {}


@pytest.mark.parametrize("row", [1, {}, {"spec": "x", "result": "y"}, {"spec": {}, "result": None}])
def test_a_damaged_line_is_as_none(tmp_path: Path, row: object) -> None:
    kept = lines(tmp_path)
    kept.keep(7, RESULTS)
    kept.path.write_text(json.dumps(json.loads(kept.path.read_text()) | {"lines": [row]}))

    assert kept.read(7) == {}


def test_lines_of_a_newer_version_are_measured_anew(tmp_path: Path) -> None:
    kept = lines(tmp_path)
    kept.keep(7, RESULTS)
    kept.path.write_text(kept.path.read_text().replace('"blank_memory"', '"unknown"'))

    assert kept.read(7) == {}
