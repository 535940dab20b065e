"""When a run that failed is started again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from trainer.launch.job import ended
from trainer.launch.retries import Ended, judge


def failed(step: int, message: str = "rank 0 failed: ValueError", started_at: int = 0) -> Ended:
    return Ended(1, message, step, started_at)


@pytest.mark.parametrize(("code", "why"), [(0, "completed"), (2, "its configuration is refused"), (130, "interrupted")])
def test_what_is_not_started_again(code: int, why: str) -> None:
    verdict = judge([Ended(code, "", 5)], retries=10, first_wait=10)
    assert (verdict.wait, verdict.reason) == (None, why)


def test_waits_grow_until_a_new_step_is_done() -> None:
    ends = [failed(0, f"a failure of kind {chr(97 + n)}") for n in range(9)]
    waits = [judge(ends[:n], 10, 10.0).wait for n in range(1, 10)]
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert judge([*ends, failed(3)], 10, 10.0).wait == 10


def test_as_many_restarts_as_allowed_without_a_new_step() -> None:
    ends = [failed(4, f"a failure of kind {chr(97 + n)}", started_at=4) for n in range(4)]
    assert judge(ends[:3], 3, 1.0).wait == 4
    verdict = judge(ends, 3, 1.0)
    assert verdict.wait is None
    assert "3 restarts (recover_retries)" in verdict.reason


def test_restarts_that_bring_steps_are_not_counted() -> None:
    ends = [failed(step, started_at=step - 1) for step in range(1, 50)]
    assert judge(ends, 3, 1.0).wait == 1


def test_steps_count_where_rank_0_could_not_tell_of_them(tmp_path: Path) -> None:
    """Rank 0 hangs on its GPU where another is lost: the last record then has the step that was gone on after."""
    metrics, ends = tmp_path / "metrics.jsonl", []
    for attempt, resumed in enumerate([490, 990, 1490, 1990], start=1):
        records = [
            {"kind": "attempt", "resume_step": resumed},
            {"kind": "step", "global_step": resumed + 510},
            {"kind": "finish", "status": "failed", "global_step": resumed, "message": "rank 3 of 4 was lost"},
        ]
        with metrics.open("a") as file:
            file.writelines(json.dumps(record | {"attempt": attempt}) + "\n" for record in records)
        ends.append(ended(metrics, attempt, 1, 0))
        assert judge(ends, 2, 10.0).wait == 10
    assert [end.step for end in ends] == [1000, 1500, 2000, 2500]


def test_same_failure_at_the_same_step_is_tried_three_times() -> None:
    ends = [failed(7, f"rank {n} failed: NaN in loss at 0x{n}f") for n in range(3)]
    assert judge(ends[:2], 10, 1.0).wait is not None
    assert judge(ends, 10, 1.0).wait is None
    elsewhere = [*ends[:2], failed(8, "rank 2 failed: NaN in loss at 0x2f")]
    assert judge(elsewhere, 10, 1.0).wait is not None


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate 20.00 MiB", "ended by SIGKILL"])
def test_out_of_memory_is_not_tried_a_third_time(message: str) -> None:
    ends = [failed(3, message), failed(3, message)]
    assert judge(ends[:1], 10, 1.0).wait == 1
    assert judge(ends, 10, 1.0).wait is None


@pytest.mark.parametrize(
    ("end", "crash"),
    [
        (Ended(-9, "ended by SIGKILL", 3), True),
        (Ended(134, "exit code 134", 3), True),
        (Ended(1, "AcceleratorError: CUDA error", 3, crashed=True), True),
        (Ended(1, "no space left", 3), False),
        (Ended(2, "a setting is refused", 3), False),
    ],
)
def test_what_a_run_of_this_machine_is_started_again_after(end: Ended, crash: bool) -> None:
    assert end.crash is crash


def test_no_restart_where_none_is_allowed() -> None:
    assert judge([failed(5)], 0, 1.0).wait is None


def test_a_supervised_start_that_gets_further_is_started_again(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    ends = []
    for attempt, (began, kept) in enumerate([(None, 100), (100, 300), (300, 300), (300, 300)], start=1):
        records = [
            {"kind": "warmup", "phase": "supervised", "attempt": attempt, "step": 0, "recover_step": one}
            for one in (began, kept)
        ]
        with metrics.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        ends.append(ended(metrics, attempt, -signal.SIGKILL, 0))

    assert judge(ends[:2], 10, 10.0).wait == 10
    verdict = judge(ends, 10, 10.0)
    assert verdict.wait is None
    assert "in the same way in its supervised start, after step 300" in verdict.reason
