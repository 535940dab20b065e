"""Damaged recover checkpoints: the other slot is taken, and that is said; with none left nothing starts or changes."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Forks, Trial, assert_same_run

STOP_AT = 6


@pytest.fixture(scope="module")
def killed(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, reference: Trial
) -> Callable[[], Trial]:
    trial = Trial(tmp_path_factory.mktemp("damage") / "trial", warm_cache)
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("recover")) >= STOP_AT)
    attempt.send(signal.SIGKILL)
    assert attempt.end() == -signal.SIGKILL
    return trial.kept()


@pytest.fixture
def stopped(killed: Callable[[], Trial]) -> Trial:
    """A trial that was killed after some steps: two whole slots, a step apart."""
    return killed()


def _step(slot: Path) -> int:
    return json.loads((slot / "state.json").read_text())["state"]["global_step"]


def _other(slot: Path) -> Path:
    return slot.with_name("slot-b" if slot.name == "slot-a" else "slot-a")


def _shard(slot: Path) -> Path:
    return max(slot.glob("*.distcp"), key=lambda p: p.stat().st_size)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a_missing_shard": (lambda slot: _shard(slot).unlink(), ".distcp is missing"),
    "a_flipped_bit": (lambda slot: _flip(_shard(slot)), ".distcp has other bytes than were written"),
    "a_short_shard": (lambda slot: _truncate(_shard(slot)), ".distcp has "),
    "a_missing_index": (lambda slot: (slot / ".metadata").unlink(), ".metadata is missing"),
    "a_flipped_bit_in_the_state": (lambda slot: _flip(slot / "state.json"), "state.json has other bytes"),
    "a_missing_manifest": (lambda slot: (slot / "MANIFEST.json").unlink(), "its MANIFEST.json cannot be read"),
    "an_empty_manifest": (lambda slot: (slot / "MANIFEST.json").write_text("{}"), "does not list .metadata"),
    "a_manifest_of_something_else": (lambda slot: (slot / "MANIFEST.json").write_text("[1]"), "cannot be read"),
    "a_missing_slot": (shutil.rmtree, "is missing, though LATEST names it"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_falls_back_to_the_other_slot(forks: Forks, stopped: Trial, reference: Trial, kind: str) -> None:
    harm, words = DAMAGES[kind]
    newest = stopped.newest_slot()
    kept = _other(newest)
    step = _step(kept)
    assert step == _step(newest) - 1
    harm(newest)

    assert forks.run(stopped) == 0, stopped.said()

    assert stopped.records("attempt")[-1]["resume_step"] == step
    told = [r["message"] for r in stopped.records("warning")]
    assert len(told) == 1, told
    assert words in told[0]
    assert str(newest) in told[0]
    assert told[0].endswith(f"; going on from {kept.name} (step {step})")
    assert f"WARNING: {told[0]}\n" in stopped.log()
    assert_same_run(stopped, reference)


@pytest.mark.parametrize("content", [None, "slot-c\n", "", "\x00\x01"], ids=["missing", "nonsense", "empty", "binary"])
def test_the_newer_slot_is_known_without_latest(
    forks: Forks, stopped: Trial, reference: Trial, content: str | None
) -> None:
    newest = stopped.newest_slot()
    step = _step(newest)
    pointer = stopped.paths.recover / "LATEST"
    pointer.unlink()
    if content is not None:
        pointer.write_text(content)

    assert forks.run(stopped) == 0, stopped.said()

    assert stopped.records("attempt")[-1]["resume_step"] == step
    (told,) = [r["message"] for r in stopped.records("warning")]
    assert str(pointer) in told
    assert told.endswith(f"; going on from {newest.name} (step {step})")
    assert_same_run(stopped, reference)


def test_a_pointer_that_was_not_moved_yet_is_nothing_to_warn_of(forks: Forks, stopped: Trial, reference: Trial) -> None:
    """As after a kill between the slot's new name and LATEST."""
    newest = stopped.newest_slot()
    step = _step(newest)
    (stopped.paths.recover / "LATEST").write_text(_other(newest).name)
    assert forks.run(stopped) == 0, stopped.said()
    assert stopped.records("attempt")[-1]["resume_step"] == step
    assert stopped.records("warning") == []
    assert_same_run(stopped, reference)


def test_leftovers_of_a_killed_writer_are_no_checkpoint(forks: Forks, stopped: Trial, reference: Trial) -> None:
    newest = stopped.newest_slot()
    for name in (f"{_other(newest).name}.tmp", f"{_other(newest).name}.old"):
        shutil.copytree(newest, stopped.paths.recover / name)
    assert forks.run(stopped) == 0, stopped.said()
    assert stopped.records("warning") == []
    assert sorted(p.name for p in stopped.paths.recover.iterdir()) == ["LATEST", "slot-a", "slot-b"]
    assert_same_run(stopped, reference)


@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_with_both_slots_damaged_nothing_is_started_or_overwritten(
    forks: Forks, stopped: Trial, reference: Trial, mode: str
) -> None:
    for slot in ("slot-a", "slot-b"):
        _flip(_shard(stopped.paths.recover / slot))
    stopped.change(recover_mode=mode)
    before, records = stopped.recover_files(), stopped.records()

    assert forks.run(stopped) == 2

    assert stopped.said().startswith(f"error: there is no whole recover checkpoint under {stopped.paths.recover}\n")
    assert stopped.said().count(" is damaged: ") == 2
    assert "To start afresh: recover_mode=disabled, or another trial_name" in stopped.said()
    assert "Traceback" not in stopped.said()
    assert stopped.recover_files() == before
    assert stopped.records() == records

    stopped.change(recover_mode="disabled")
    assert forks.run(stopped) == 0, stopped.said()
    assert stopped.records("attempt")[-1]["resume_step"] == 0
    assert_same_run(stopped, reference)


def test_a_torn_record_is_ended(forks: Forks, stopped: Trial, reference: Trial) -> None:
    path = stopped.paths.logs / "metrics.jsonl"
    count = len(stopped.records())
    with path.open("a") as file:
        file.write('{"kind": "step", "global_st')
    assert forks.run(stopped) == 0, stopped.said()
    lines = path.read_text().splitlines()
    assert lines[count] == '{"kind": "step", "global_st'
    assert json.loads(lines[count + 1])["attempt"] == 2
    assert stopped.history().global_step == stopped.config.train.total_steps
    assert stopped.history().finish["status"] == "completed"
    assert stopped.summary()["parameter_sha256"] == reference.summary()["parameter_sha256"]
