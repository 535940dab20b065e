"""The job that a cluster runs: when it starts a trainer again, and what a full disk does to it.

A script stands in for the trainer: it dies when it is to, and on the disk that it has filled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.files import sha256
from trainer.launch.job import install
from trainer.locks import hold

JOB = "import sys; from trainer.launch import job; sys.executable = sys.argv[1]; sys.exit(job.main(sys.argv[2:]))"


def run_job(logs: Path, trainer: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a job to its end. trainer: lines of a shell, started in the run's folder."""
    logs.mkdir(parents=True)
    config = RunConfig.model_validate({"fileroot": str(logs), "recover_after": 0.0, **settings})
    (logs / "config.yaml").write_text(yaml.safe_dump(config.model_dump()))
    script = logs / "trainer.sh"
    script.write_text(f"#!/bin/sh\ncd '{logs}'\n{trainer}")
    script.chmod(0o755)
    command = [sys.executable, "-c", JOB, str(script), str(logs / "config.yaml")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


DIES_ONCE = "[ -e died ] && exit 0\n: > died\nkill -9 $$"


def test_a_run_that_starts_afresh_each_time_is_not_started_again(tmp_path: Path) -> None:
    """A new start would throw away what was learned, and its recover checkpoints with it."""
    done = run_job(tmp_path / "afresh", DIES_ONCE, recover_mode="disabled")
    assert done.returncode == 128 + 9
    assert "given up: nothing is started again (recover_retries=0, or recover_mode=disabled)" in done.stdout

    assert run_job(tmp_path / "auto", DIES_ONCE).returncode == 0


def test_a_full_disk_costs_words_and_not_the_trainer(disk: Path) -> None:
    """What it prints finds no room, nor does the note of how it ended: it goes on, and is started again."""
    fills = "[ -e died ] && exit 0\n: > died\nuntil ! head -c 65536 /dev/zero 2>&- >> ballast; do :; done\n"
    done = run_job(disk / "run", f"{fills}head -c 200000 /dev/zero && echo lived on\nrm ballast\nkill -9 $$")
    assert "lived on" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_start_that_is_refused_after_the_run_had_begun_is_tried_again(tmp_path: Path) -> None:
    """The same configuration was taken before: the storage or a GPU may be away for a while."""
    later = "[ -e refused ] && exit 0\n[ -e died ] && : > refused && exit 2\n: > died\nkill -9 $$"
    done = run_job(tmp_path / "later", later)
    assert done.returncode == 0, done.stdout
    assert "exit code 2 before it began; restart 2" in done.stdout
    marks = [json.loads((tmp_path / "later" / f"attempt_{n}" / "exit.json").read_text()) for n in (1, 2, 3)]
    assert [(mark["code"], mark["restart_s"]) for mark in marks] == [(-9, 0.0), (2, 0.0), (0, None)]

    first = run_job(tmp_path / "first", "exit 2")
    assert (first.returncode, first.stdout) == (2, "")
    assert json.loads((tmp_path / "first" / "attempt_1" / "exit.json").read_text())["restart_s"] is None


def test_a_trainer_that_is_killed_while_it_stops_is_not_started_again(tmp_path: Path) -> None:
    done = run_job(tmp_path / "stopped", "trap '' TERM\nkill -TERM $PPID\nkill -9 $$")
    assert done.returncode == 130, done.stdout
    mark = json.loads((tmp_path / "stopped" / "attempt_1" / "exit.json").read_text())
    assert (mark["code"], mark["restart_s"], mark["stopping"]) == (-9, None, True)


def test_what_a_start_needs_is_waited_for_as_long_as_restarts_are_allowed(tmp_path: Path) -> None:
    """An hour without the storage is no reason to give up weeks; what no attempt has come beyond is, after three."""
    trained = 'echo \'{"kind": "attempt", "attempt": 1, "resume_step": 0}\' >> metrics.jsonl'
    for first, restarts in ((trained, "4 restarts (recover_retries)"), ("", "it has failed 3 times in the same way")):
        lines = f"[ -e died ] && exit 2\n: > died\n{first}\nkill -9 $$"
        done = run_job(tmp_path / restarts[:2], lines, recover_retries=4)
        assert done.returncode == 2
        assert f"given up: {restarts}" in done.stdout


def test_a_run_that_was_started_in_another_way_keeps_its_configuration(tmp_path: Path) -> None:
    """It would go on with the other one where its trainer is started again."""
    config, other = tmp_path / "config.yaml", tmp_path / "other.yaml"
    config.write_text("seed: 1\n")
    other.write_text("seed: 2\n")
    with (tmp_path / "run.lock").open("a+b") as lock:
        hold(lock)
        with pytest.raises(UserError, match=f"already being trained .process {os.getpid()} of its host"):
            install(config, other, sha256(other))
    assert config.read_text() == "seed: 1\n"
    install(config, other, sha256(other))
    assert config.read_text() == "seed: 2\n"
