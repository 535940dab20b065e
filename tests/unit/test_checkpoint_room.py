"""Room for checkpoints and trajectories, against the disk that the tests are on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.checkpoint.room import CheckpointSizes, room_problem, room_warning
from trainer.disk import free_of, mount_of
from trainer.rollout import record


@pytest.fixture
def tenth(tmp_path: Path) -> int:
    """A tenth of what is free."""
    free = free_of(tmp_path)
    assert free
    return free // 10


@pytest.mark.parametrize(
    ("recover", "persistent", "steps", "saves", "present", "warns"),
    [
        (2, 1, 9, 3, 0, False),  # three slots at most, and three
        (2, 1, 9, 5, 0, True),
        (4, 1, 9, 1, 0, True),
        (4, 1, 9, 1, 1, False),  # one slot is there: two more
        (4, 1, 9, 3, 2, False),
        (4, 1, 1, 1, 0, False),  # a single step
    ],
)
def test_what_is_to_come_is_counted(
    tmp_path: Path, tenth: int, recover: int, persistent: int, steps: int, saves: int, present: int, warns: bool
) -> None:
    slots = tmp_path / "recover"
    for name in ("slot-a", "slot-b")[:present]:
        (slots / name).mkdir(parents=True)
    sizes = CheckpointSizes(recover * tenth, persistent * tenth)

    told = room_warning(slots, tmp_path / "checkpoints", sizes, steps, saves)

    assert bool(told) == warns, told
    assert not warns or ("fileroot=FOLDER" in told and "free of" in told)


def test_no_room_for_one_is_a_problem(tmp_path: Path, tenth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert room_problem(tmp_path / "recover", CheckpointSizes(9 * tenth, 9 * tenth)) == ""
    told = room_problem(tmp_path / "recover", CheckpointSizes(12 * tenth, 0))
    assert told.startswith(f"no space left for a recover checkpoint under {tmp_path / 'recover'}, which takes ")


def test_what_is_kept_for_root_is_room_for_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(f_blocks=100, f_bfree=9, f_bavail=4, f_frsize=1, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    for user, size, fits in ((0, 9, True), (0, 10, False), (1000, 4, True), (1000, 5, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert (room_problem(tmp_path, CheckpointSizes(size, 0)) == "") == fits


def test_a_disk_that_does_not_say_what_is_free_is_not_judged() -> None:
    sizes = CheckpointSizes(1 << 60, 1 << 60)  # /proc has no blocks
    assert room_problem(Path("/proc"), sizes) == room_warning(Path("/proc"), Path("/proc"), sizes, 9, 9) == ""


def test_the_disk_of_a_folder_behind_a_link_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("/dev/shm")
    assert mount_of(tmp_path / "runs" / "recover") == mount_of(Path("/dev/shm")) == Path("/dev/shm")


def test_trajectories_of_all_steps_to_come_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "step_10.jsonl.zst"
    file.write_bytes(bytes(1 << 20))
    disk = SimpleNamespace(f_blocks=100, f_bavail=9, f_frsize=1 << 20, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)

    assert record.room_warning(file, 9) == ""
    assert "the 10 steps to come 10.0 MiB. The disk at" in record.room_warning(file, 10)
