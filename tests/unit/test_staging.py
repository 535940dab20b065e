"""Folders that appear whole or not at all, whatever ends the process that makes them."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer.errors import RunError, UserError
from trainer.staging import restore_replaced, staged_folder, temporary_folder

# Fills half of a folder, says so and waits to be ended.
MAKER = """
import signal, sys
from pathlib import Path
from trainer.staging import staged_folder
with staged_folder(Path(sys.argv[1]), replace=True) as folder:
    (folder / "half").write_text("half")
    print("ready", flush=True)
    signal.pause()
"""


def start_maker(target: Path, script: str = MAKER, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, "-c", script, str(target)], env=environment, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_folder_appears_at_the_end_with_all_its_files(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "asset"
    with staged_folder(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("content")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "content"
    assert [path.name for path in target.parent.iterdir()] == ["asset"]


def test_files_can_be_read_by_others_as_the_umask_allows(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "asset") as folder:
        (folder / "file").write_text("content")
        (folder / "file").chmod(0o600)
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "asset" / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail_half_way() -> None:
        with staged_folder(tmp_path / "asset") as folder:
            (folder / "file").write_text("content")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"no space left on the disk of {tmp_path}"), staged_folder(tmp_path / "asset"):
        Path("/dev/full").write_text("content")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_process_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = start_maker(tmp_path / "asset")
    process.send_signal(number)
    assert process.wait(timeout=300) != 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_away_with_the_next_call(tmp_path: Path) -> None:
    process = start_maker(tmp_path / "asset")
    process.kill()
    process.wait(timeout=300)
    assert len(list(tmp_path.iterdir())) == 1
    with staged_folder(tmp_path / "asset"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["asset"]


def test_another_process_that_is_still_at_work_is_left_alone(tmp_path: Path) -> None:
    process = start_maker(tmp_path / "asset")
    with staged_folder(tmp_path / "asset"):
        pass
    assert len(list(tmp_path.iterdir())) == 2
    process.terminate()
    process.wait(timeout=300)


def test_a_temporary_folder_of_a_killed_process_goes_away_with_the_next_one_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    holder = MAKER.replace("staged_folder(Path(sys.argv[1]), replace=True)", "temporary_folder(sys.argv[1])")
    holder = holder.replace("staged_folder", "temporary_folder")
    killed, living = (start_maker(Path("ranks"), holder, environment) for _ in range(2))
    other = start_maker(Path("others"), holder, environment)
    (theirs,) = tmp_path.glob("clusterkit-others-*")
    for process in (killed, other):
        process.kill()
        process.wait(timeout=300)
    assert len(list(tmp_path.iterdir())) == 3

    with temporary_folder("ranks") as folder:
        assert folder in tmp_path.iterdir()
        assert len(list(tmp_path.glob("clusterkit-ranks-*/half"))) == 1, "that of the living one"
        assert not list(folder.iterdir())

    assert living.poll() is None
    living.send_signal(signal.SIGINT)
    living.wait(timeout=300)
    assert list(tmp_path.iterdir()) == [theirs]


def test_what_another_host_or_user_has_put_into_the_temporary_folder_stays_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    named = f"clusterkit-ranks-{platform.node()}-"
    of_another_host, pipe = tmp_path / f"{named}2-abcd_123", tmp_path / f"{named}abcd_123"
    of_another_host.mkdir()
    os.mkfifo(pipe)

    def begin() -> None:
        with temporary_folder("ranks"):
            begun.set()

    begun = threading.Event()
    threading.Thread(target=begin, daemon=True).start()
    assert begun.wait(timeout=20)

    assert of_another_host.is_dir()
    assert pipe.is_fifo()


def test_many_that_begin_at_once_do_not_sweep_each_other_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def hold(number: int) -> bool:
        with temporary_folder("ranks") as folder:
            (folder / "mine").write_text(str(number))
            return (folder / "mine").read_text() == str(number)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(hold, range(400)))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    target = tmp_path / "asset"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(UserError, match="exists already"), staged_folder(target):
        pytest.fail("must not get here")
    with pytest.raises(ZeroDivisionError), staged_folder(target, replace=True):
        raise ZeroDivisionError
    assert (target / "old").read_text() == "old"
    with staged_folder(target, replace=True) as folder:
        (folder / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["asset"]


def test_a_replacement_that_was_killed_half_way_gives_the_old_folder_back(tmp_path: Path) -> None:
    (tmp_path / ".asset.replaced").mkdir()
    restore_replaced(tmp_path / "asset")
    assert [path.name for path in tmp_path.iterdir()] == ["asset"]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_where_the_folder_should_go(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=rf"{tmp_path}/file.* cannot be used"),
        staged_folder(tmp_path / place / "asset"),
    ):
        pytest.fail("must not get here")
