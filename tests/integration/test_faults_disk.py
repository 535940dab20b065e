"""A disk that is full or may not be written: one message, nothing lost, and the same command goes on afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commandline import run_clusterkit
from evalparts import chat_checkpoint
from fulldisk import leave
from realparts import require
from runs import TOTAL_STEPS, Forks, NewTrial, Trial, assert_same_run, command

from clusterkit.backends.local.launch import Ending
from clusterkit.backends.local.train import _outcome
from clusterkit.runs.diagnose.run import diagnose_run
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.metrics import History
from trainer.checkpoint.recover import RecoverStore
from trainer.errors import RunError
from trainer.launch.local import check_run


class SmallDisk:
    """A tmpfs of its own, so that a full disk is a real one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        require(not done.returncode, f"a real full disk needs the right to mount a tmpfs: {done.stderr.strip()}")

    def trial(self, cache: Path, **settings: object) -> Trial:
        """A trial on this disk, whose output goes elsewhere."""
        trial = Trial(self.folder / "runs", cache, **settings)
        trial.console = self.folder.with_name("console.log")
        return trial

    def leave(self, free: int) -> None:
        """Fill the disk until only `free` bytes are left."""
        leave(self.folder, free)

    def grow(self) -> None:
        subprocess.run(["mount", "-o", "remount,size=128m", str(self.folder)], check=True, timeout=300)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True, timeout=300)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.unmount()


def _stop_after(forks: Forks, trial: Trial, steps: int) -> None:
    """Bring a trial to the end of a step by asking for no more, then ask for all of them."""
    total = trial.config.train.total_steps
    trial.change(**{"train.total_steps": steps})
    assert forks.run(trial) == 0, trial.said()
    trial.change(**{"train.total_steps": total})


def _one_message(trial: Trial) -> str:
    said = trial.said()
    assert said.startswith("error: "), said
    assert said.count("error: ") == 1, said
    assert "Traceback" not in said
    assert "Logging error" not in said
    return said


def _told_room(trial: Trial) -> str:
    """What is free, as the message has it."""
    found = re.search(r"has ([0-9.]+ (?:B|KiB)) free of", trial.said())
    assert found is not None, trial.said()
    return found[1]


def test_trajectories_that_will_fill_the_disk_are_told_early(
    forks: Forks, small_disk: SmallDisk, warm_cache: Path
) -> None:
    # A step's take more than a KiB, and a million steps are to come.
    never = {"checkpoint.save_freq_steps": 0, "eval.every_steps": 0}
    trial = small_disk.trial(warm_cache, **{"train.total_steps": 1_000_000, "task.train_size": 4000, **never})
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("step")) > 20), trial.said()
    attempt.send(signal.SIGTERM)
    assert attempt.end() == 130, trial.said()

    told = [warning["message"] for warning in trial.records("warning")]
    (one,) = (message for message in told if "the 999990 steps to come" in message)
    assert f"The disk at {small_disk.folder} has " in one


# Bytes left on the disk: nothing; a record but not the rollouts' file; the records of a step but not a checkpoint.
@pytest.mark.parametrize("free", [0, 8192, 49152, 131072])
def test_full_while_training(
    forks: Forks, small_disk: SmallDisk, warm_cache: Path, reference: Trial, free: int
) -> None:
    trial = small_disk.trial(warm_cache)
    _stop_after(forks, trial, 5)
    kept = RecoverStore(trial.paths.recover).newest()
    size = trial.records("recover")[-1]["bytes"]
    assert size > 200_000, "a checkpoint must be larger than what is left for it"

    assert forks.run(trial, fill=(small_disk.folder, free)) == 1, trial.said()

    message = _one_message(trial)
    assert "no space left" in message
    assert str(small_disk.folder) in message
    assert "start the same command again to go on" in message or "choose another fileroot" in message
    assert RecoverStore(trial.paths.recover).newest() == kept
    assert not list(trial.paths.recover.glob("*.tmp"))
    found = diagnose_run(RunDirectory(trial.paths.logs.parents[3], *trial.paths.logs.parts[-3:]))
    assert found.state in ("failed", "killed")  # there may be no room for its last record
    assert "disk-full" in {finding.id for finding in found.findings}, found

    small_disk.grow()
    assert forks.run(trial) == 0, trial.said()
    assert trial.records("attempt")[-1]["resume_step"] == 5
    assert_same_run(trial, reference, more=frozenset({"epoch1epochstep5globalstep5"}))


