"""The simulated fleet: a preset's servers answer from a timer, the trainer's own parts ask them, one of them dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import byte_tokenizer
from runs import ENVIRONMENT, REPOSITORY

SMALL = (
    "rollout.batch_size=16 rollout.group_size=2 train.minibatches=1 task.num_documents=4 agent.chunk_tokens=400 "
    "agent.max_chunks=2 agent.max_memory_tokens=384 agent.max_final_tokens=64"
).split()
"""1.5B_n1 with its eight servers, two groups on each, in steps of a few seconds."""


def fleet(folder: Path, *words: str) -> list[dict[str, Any]]:
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "fleet.py"), str(folder / "tokenizer")]
    command += ["--preset", "1.5B_n1", "--learn", "0.1", "--back", "1", *words, *SMALL]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def steps_of(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in told if one["event"] == "step"]


@pytest.mark.long
def test_a_lost_server_costs_no_trajectory(tmp_path: Path) -> None:
    told = fleet(tmp_path, "--steps", "2", "--lose", "server@2")
    steps, summary = steps_of(told), told[-1]

    assert [step["step"] for step in steps] == [1, 2]
    assert [step["failed"] for step in steps] == [0, 0]
    assert [step["lost"] for step in steps] == [0, 1]
    assert steps[0]["sent_again"] == 0
    assert steps[1]["sent_again"] > 0, "what it was answering was asked again"
    assert steps[0]["requests"] == steps[1]["requests"] == 16 * 2 * 3
    assert 0 < summary["servers_own_s"] <= summary["wait_s"]
    assert summary["version_change_over_slowest"] >= 1


@pytest.mark.long
def test_a_lost_host_and_a_lost_controller_are_survived(tmp_path: Path) -> None:
    told = fleet(tmp_path, "--steps", "4", "--lose", "host@2", "--lose", "rank@3")

    assert [step["step"] for step in steps_of(told)] == [1, 2, 3, 4]
    assert all(step["failed"] == 0 for step in steps_of(told))
    starts = [one for one in told if one["event"] == "start"]
    assert [(one["after_step"], one["servers"]) for one in starts] == [(0, 8), (2, 8)]


@pytest.mark.long
def test_controllers_in_processes_of_their_own_make_the_same_groups_and_one_may_be_lost(tmp_path: Path) -> None:
    """What is sampled depends on the task and the turn alone, so also with others who ask."""
    told = fleet(tmp_path, "--steps", "4", "--lose", "controller@2", "--lose", "server@3", "rollout.controllers=2")
    (tmp_path / "alone").mkdir()
    alone = fleet(tmp_path / "alone", "--steps", "4")

    steps = steps_of(told)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["failed"] == 0 for step in steps)
    assert [step["sampled_tokens"] for step in steps] == [step["sampled_tokens"] for step in steps_of(alone)]
