"""The operator side is quick and light: what it imports, what it costs, how it bears odd terminals."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_writer import RunWriter

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))
HEAVY = {"torch", "ray", "transformers", "numpy", "sglang", "vllm", "tokenizers"}
LATE = {"rich", "yaml", "httpx"}

COMMANDS = [
    ["--help"],
    ["--version"],
    ["train", "--help"],
    ["eval", "--help"],
    ["ask", "--help"],
    ["status", "--help"],
    ["report", "--help"],
    ["dashboard", "--help"],
    ["presets", "--help"],
    ["presets", "explain", "--help"],
    ["assets", "--help"],
]
WORKING = [
    ["presets", "list"],
    ["presets", "show", "tiny"],
    ["presets", "explain", "tiny"],
    ["train", "--preset", "tiny", "--dry-run"],
    ["eval", "--model-path", "smollm2-135m", "--data-names", "aime24", "--dry-run"],
    ["status"],
    ["report"],
    ["runs"],
    [],
    ["train", "--preset", "tiny", "--sweep", "seed=1,2", "--dry-run"],
]

PROBE = """
import atexit, sys
from clusterkit.cli.main import main
atexit.register(lambda: print("MODULES", *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr))
main()
"""


def _run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, text=True, stderr=subprocess.PIPE, **options)


def _clusterkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(CLUSTERKIT, *arguments, stdout=subprocess.PIPE)


def _modules(arguments: list[str], folder: Path) -> set[str]:
    result = _run(sys.executable, "-c", PROBE, *arguments, stdout=subprocess.PIPE, cwd=folder)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("MODULES"), result.stderr
    return set(last.split()[1:])


@pytest.mark.parametrize("arguments", [*COMMANDS, *WORKING], ids=" ".join)
def test_no_command_imports_what_belongs_to_the_node(arguments: list[str], tmp_path: Path) -> None:
    assert not _modules(arguments, tmp_path) & HEAVY


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_help_imports_nothing_that_only_the_work_needs(arguments: list[str], tmp_path: Path) -> None:
    assert not _modules(arguments, tmp_path) & LATE


def test_the_options_of_no_command_import_what_only_the_work_needs() -> None:
    program = (
        "import sys\nfrom importlib import import_module\nfrom clusterkit.cli.main import COMMANDS\n"
        "for command in COMMANDS.values(): import_module(command.module)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    names = set(_run(sys.executable, "-c", program, stdout=subprocess.PIPE).stdout.split())

    assert "clusterkit" in names
    assert not names & (HEAVY | LATE | {"asyncssh", "pydantic"})


@pytest.mark.parametrize("arguments", [*WORKING, ["logs"], ["stop"], ["recover", "check"]], ids=" ".join)
def test_what_this_machine_can_do_alone_imports_no_ssh(arguments: list[str], tmp_path: Path) -> None:
    assert "asyncssh" not in _modules(arguments, tmp_path)


def test_help_answers_within_a_fifth_of_a_second_of_cpu_time() -> None:
    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([CLUSTERKIT, "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_seconds() for _ in range(5)) < 0.2


def test_alone_it_answers_within_half_a_second_of_cpu_time(tmp_path: Path) -> None:
    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([CLUSTERKIT], capture_output=True, check=True, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    for number in range(50):
        RunWriter(tmp_path / "runs", trial=f"run{number}").config().attempt().steps(1, 100)
    assert min(cpu_seconds() for _ in range(5)) < 0.8


def test_help_names_every_command() -> None:
    text = _clusterkit("--help").stdout

    for name in ("train", "status", "presets", "assets", "--debug", "--version"):
        assert name in text


def test_an_unknown_command_is_answered_with_the_nearest() -> None:
    result = _clusterkit("trian")

    assert result.returncode == 2
    assert "Did you mean train?" in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback_wherever_it_is_typed() -> None:
    for arguments in (["--debug", "presets", "show", "x"], ["presets", "show", "x", "--debug"]):
        assert "Traceback" in _clusterkit(*arguments).stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = _run(CLUSTERKIT, "presets", stdout=write_end)
    os.close(write_end)

    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr


def test_a_terminal_without_unicode_gets_a_result() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = _run(CLUSTERKIT, "presets", stdout=subprocess.PIPE, env=environment)

    assert result.returncode == 0
    assert "tiny" in result.stdout
