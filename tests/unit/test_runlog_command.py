"""`clusterkit status --log FILE`, as people and scripts call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from areal_lines import master, v2_steps

SAMPLE = Path(__file__).parents[1] / "cases" / "runlog" / "areal_v0.2_master_worker.log"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "clusterkit.cli.main", "status", *map(str, arguments)]


def status(state: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CLUSTERKIT_STATE": str(state)}
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=state.parent
    )


def test_text_and_json_of_areals_sample(tmp_path: Path) -> None:
    shown, told = status(tmp_path / "s", "--log", SAMPLE), status(tmp_path / "s", "--log", SAMPLE, "--json")

    assert (shown.returncode, told.returncode) == (0, 0)
    assert "6/19" in shown.stdout
    assert "AReaL v0.2" in shown.stdout
    facts = json.loads(told.stdout)
    assert facts["progress"]["global_step"] == 6
    assert facts["stats"]["task_reward"] == -0.7025146484375
    assert not (tmp_path / "s").exists()  # so little is read again at no cost


def test_a_number_that_json_does_not_know_is_null(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(master("RPC name actor_train returns {'task_reward': nan, 'lr': 0.5}", 1.0) + v2_steps(2, 2))

    facts = json.loads(status(tmp_path / "s", "--log", log, "--json").stdout)

    assert facts["progress"]["global_step"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--log", "missing.log"), "no log"),
        (("--log", "."), "is a folder"),
        (("--log", "/dev/null"), "no regular file"),
        (("--log", SAMPLE, "--trial", "run1"), "leave --trial out"),
        (("--log", SAMPLE, "--cluster", "lab", "--user", "ann"), "leave --cluster and --user out"),
        (("--log", SAMPLE, "--fileroot", "runs"), "leave --fileroot out"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_message(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = status(tmp_path / "s", *arguments)

    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_log_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    log = folder / "main.log"
    log.write_text(v2_steps(1, 1))
    # Root may read everything, so a child that is nobody asks for it.
    script = "import os, sys; from pathlib import Path; from clusterkit.runs.log.reader import read_log\n"
    script += "if os.geteuid() == 0: os.setegid(65534); os.seteuid(65534)\n"
    script += "try: read_log(Path(sys.argv[1]))\n"
    script += "except Exception as error: print(type(error).__name__, error.exit_code, error)\n"
    log.chmod(0o000)

    done = subprocess.run([sys.executable, "-c", script, log], capture_output=True, text=True, timeout=300, check=True)

    assert done.stdout.startswith("UserError 2")
    assert "may not be read" in done.stdout


def test_watching_goes_on_until_the_run_ends(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(v2_steps(1, 1))
    environment = {**os.environ, "CLUSTERKIT_STATE": str(tmp_path / "s")}
    arguments = command("--log", log, "--watch", "--json")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        giving_up = threading.Timer(60, process.kill)
        giving_up.start()
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        with log.open("a") as file:
            file.write(v2_steps(2, 2) + master("Experiment Completes! Yeah!!!!!!!!", 900.0))
        seen = [json.loads(line) for line in process.stdout]
        giving_up.cancel()

    assert first["progress"]["global_step"] == 1
    assert (seen[-1]["state"], seen[-1]["progress"]["global_step"]) == ("finished", 2)
    assert process.returncode == 0


def test_watching_outlives_the_moment_in_which_a_log_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text(v2_steps(1, 1))
    environment = {**os.environ, "CLUSTERKIT_STATE": str(tmp_path / "s")}
    arguments = command("--log", log, "--watch", "--json")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        giving_up = threading.Timer(60, process.kill)
        giving_up.start()
        assert process.stdout is not None
        process.stdout.readline()
        log.rename(tmp_path / "main.log.1")
        process.stdout.readline()
        log.write_text(v2_steps(2, 2) + master("Experiment Completes! Yeah!!!!!!!!", 900.0))
        seen = [json.loads(line) for line in process.stdout]
        giving_up.cancel()

    assert seen[-1]["history"]["global_step"] == [1, 2]
    assert process.returncode == 0
