"""Reading logs again and again: as much as they grew, whatever was done to the files in between."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from areal_lines import master, v2_stats, v2_step, v2_steps

from clusterkit.runs.log.reader import SAVED_AFTER_BYTES, LogReader, read_log
from trainer.errors import UserError

NOISE = "(model_worker/3 pid=7) 20250601-12:00:00.000 model worker INFO: Model worker 3 #actor_gen# *end*\n"
MUCH_NOISE = NOISE * (SAVED_AFTER_BYTES // len(NOISE) + 1)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def rewards(reader: LogReader) -> list[float]:
    return reader.refresh().history.stat("task_reward")


def test_only_news_are_read(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(v2_steps(1, 3))
    reader = LogReader(log)
    assert reader.refresh().news == log.stat().st_size

    append(log, MUCH_NOISE + v2_steps(4, 5))
    view = reader.refresh()

    assert view.news == len(MUCH_NOISE + v2_steps(4, 5))
    assert view.history.global_step == 5
    assert reader.refresh().news == 0


def test_half_a_line_waits_for_its_end_in_every_place_where_it_may_break(tmp_path: Path) -> None:
    text = (v2_stats(99.0, task_reward=0.25) + v2_step(1, 100.0)).encode()
    for cut in range(0, len(text), 7):
        log = tmp_path / f"{cut}.log"
        log.write_bytes(text[:cut])
        reader = LogReader(log)
        reader.refresh()
        with log.open("ab") as file:
            file.write(text[cut:])

        (step,) = reader.refresh().history.steps
        assert (step["step_time_s"], step["stats"]) == (100.0, {"task_reward": 0.25})


def test_the_next_invocation_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    log, folder = tmp_path / "main.log", tmp_path / "state" / "runlog"
    log.write_text(v2_steps(1, 3) + MUCH_NOISE)
    whole = read_log(log, folder)
    append(log, v2_steps(4, 4) + v2_stats(499.0, task_reward=0.05))

    again = read_log(log, folder)
    append(log, v2_step(5, 500.0))

    assert whole.news == len(v2_steps(1, 3) + MUCH_NOISE)
    assert again.news == len(v2_steps(4, 4) + v2_stats(499.0, task_reward=0.05))
    assert read_log(log, folder).history.stat("task_reward") == [0.01, 0.02, 0.03, 0.04, 0.05]
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1}', b"\xff\x00", b"[]", b"null"])
def test_a_damaged_memory_costs_one_full_read(tmp_path: Path, content: bytes) -> None:
    log, folder = tmp_path / "main.log", tmp_path / "state"
    log.write_text(v2_steps(1, 3) + MUCH_NOISE)
    read_log(log, folder)
    (cache,) = folder.glob("*.json")
    cache.write_bytes(content)

    assert read_log(log, folder).history.global_step == 3


def test_a_memory_of_another_version_is_not_trusted(tmp_path: Path) -> None:
    log, folder = tmp_path / "main.log", tmp_path / "state"
    log.write_text(v2_steps(1, 3) + MUCH_NOISE)
    read_log(log, folder)
    (cache,) = folder.glob("*.json")
    state = json.loads(cache.read_text())
    del state["scanner"]["history"]["restarts"]
    cache.write_text(json.dumps(state))

    assert read_log(log, folder).news == log.stat().st_size


def test_a_place_for_the_memory_that_cannot_be_written_keeps_nobody_from_reading(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(v2_steps(1, 3) + MUCH_NOISE)
    (tmp_path / "file").write_text("")

    assert read_log(log, tmp_path / "file" / "runlog").history.global_step == 3


@pytest.mark.parametrize("how", ["rename", "copytruncate"])
def test_a_log_that_was_rotated_goes_on(tmp_path: Path, how: str) -> None:
    log, old = tmp_path / "main.log", tmp_path / "main.log.1"
    log.write_text(v2_steps(1, 3))
    reader = LogReader(log)
    reader.refresh()
    append(log, v2_steps(4, 4))
    if how == "rename":
        log.rename(old)
    else:
        shutil.copy(log, old)
        os.truncate(log, 0)
    append(log, v2_steps(5, 6))

    view = reader.refresh()

    assert view.history.stat("task_reward") == [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]
    assert view.news == len(v2_steps(4, 6))
    old.unlink()
    assert rewards(reader) == [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]


def test_rotated_logs_are_read_oldest_first(tmp_path: Path) -> None:
    for number, first in ((".10", 1), (".9", 3), (".1", 5), ("", 7)):
        (tmp_path / f"main.log{number}").write_text(v2_steps(first, first + 1))
    (tmp_path / "main.log.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "main.log.old").write_text(v2_steps(40, 41))

    history = read_log(tmp_path / "main.log").history

    assert [step["global_step"] for step in history.steps] == list(range(1, 9))
    assert history.attempt == 1


@pytest.mark.parametrize("shorter", [True, False])
def test_a_log_that_was_replaced_by_another_is_read_anew(tmp_path: Path, shorter: bool) -> None:
    log, folder = tmp_path / "main.log", tmp_path / "state"
    log.write_text(v2_steps(1, 9) + MUCH_NOISE)
    reader = LogReader(log, folder)
    reader.refresh()

    log.write_text(v2_steps(1, 2, at=9e5) + ("" if shorter else MUCH_NOISE * 2))

    assert rewards(reader) == [0.01, 0.02]
    assert read_log(log, folder).history.attempt == 1


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    junk = bytes(range(256)) * 400 + b"\x00" * 4096
    steps = v2_steps(1, 2).encode().splitlines(keepends=True)
    log.write_bytes(junk + b"\n" + steps[0] + junk + steps[1] + junk + b"\n" + b"".join(steps[2:]))

    assert read_log(log).history.global_step == 2


@pytest.mark.parametrize("length", [200_000, 1_500_000, 5_000_000])
def test_a_line_of_great_length_costs_no_other(tmp_path: Path, length: int) -> None:
    log = tmp_path / "main.log"
    dots = "x" * length
    log.write_text(v2_steps(1, 1) + dots + "\n" + v2_steps(2, 2) + v2_step(3, 300.0).rstrip("\n") + dots + "\n")

    assert read_log(log).history.global_step == 3
    append(log, dots)
    reader = LogReader(log)
    reader.refresh()
    append(log, dots + "\n" + v2_steps(4, 4))
    assert reader.refresh().history.global_step == 4


def test_an_empty_log(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.touch()
    reader = LogReader(log)
    assert reader.refresh().state == "empty"

    append(log, v2_steps(1, 1))

    view = reader.refresh()
    assert (view.state != "empty", view.history.global_step) == (True, 1)


def test_a_file_that_is_no_log_is_not_said_to_be_a_run_without_a_word(tmp_path: Path) -> None:
    file = tmp_path / "main.log"
    file.write_bytes(bytes(range(256)) * 100)
    assert "no line of it is one of theirs" in read_log(file).message

    file.write_text(v2_steps(1, 1))
    assert "known" not in read_log(file).message


@pytest.mark.parametrize("name", ["missing.log", "."])
def test_what_is_no_log_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="name "):
        read_log(tmp_path / name)


def test_silence_is_judged_by_the_length_of_a_step(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(v2_steps(1, 5) + master("Dumped recover info to file.", 500.1))
    view = read_log(log)

    assert view.history.patience == 500.0
    assert view.state == "silent"  # its stamps are older than any time zone explains
    assert "500" not in view.message
    assert "8 min 20 s" in view.message
