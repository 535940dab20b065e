"""Scripts around a dockerd without systemd, where its file of a process ID cannot be read.

The real engine takes the file away at its own moment; a shell function in place of `cat` does so at the worst one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from clusterkit.provision.steps import dockerd_scripts

TELL = "if alive; then echo runs; else echo ended; fi\n"


def run(pid_file: Path, commands: str) -> subprocess.CompletedProcess[str]:
    script = dockerd_scripts.functions(systemd=False).replace("/var/run/docker.pid", str(pid_file)) + commands
    return subprocess.run(["sh", "-eu"], input=script, capture_output=True, text=True, check=False, timeout=30)


def test_an_engine_that_ends_while_it_is_looked_for_has_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "docker.pid"
    pid_file.write_text("1")

    done = run(pid_file, f'cat() {{ rm -f {pid_file}; command cat "$@"; }}\n{TELL}')

    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_a_file_that_cannot_be_read_says_nothing_about_the_engine(tmp_path: Path) -> None:
    pid_file = tmp_path / "docker.pid"
    pid_file.mkdir()

    done = run(pid_file, TELL)

    assert (done.returncode, done.stdout) == (1, "")
    assert "directory" in done.stderr
