"""What rank 0 ended with reaches the process that started the ranks, with whether a new start may help."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from endedranks import end_of_rank

from trainer.errors import CrashError, RunError, UserError
from trainer.launch import ranks
from trainer.launch.ranks import conclude
from trainer.signals import StopFlag


def test_a_crash_that_rank_0_tells_stays_one(tmp_path: Path) -> None:
    code = end_of_rank(tmp_path, "lost")

    with pytest.raises(CrashError, match="server-1 was lost"):
        conclude(tmp_path, {0: code, 1: 1}, 2)


def test_a_disk_that_rank_0_finds_full_is_no_crash(tmp_path: Path) -> None:
    code = end_of_rank(tmp_path, "full")

    with pytest.raises(RunError, match=f"no space left at {tmp_path}/summary.json: free some space") as told:
        conclude(tmp_path, {0: code, 1: 1}, 2)
    assert type(told.value) is RunError


@pytest.mark.parametrize("kind", ["full", "told"])
def test_a_disk_that_another_rank_finds_full_is_no_crash(tmp_path: Path, kind: str) -> None:
    """Rank 0 sees no more than that its connection breaks."""
    code = end_of_rank(tmp_path, kind, rank=1)
    (tmp_path / "outcome").write_text('{"global_step": 3, "message": "", "exit_code": 1, "crashed": false}')

    expected = rf"^rank 1 on {os.uname().nodename}: no space left at {tmp_path}/summary.json: free some space"
    with pytest.raises(RunError, match=expected) as told:
        conclude(tmp_path, {0: 1, 1: code}, 2)
    assert type(told.value) is RunError


@pytest.mark.parametrize("kind", [RunError, UserError])
def test_other_errors_are_none(kind: type[UserError], tmp_path: Path) -> None:
    outcome = {"global_step": 0, "message": "no space is left", "exit_code": kind.exit_code, "crashed": False}
    (tmp_path / "outcome").write_text(json.dumps(outcome))

    with pytest.raises(kind) as told:
        conclude(tmp_path, {0: kind.exit_code}, 2)
    assert type(told.value) is kind


def test_ranks_that_wait_for_a_lost_one_are_killed_sooner_than_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 300.0)  # others may see what the failed one has seen, and tell of it
    waiting = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
    lost = subprocess.Popen(["sh", "-c", "kill -9 $$"])
    assert ranks._wait([waiting, lost], StopFlag()) == {1: -9}
    assert waiting.returncode == -9
    assert ranks.patience({1: 1}) == 300.0
