"""Bad configuration files: exit 2 and one message; a traceback only when it is asked for. And the shape of main.log."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ENVIRONMENT, REPOSITORY, TOTAL_STEPS, Trial

CASES = {
    "missing": (None, "cannot read {path}: No such file or directory"),
    "not_yaml": (b"train: [1, 2", "{path} is not YAML: "),
    "not_text": (b"\xff\xfe\x00", "{path} is not text in UTF-8: "),
    "a_list": (b"- 1\n- 2\n", "{path} is not a valid configuration:\n  configuration: "),
    "unknown_key": (b"train: {total_stepz: 3}\n", "{path} is not a valid configuration:\n  train.total_stepz: "),
    "wrong_type": (b"train: {total_steps: many}\n", "{path} is not a valid configuration:\n  train.total_steps: "),
    "out_of_bounds": (b"train: {eps: -1}\n", "{path} is not a valid configuration:\n  train.eps: "),
    "two_at_once": (b"seed: x\nfoo: 1\n", "{path} is not a valid configuration:\n  seed: "),
}


def _trainer(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "trainer", *arguments]
    return subprocess.run(
        argv, env=ENVIRONMENT, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("case", CASES)
def test_bad_configuration(tmp_path: Path, case: str) -> None:
    content, words = CASES[case]
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    done = _trainer(str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: " + words.format(path=path)), done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


def test_a_folder_for_a_file(tmp_path: Path) -> None:
    done = _trainer(str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"error: cannot read {tmp_path}: Is a directory\n")


def test_debug_shows_the_traceback_and_keeps_the_exit_code(tmp_path: Path) -> None:
    done = _trainer(str(tmp_path / "none.yaml"), "--debug")
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith(f"error: cannot read {tmp_path / 'none.yaml'}: No such file or directory\n")


def test_a_judge_that_is_not_there_is_told_before_minutes_of_warming_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clusterkit.cli.main", "train", "--preset", "memalpha-tiny", "judge.reader=server"]
    command += ["judge.url=http://127.0.0.1:9", f"fileroot={tmp_path / 'runs'}", f"cache_dir={tmp_path / 'cache'}"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "the judge at http://127.0.0.1:9 cannot be reached" in done.stderr
    assert not (tmp_path / "cache" / "warmup").exists()


STAMP = r"\d{8}-\d\d:\d\d:\d\d\.\d{3} master worker (INFO|WARNING|ERROR): "
FINISHES = re.compile(
    STAMP + r"Epoch (\d+)/(\d+) step (\d+)/(\d+) \(global step (\d+)\) finishes\. Average #tokens per batch is \d+\. "
    r"#End to end# execution time: \*\d+\.\d{3}\*s\. Total time consumption: \d+\.\d{3}s\. "
    r"(Estimated remaining time: \d+\.\d{3}s\. )?$"
)
RETURNS = re.compile(STAMP + r"RPC name actor_train returns (\{.*'task_reward': [-\d.e]+.*\})$")


def test_every_line_of_the_log_has_the_stamp(reference: Trial) -> None:
    lines = reference.log().splitlines()
    assert len(lines) > 3 * TOTAL_STEPS
    assert [line for line in lines if not re.match(STAMP, line)] == []
    assert "\x1b" not in reference.log()


def test_steps_are_told_as_areal_does(reference: Trial) -> None:
    lines = reference.log().splitlines()
    told = [match for match in map(FINISHES.match, lines) if match]
    assert [int(m[6]) for m in told] == list(range(1, TOTAL_STEPS + 1))
    assert [(int(m[2]), int(m[4])) for m in told] == [(1 + g // 6, 1 + g % 6) for g in range(TOTAL_STEPS)]
    assert {(m[3], m[5]) for m in told} == {("2", "6")}
    assert [bool(m[7]) for m in told] == [g > 2 for g in range(1, TOTAL_STEPS + 1)], "as AReaL: from the third on"
    assert sum(bool(RETURNS.match(line)) for line in lines) == TOTAL_STEPS


def test_a_recover_line_for_every_recover_record(reference: Trial) -> None:
    assert reference.log().count(" INFO: Dumped recover info to file.\n") == len(reference.records("recover"))
    assert [r["global_step"] for r in reference.records("recover")] == list(range(1, TOTAL_STEPS + 1))
