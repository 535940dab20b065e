"""A lock of a file: one holder, who says who it is, on a full disk, too."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import nolocks
import pytest

from clusterkit.runs.directory import lock_holder
from trainer.locks import HeldError, hold


def test_who_holds_it_is_told_and_it_is_free_when_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("an older holder, with a longer name")
    with path.open("a+b") as first, path.open("a+b") as second:
        hold(first)
        with pytest.raises(HeldError) as caught:
            hold(second)
        assert caught.value.holder == str(os.getpid())
    with path.open("a+b") as third:
        hold(third, "me\n")
    assert path.read_text() == "me\n"


def test_somebody_who_looks_at_it_is_no_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is started again while `clusterkit status` looks was refused for good."""
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb") as looking, path.open("a+b") as ours:
        fcntl.flock(looking, fcntl.LOCK_SH)
        waits = []

        def look_ends(seconds: float) -> None:
            waits.append(seconds)
            fcntl.flock(looking, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", look_ends)
        hold(ours)
        assert len(waits) == 1
        assert lock_holder(path) == f"process {os.getpid()}"


FULL = """
import resource, signal, sys
from clusterkit.runs.directory import lock_holder
from trainer.locks import hold
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as a disk that takes nothing
with open(sys.argv[1], "a+b") as file:
    try:
        hold(file)
    except OSError:
        print("told")
print("closed")
"""


def test_where_nothing_can_be_written_it_fails_once(tmp_path: Path) -> None:
    """Not again when the file is closed, where the words of the caller would be lost."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "lock")], capture_output=True, text=True, timeout=300, check=False
    )

    assert (done.stdout, done.returncode) == ("told\nclosed\n", 0), done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [(errno.ENOLCK, "fail (No locks"), (errno.ENOSYS, "fail (Function not"), (0, "do nothing")],
)
def test_a_file_system_without_locks_refuses_a_run_and_says_so(tmp_path: Path, error: int, said: str) -> None:
    words = [*nolocks.words(error), sys.executable, "-m", "clusterkit.cli.main", "train", "--preset", "tiny", "--here"]
    environment = {**os.environ, "CLUSTERKIT_STATE": str(tmp_path / "state"), "CLUSTERKIT_CONFIG": str(tmp_path)}
    done = subprocess.run(
        [*words, "--fileroot", str(tmp_path / "runs")], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"file locks {said}" in done.stderr
    assert "rpc-statd" in done.stderr
    assert "--fileroot FOLDER" in done.stderr
