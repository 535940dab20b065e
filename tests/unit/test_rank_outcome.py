"""What rank 0 ended with reaches the process that started the ranks, with whether a new start may help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import CrashError, RunError, UserError
from trainer.launch import ranks
from trainer.launch.ranks import conclude
from trainer.signals import StopFlag

ENDS = """
import errno, os, sys
from pathlib import Path
from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.errors import CrashError
from trainer.launch import rank_run
from trainer.launch.rank_job import RankJob
from trainer.paths import RunPaths
from trainer.signals import StopFlag

def make_run(*_):
    if sys.argv[2] in ("full", "told"):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(meeting / "summary.json"))
        if sys.argv[2] == "told":
            raise rank_run.full_disk(full, config) from full
        raise full
    raise CrashError("server-1 was lost")

rank_run.join_world = lambda *_: None  # the others are not there
rank_run.make_run = make_run  # a server that dies in the middle of a publication, or a full disk, stands behind it
meeting = Path(sys.argv[1])
config = RunConfig(fileroot=str(meeting / "runs"))
RunPaths.of(config).logs.mkdir(parents=True)
job = RankJob(config, meeting, 1, Start(None), meeting, f"file://{meeting}/rendezvous")
rank_run.rank_main(int(sys.argv[3]), job, StopFlag())
"""


def _end_of_rank(folder: Path, kind: str, rank: int = 0) -> int:
    command = [sys.executable, "-c", ENDS, str(folder), kind, str(rank)]
    return subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}).returncode


def test_a_crash_that_rank_0_tells_stays_one(tmp_path: Path) -> None:
    code = _end_of_rank(tmp_path, "lost")

    with pytest.raises(CrashError, match="server-1 was lost"):
        conclude(tmp_path, {0: code, 1: 1}, 2)


def test_a_disk_that_rank_0_finds_full_is_no_crash(tmp_path: Path) -> None:
    code = _end_of_rank(tmp_path, "full")

    with pytest.raises(RunError, match=f"no space left at {tmp_path}/summary.json: free some space") as told:
        conclude(tmp_path, {0: code, 1: 1}, 2)
    assert type(told.value) is RunError


@pytest.mark.parametrize("kind", ["full", "told"])
def test_a_disk_that_another_rank_finds_full_is_no_crash(tmp_path: Path, kind: str) -> None:
    """Rank 0 sees no more than that its connection breaks."""
    code = _end_of_rank(tmp_path, kind, rank=1)
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
