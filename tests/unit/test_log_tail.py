"""The last lines of a log, of which nothing but the end is read: here and over a real ssh connection."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_writer import RunWriter
from sshd import Ssh

from clusterkit.backends.ray.storage import read_from, size_of
from clusterkit.runs.log.tail import MOST_BYTES, Tail, read_tail
from clusterkit.ssh.api import HostError

pytest_plugins = ["sshd_fixture"]

TERABYTE = 1 << 40
"""Nobody reads so many bytes within a test, nor holds them in memory; the files are sparse."""


def _huge(path: Path, end: bytes) -> Path:
    with path.open("wb") as file:
        file.truncate(TERABYTE)
        file.seek(0, os.SEEK_END)
        file.write(end)
    return path


def _logs(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    command = [sys.executable, "-m", "clusterkit.cli.main", "logs", "--fileroot", str(root), *arguments]
    return subprocess.run(command, capture_output=True, timeout=300, check=False, preexec_fn=limited)


def _last(data: bytes, count: int) -> bytes:
    lines = data.split(b"\n")
    ends = b"\n" if lines[-1] == b"" and len(lines) > 1 else b""
    lines = lines[:-1] if ends else lines
    return b"\n".join(lines[-count:]) + ends if data else b""


@settings(max_examples=300, deadline=None, database=None)
@given(
    data=st.lists(st.sampled_from([b"\n", b"a", b"bc\n", b"\r", b"x" * 9, b"\xc3\xbc"])).map(b"".join),
    count=st.integers(1, 6),
    first=st.integers(1, 7),
)
def test_the_same_lines_as_of_the_whole_file(data: bytes, count: int, first: int) -> None:
    tail = Tail(len(data), count)
    tail._next = first
    while (wanted := tail.next_piece()) is not None:
        offset, length = wanted
        tail.add(data[offset : offset + length])
    assert tail.text() == _last(data, count)
    assert not tail.cut


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    run = RunWriter(tmp_path).attempt().run
    _huge(run.logs / "main.log", b"\n" + b"".join(b"line %d\n" % number for number in range(100_000)))
    _huge(run.console(1), b"\none\ntwo")

    done = _logs(tmp_path, "--lines", "30000")
    console = _logs(tmp_path, "--console", "--lines", "2")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [b"line %d" % number for number in range(70_000, 100_000)]
    assert (console.returncode, console.stdout) == (0, b"one\ntwo")


def test_the_end_of_a_line_that_is_too_long_for_anybody(tmp_path: Path) -> None:
    run = RunWriter(tmp_path).attempt().run
    _huge(run.logs / "main.log", b"\xbc the end of a very long line\nlast\n")

    done = _logs(tmp_path)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout) <= MOST_BYTES
    assert done.stdout.endswith(b" the end of a very long line\nlast\n")
    assert b"this is their end" in done.stderr


def test_all_lines_still_are_all(tmp_path: Path) -> None:
    run = RunWriter(tmp_path).attempt().run
    text = b"".join(b"line %d\n" % number for number in range(200_000))
    (run.logs / "main.log").write_bytes(text)

    assert _logs(tmp_path, "--lines", "0").stdout == text
    (run.logs / "main.log").write_bytes(b"")
    empty = _logs(tmp_path)
    assert (empty.returncode, empty.stdout) == (0, b"")
    assert b"main.log has nothing yet; how the run is doing: clusterkit status" in empty.stderr
    missing = _logs(tmp_path, "--rank", "7")
    assert missing.returncode == 1
    assert b"rank_7.log cannot be read" in missing.stderr


def test_a_log_that_is_truncated_while_it_is_read() -> None:
    now, tail = b"new\n" * 10, Tail(4000, 5)
    while (wanted := tail.next_piece()) is not None:
        offset, length = wanted
        tail.add(now[offset : offset + length])
    assert tail.text() == b"new\n" * 5


def test_only_the_end_is_read_on_another_host(ssh: Ssh, tmp_path: Path) -> None:
    log = _huge(tmp_path / "main 'log", b"\n" + b"".join(b"line %d\n" % number for number in range(50_000)))

    server = ssh.servers()

    def read(offset: int, most: int) -> bytes:
        return bytes(ssh.with_session(server, lambda session: read_from(session, log, offset, most)))

    end = ssh.with_session(server, lambda session: size_of(session, log))
    text = read_tail(read, end, 40_000).text()
    with log.open("ab") as file:
        file.write(b"more\n")

    assert text.splitlines() == [b"line %d" % number for number in range(10_000, 50_000)]
    assert read(end, 100) == b"more\n"
    with pytest.raises(HostError, match="cannot be read"):
        ssh.with_session(server, lambda session: size_of(session, tmp_path / "none"))