def test_too_little_room_is_told_before_the_first_step(forks: Forks, small_disk: SmallDisk, warm_cache: Path) -> None:
    trial = small_disk.trial(warm_cache)
    _stop_after(forks, trial, 2)
    steps, size = len(trial.records("step")), trial.records("recover")[-1]["bytes"]
    small_disk.leave(size // 2)

    assert forks.run(trial) == 1

    told = _one_message(trial)
    assert told.startswith(f"error: no space left for a recover checkpoint under {trial.paths.recover}, which takes ")
    assert f"fileroot=FOLDER. The disk at {small_disk.folder} has {_told_room(trial)} free of 64.0 MiB\n" in told
    assert len(trial.records("step")) == steps
    small_disk.grow()
    small_disk.leave(2 * size)
    trial.change(**{"checkpoint.save_freq_steps": 1})

    assert forks.run(trial) == 1
    assert "two are kept, and the next is written beside them" in trial.records("warning")[-1]["message"]
    assert len(trial.records("step")) > steps


def test_too_little_room_is_told_before_the_warm_up(forks: Forks, small_disk: SmallDisk, tmp_path: Path) -> None:
    trial = small_disk.trial(tmp_path / "cache")
    small_disk.leave(131072)

    assert forks.run(trial) == 1

    told = _one_message(trial)
    assert told.startswith(f"error: no space left for a recover checkpoint under {trial.paths.recover}, which takes ")
    assert trial.records("warmup") == []
    small_disk.grow()
    assert forks.run(trial) == 0, trial.said()


def test_too_little_room_is_told_before_a_supervised_start(small_disk: SmallDisk, tmp_path: Path) -> None:
    trial = small_disk.trial(tmp_path / "cache")
    model = chat_checkpoint(tmp_path / "model", window=256)
    check_run(trial.config, model)
    small_disk.leave(131072)

    with pytest.raises(RunError, match="no space left for a recover checkpoint"):
        check_run(trial.config, model)
    trial.change(**{"trainer.type": "null"})
    check_run(trial.config, model)


def test_what_a_kill_left_of_a_checkpoint_makes_room_for_the_next(
    forks: Forks, small_disk: SmallDisk, warm_cache: Path
) -> None:
    trial = small_disk.trial(warm_cache)
    _stop_after(forks, trial, 2)
    torn = [trial.paths.recover / "slot-b.tmp", trial.paths.checkpoints / "epoch1epochstep3globalstep3.tmp"]
    for folder in torn:
        folder.mkdir()
    leave(torn[0], trial.records("recover")[-1]["bytes"] // 2)

    assert forks.run(trial) == 0, trial.said()
    assert not any(folder.exists() for folder in torn)


def test_full_for_the_message_too(forks: Forks, small_disk: SmallDisk, warm_cache: Path) -> None:
    trial = small_disk.trial(warm_cache)
    _stop_after(forks, trial, 2)
    small_disk.leave(0)
    process = command(trial, stderr=(small_disk.folder / "runs" / "printed").open("w"))
    process.communicate(timeout=300)
    assert process.returncode == 1
    assert (small_disk.folder / "runs" / "printed").read_text() == ""


def test_full_while_writing_a_recover_checkpoint(
    forks: Forks, small_disk: SmallDisk, warm_cache: Path, reference: Trial
) -> None:
    trial = small_disk.trial(warm_cache, checkpoint={"save_freq_steps": 0})
    _stop_after(forks, trial, 5)
    kept = RecoverStore(trial.paths.recover).newest()

    assert forks.run(trial, fill=(small_disk.folder, 131072)) == 1, trial.said()

    assert _one_message(trial) == (
        f"error: no space left for a recover checkpoint under {trial.paths.recover} (the one of step 5 is untouched): "
        "free some space there, then start the same command again to go on. "
        f"The disk at {small_disk.folder} has {_told_room(trial)} free of 64.0 MiB\n"
    )
    assert RecoverStore(trial.paths.recover).newest() == kept
    assert "no space left for a recover checkpoint" in trial.log()
    assert trial.records("finish")[-1]["status"] == "failed"
    small_disk.grow()
    assert forks.run(trial) == 0, trial.said()
    assert trial.summary()["parameter_sha256"] == reference.summary()["parameter_sha256"]
    assert trial.trained_tasks() == reference.trained_tasks()


def test_full_while_the_end_of_the_run_is_written(
    forks: Forks, small_disk: SmallDisk, warm_cache: Path, reference: Trial
) -> None:
    trial = small_disk.trial(warm_cache)
    trial.console = small_disk.folder / "console.log"  # as that of `clusterkit train`, which is among the run's files

    assert forks.run(trial, fill=(small_disk.folder, 0), fill_at="parameter_digest") == 1

    told = _one_message(trial)
    assert told == (
        f"error: no space left at {trial.paths.logs / 'summary.json'}: free some space there, then start the same "
        f"command again to go on. The disk at {small_disk.folder} has {_told_room(trial)} free of 64.0 MiB\n"
    )
    assert f"error: {trial.records('finish')[-1]['message']}".startswith(told.partition(" The disk")[0])
    small_disk.grow()
    assert forks.run(trial) == 0, trial.said()
    assert trial.records("attempt")[-1]["resume_step"] == TOTAL_STEPS
    assert_same_run(trial, reference)
    assert not (trial.paths.logs / ".reserve").exists()


def test_a_trainer_without_room_for_its_message_is_told_as_one(small_disk: SmallDisk) -> None:
    run = RunDirectory(small_disk.folder, "user", "small", "run1")
    run.console(1).parent.mkdir(parents=True)
    run.console(1).touch()
    small_disk.leave(0)

    outcome = _outcome(run, 1, Ending(1, 0), History([]), "clusterkit train")

    assert f"there was no room for its message under {run.logs}: free some space there" in outcome.message
    assert f"The disk at {small_disk.folder} has 0 B free of 64.0 MiB" in outcome.message


@pytest.mark.parametrize("background", [False, True])
def test_full_while_exporting(
    forks: Forks, small_disk: SmallDisk, warm_cache: Path, reference: Trial, background: bool
) -> None:
    trial = small_disk.trial(warm_cache, checkpoint={"ckpt_freq_secs": 3600.0, "async_recover": background})
    _stop_after(forks, trial, 6)

    assert forks.run(trial, fill=(small_disk.folder, 90_000)) == 1, trial.said()

    folder = trial.paths.checkpoints / "epoch2epochstep2globalstep8"
    assert _one_message(trial) == (
        f"error: cannot write the checkpoint {folder}: no space left on the disk. Free some space, then start the same "
        "command again to go on from the last recover checkpoint. "
        f"The disk at {small_disk.folder} has {_told_room(trial)} free of 64.0 MiB\n"
    )
    assert sorted(trial.weights()) == ["epoch1epochstep4globalstep4", "epoch1epochstep6globalstep6"]
    assert not [r for r in trial.records("eval") if (r["attempt"], r["name"]) == (2, "after")], "it is told before"
    assert len(list(trial.paths.checkpoints.iterdir())) == 2
    small_disk.grow()
    assert forks.run(trial) == 0, trial.said()
    assert_same_run(trial, reference, more=frozenset({"epoch1epochstep6globalstep6"}))


def test_full_cache_while_warming_up(forks: Forks, small_disk: SmallDisk, tmp_path: Path, reference: Trial) -> None:
    trial = Trial(tmp_path / "trial", small_disk.folder / "cache")
    small_disk.leave(32768)
    assert forks.run(trial) == 1, trial.said()
    message = _one_message(trial)
    assert "no space left" in message
    assert str(small_disk.folder / "cache") in message
    small_disk.grow()
    assert forks.run(trial) == 0, trial.said()
    assert_same_run(trial, reference)


@pytest.mark.parametrize(
    "place",
    [
        lambda trial: trial.paths.logs,
        lambda trial: trial.paths.logs.parent.parent,
        lambda trial: trial.paths.recover,
        lambda trial: trial.paths.checkpoints.parent,
    ],
    ids=["run", "user", "recover", "checkpoints"],
)
def test_a_file_in_the_way(forks: Forks, new_trial: NewTrial, place: Callable[[Trial], Path]) -> None:
    trial = new_trial()
    blocked = place(trial)
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("here first")
    assert forks.run(trial) == 2
    message = _one_message(trial)
    assert message.startswith("error: cannot write the run directory: ")
    assert str(blocked) in message
    assert "fileroot=FOLDER" in message
    assert blocked.read_text() == "here first"


@pytest.mark.parametrize("name", ["main.log", "metrics.jsonl", "run.lock"])
def test_a_folder_in_the_way(forks: Forks, new_trial: NewTrial, name: str) -> None:
    trial = new_trial()
    (trial.paths.logs / name).mkdir(parents=True)
    assert forks.run(trial) == 2
    message = _one_message(trial)
    assert str(trial.paths.logs / name) in message
    assert "fileroot=FOLDER" in message


@pytest.mark.parametrize("place", ["fileroot", "run"])
def test_a_run_directory_that_may_not_be_written(new_trial: NewTrial, place: str) -> None:
    trial = new_trial()
    closed = trial.file.parent if place == "fileroot" else trial.paths.logs
    closed.mkdir(parents=True, exist_ok=True)
    closed.chmod(0o555)
    # Without this right root is as bound by permissions as anyone.
    drop = ["setpriv", "--inh-caps=-dac_override", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    process = command(trial, prefix=drop)
    out, err = process.communicate(timeout=300)
    closed.chmod(0o755)
    assert (process.returncode, out) == (2, ""), err
    told = f"cannot write the run directory: {closed / 'logs'}: Permission denied. Choose another fileroot=FOLDER"
    if place == "run":
        told = f"cannot write to {closed}: change its permissions, or choose another fileroot=FOLDER"
    assert err == f"error: {told}\n"


def test_a_disk_that_is_read_only(forks: Forks, small_disk: SmallDisk, warm_cache: Path) -> None:
    trial = small_disk.trial(warm_cache)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk.folder)], check=True, timeout=300)
    assert forks.run(trial) == 2
    assert _one_message(trial) == (
        f"error: cannot write the run directory: {trial.file.parent / 'logs'}: Read-only file system. "
        "Choose another fileroot=FOLDER\n"
    )


def test_a_question_about_a_text_that_the_disk_cannot_hold_leaves_nothing_on_it(
    small_disk: SmallDisk, tmp_path: Path
) -> None:
    book, checkpoint = tmp_path / "book.txt", tmp_path / "checkpoint"
    book.write_text("a line of text\n" * 100_000)
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")  # the text is copied before a model is loaded
    small_disk.leave(1 << 16)
    words = ["ask", "--model-path", str(checkpoint), "--preset", "tiny", "--question", "who", str(book)]

    done = run_clusterkit(*words, env={**os.environ, "TMPDIR": str(small_disk.folder)})

    assert done.returncode == 1, done.stderr
    assert "no space left on its disk" in done.stderr
    assert "set TMPDIR to another folder" in done.stderr
    assert [path.name for path in small_disk.folder.iterdir()] == ["ballast"]
