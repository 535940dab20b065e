"""A full disk, one that may not be written and a file in the way, for each place that the operator's commands write to.

Every message names the path, the disk with its free space, and the way out; none calls it a fault of clusterkit.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from run_writer import RunWriter

from clusterkit.cli.main import main
from clusterkit.ui.file_errors import explain_file_error
from trainer.disk import file_failure, file_failures, naming

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))
FAULT = "fault of clusterkit"
ROOT = os.geteuid() == 0
AS_ANYONE = ["setpriv", "--inh-caps=-dac_override", "--bounding-set=-dac_override"] if ROOT else []
"""Without this right root is as bound by permissions as anyone."""


def fill(disk: Path) -> None:
    with (disk / "ballast").open("ab", buffering=0) as file, suppress(OSError):
        for size in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def run(folder: Path, *words: str, prefix: list[str] | None = None, **places: Path) -> subprocess.CompletedProcess[str]:
    """A command whose own places lie under `folder`, save those that are named."""
    usual = {name: folder / name.lower() for name in ("CONFIG", "STATE", "CACHE")}
    chosen = {f"CLUSTERKIT_{name}": str(path) for name, path in {**usual, **places}.items()}
    return subprocess.run(
        [*(prefix or []), CLUSTERKIT, *words],
        cwd=folder, env={**os.environ, **chosen}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def one_message(done: subprocess.CompletedProcess[str], *parts: str, code: int = 1) -> None:
    said = done.stderr
    assert done.returncode == code, said
    assert said.count("error: ") == 1, said
    for word in (FAULT, "Traceback", "Errno"):
        assert word not in said
    for part in parts:
        assert part in said


def lines_of_free(disk: Path) -> str:
    return f"The disk at {disk} has 0 B free of 1.0 MiB"


def test_train_onto_a_full_disk_names_the_lock_and_the_disk(disk: Path, tmp_path: Path) -> None:
    (disk / "runs").mkdir()
    fill(disk)

    done = run(tmp_path, "train", "--preset", "tiny", "--fileroot", str(disk / "runs"))

    one_message(
        done, "no space left", lines_of_free(disk), "free some, or choose another folder with --fileroot FOLDER"
    )
    assert f"cannot write {disk}/runs/logs/" in done.stderr


def test_train_with_a_disk_that_fills_after_the_folder_was_made(disk: Path, tmp_path: Path) -> None:
    """The lock's file can be made, and its number cannot be written into it."""
    writer = RunWriter(disk / "runs")
    for path in writer.run.logs.iterdir():
        path.unlink()
    (writer.run.logs / "launch.lock").touch()
    fill(disk)

    done = run(tmp_path, "train", "--preset", "tiny", "--fileroot", str(disk / "runs"), "trial_name=run1")

    one_message(done, f"cannot write {writer.run.logs / 'launch.lock'}: no space left", lines_of_free(disk))
    assert (writer.run.logs / "launch.lock").read_bytes() == b""


def test_a_page_that_finds_no_room_at_the_end_of_a_run_is_a_warning(disk: Path, tmp_path: Path) -> None:
    writer = RunWriter(disk / "runs").config().attempt().steps(1, 30).recover(30).summary().finish()
    fill(disk)
    words = ["train", "--preset", "tiny", "--fileroot", str(disk / "runs"), "trial_name=run1", "train.total_steps=30"]

    done = run(tmp_path, *words)

    assert (done.returncode, "98.0%" in done.stdout) == (0, True), done.stderr
    (told,) = (line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert f"{writer.run.logs}/report.html" in told
    assert f"no space left on its disk. {lines_of_free(disk)}" in told
    assert not list(writer.run.logs.glob("*report*"))


@pytest.mark.parametrize(
    ("words", "places", "way"),
    [
        (["init", "h1", "--cluster", "c"], {"CONFIG": "config"}, "set CLUSTERKIT_CONFIG"),
        (["report", "--out", "DISK/r.html", "--fileroot", "RUNS"], {}, "name another file with --out"),
        (["data", "prepare", "math", "--from", "SUMS", "--out", "DISK/d"], {}, "choose a folder on another disk"),
        (["assets", "get", "amc23", "--from", "SUMS"], {"CACHE": "cache"}, "choose a folder on another disk"),
        (["eval", "--out", "DISK/e", "--model-path", "MODEL", "--data-names", "SUMS"], {}, "--out"),
        (["setup", "--hostnames", "127.0.0.1:1"], {"STATE": "state"}, "CLUSTERKIT_STATE"),
        (["down", "--hostnames", "127.0.0.1:1", "--yes"], {"STATE": "state"}, "CLUSTERKIT_STATE"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_place_of_the_operators_is_named(
    disk: Path, tmp_path: Path, words: list[str], places: dict[str, str], way: str
) -> None:
    RunWriter(tmp_path / "runs").attempt().steps(1, 3)
    fill(disk)
    (tmp_path / "sums.jsonl").write_text('{"id": "1", "question": "1 + 1?", "answer": "2", "problem": "1 + 1?"}\n')
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    here = {"DISK": disk, "RUNS": tmp_path / "runs", "SUMS": tmp_path / "sums.jsonl", "MODEL": model}
    typed = words
    for name, path in here.items():
        typed = [word.replace(name, str(path)) for word in typed]

    done = run(tmp_path, *typed, **{name: disk / folder for name, folder in places.items()})

    one_message(done, "no space left", lines_of_free(disk), way)
    assert str(disk) in done.stderr


def test_a_disk_that_may_only_be_read(disk: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=300)

    done = run(tmp_path, "init", "h1", "--cluster", "c", CONFIG=disk / "config")

    one_message(done, f"{disk}/config", "mounted for reading only: mount it for writing", "CLUSTERKIT_CONFIG", code=2)


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)

    done = run(tmp_path, "init", "h1", "--cluster", "c", prefix=AS_ANYONE, CONFIG=closed / "config")

    one_message(done, f"{closed}/config: Permission denied. {closed} belongs to", "(mode 555)", code=2)


@pytest.mark.parametrize("words", [["init", "h1", "--cluster", "c"], ["bundle", "file/config", "--os", "ubuntu-24.04"]])
def test_a_file_in_the_way_of_a_folder(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "file").write_text("here first")

    done = run(tmp_path, *words, CONFIG=tmp_path / "file" / "config")

    one_message(done, f"{tmp_path}/file is a file, and a folder is wanted there: move it away", code=2)
    assert (tmp_path / "file").read_text() == "here first"


def test_a_log_is_read_with_a_full_cache(disk: Path, tmp_path: Path) -> None:
    """What is kept there only saves time."""
    log = tmp_path / "main.log"
    log.write_text("20250222-11:11:56.997 master worker INFO: Experiment Completes! Yeah!!!!!!!!\n" * 9)
    fill(disk)

    done = run(tmp_path, "status", "--log", str(log), CACHE=disk / "cache", STATE=disk / "state")

    assert FAULT not in done.stderr
    assert "no space left" not in done.stderr


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    done = run(tmp_path, "train", "--preset", "tiny", "--fileroot", str(tmp_path / ("n" * 256)))

    one_message(done, "File name too long", "one of these has 256: choose a shorter one", code=2)


def test_what_no_command_has_put_into_words_is_put_so_at_the_end(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A write names no file; the disk is found among those that we write to."""
    fill(disk)
    monkeypatch.setenv("CLUSTERKIT_CACHE", str(disk / "cache"))
    monkeypatch.setattr("sys.argv", ["clusterkit", "presets"])

    def write(*_: object, **__: object) -> None:
        with (disk / "ballast").open("ab", buffering=0) as file:
            file.write(b"more")

    monkeypatch.setattr("clusterkit.cli.actions.presets.list_all", write)
    with pytest.raises(SystemExit) as ended:
        main()

    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert f"cannot write {disk / 'cache'}: no space left on its disk. {lines_of_free(disk)}" in said
    assert "set CLUSTERKIT_CACHE to another folder" in said


def test_output_into_a_file_on_a_full_disk(disk: Path, tmp_path: Path) -> None:
    with (disk / "out").open("ab") as out:
        fill(disk)
        done = subprocess.run(
            [CLUSTERKIT, "presets"],
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )

    one_message(done, f"cannot write {disk / 'out'}: no space left on its disk", "send the output to another file")


def test_another_temporary_folder_is_no_way_out_for_a_folder_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")

    def way(path: str) -> str:
        return str(explain_file_error(PermissionError(errno.EACCES, "Permission denied", path)))

    assert "set TMPDIR to another folder" in way("/tmp/tmpx1/file")
    assert "TMPDIR" not in way("/tmp/mine/runs/logs")


def test_errors_of_networks_are_none_of_files() -> None:
    assert explain_file_error(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) is None
    assert explain_file_error(PermissionError(errno.EACCES, "no such port for you")) is None


def test_a_quota_that_is_used_up(tmp_path: Path) -> None:
    """A quota needs a file system that keeps one; the error alone is made here."""
    told = file_failure(OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "f")), instead="ask me")

    assert told.exit_code == 1
    for part in (
        f"cannot write {tmp_path}/f: no space left on its disk for you, your quota is used up",
        "The disk at /",
        "ask me",
    ):
        assert part in str(told)


def test_an_error_without_a_path_gets_one(disk: Path) -> None:
    fill(disk)
    with (
        pytest.raises(OSError, match="No space left") as caught,
        naming(disk / "x"),
        (disk / "x").open("wb", 0) as file,
    ):
        file.write(b"data")
    assert caught.value.filename == str(disk / "x")
    with pytest.raises(Exception, match=f"cannot write {disk}/y: no space left"), file_failures(disk / "y"):
        raise OSError(errno.ENOSPC, "No space left on device")
