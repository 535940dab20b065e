"""What is printed fits the terminal: its width, its colours, its encoding; and --json has neither."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_writer import RunWriter
from typer.testing import CliRunner

from clusterkit.cli.main import app
from clusterkit.config.presets import size_names
from clusterkit.ui import output
from clusterkit.ui.colour import coloured
from clusterkit.ui.run_status import warmup_text
from clusterkit.ui.width import fitted

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))
SPARK = "▁▂▃▄▅▆▇█"
HOLD = """
import sys
from pathlib import Path
from trainer.locks import hold
file = Path(sys.argv[1]).open("a+b")
hold(file)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    RunWriter(tmp_path / "runs").config().attempt().steps(1, 9).run.console(1).write_text("error: no more disk\n")
    return tmp_path


@contextmanager
def _at_work(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run as if it trained it."""
    lock = next(folder.glob("runs/logs/*/tiny-recall/run1")) / "run.lock"
    words = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock.write_text(f"{holder.pid}\n")
        yield holder


def _on_a_terminal(words: list[str], folder: Path, **environment: str) -> str:
    """What a command writes to a terminal."""
    screen, side = pty.openpty()
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [CLUSTERKIT, *words], stdout=side, stderr=side, cwd=folder, env={**known, "TERM": "xterm", **environment}
    )
    os.close(side)
    seen = b""
    while True:
        try:
            chunk = os.read(screen, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    process.wait()
    os.close(screen)
    return seen.decode()


def test_a_terminal_shows_what_went_wrong_in_red(folder: Path) -> None:
    seen = _on_a_terminal(["status"], folder)

    assert "\x1b[31mfailed\x1b[0m" in seen
    assert "\x1b[36m▁" in seen
    assert "\x1b[1;31merror:\x1b[0m no runs found" in _on_a_terminal(["status", "--fileroot", "none"], folder)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_without_colours_gets_none(environment: dict[str, str], folder: Path) -> None:
    assert "\x1b" not in _on_a_terminal(["status"], folder, **environment)


def test_a_file_gets_colours_only_where_they_are_forced_and_json_never(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(*words: str) -> str:
        return CliRunner().invoke(app, list(words)).stdout

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in shown("status")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[31mfailed\x1b[0m" in shown("status")
    assert json.loads(shown("status", "--json"))["state"] == "failed"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown("status")


def test_colour_changes_no_character_of_a_text() -> None:
    text = f"error: x\nstate        running (process 3): ok  FAIL\n  ok    gpus  fine\nok\n{SPARK}"

    plain = coloured(text)
    for code in ("31", "32", "33", "36", "1;31", "0"):
        plain = plain.replace(f"\x1b[{code}m", "")
    assert plain == text


@pytest.mark.parametrize("words", [["presets"], *(["presets", "plan", name] for name in size_names())], ids=" ".join)
def test_presets_and_their_plans_fit_60_columns(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = CliRunner().invoke(app, words).stdout.splitlines()

    assert len(lines) > 10
    # A word alone may be longer: an allocation_mode or a path is of no use in parts.
    assert [line for line in lines if len(line) > 60 and " " in line.strip().removesuffix(" \\")] == []


def test_a_line_goes_on_under_the_column_that_it_began_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")

    assert fitted(["  ok    gpus  two hosts of eight each"], 100).splitlines() == [
        "  ok    gpus  two hosts of",
        "              eight each",
    ]
    assert fitted(["a " * 40]) == "a " * 40  # no terminal: a script may read it
    monkeypatch.delenv("COLUMNS")
    assert fitted(["a " * 40], 100) == "a " * 40


@pytest.mark.parametrize("words", ["", "jobs", "train --preset tiny --dry-run --sweep seed=1,2"], ids=str)
def test_what_a_narrow_terminal_shows_is_folded_between_words(folder: Path, words: str) -> None:
    with _at_work(folder):
        lines = _on_a_terminal(words.split(), folder, COLUMNS="60", NO_COLOR="1").splitlines()

    assert len(lines) > 2
    assert [line for line in lines if len(line) > 60 and " " in line.strip().removesuffix(" \\")] == []


def test_a_command_that_is_cut_off_can_still_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = fitted(["Train it: clusterkit train --preset 7B_n4 --cluster default n_nodes=2"], 100)

    assert max(map(len, text.splitlines())) <= 40
    assert text.replace("\\\n", "").split() == (
        "Train it: clusterkit train --preset 7B_n4 --cluster default n_nodes=2".split()
    )


@pytest.mark.parametrize("label", ["what this machine can run", "the cluster's runs"], ids=str)
def test_a_command_after_a_long_label_can_still_be_copied(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    *cut_off, _ = fitted([f"  {label}  clusterkit runs --state running"], 100).splitlines()

    assert cut_off
    assert all(line.endswith(" \\") for line in cut_off)


@pytest.mark.parametrize("word", ["task.path=/my own documents/a  b.txt", "it's 'so'", 'a"b c" d e f'], ids=str)
def test_a_command_is_the_same_for_a_shell_however_narrow_the_terminal(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = shlex.join(["clusterkit", "train", "--preset", "135M", word, "train.total_steps=120"])
    for columns in (20, 30, 41, 60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = fitted([f"  train further   {command}"], 100)
        words = subprocess.check_output(["sh", "-c", f"printf '%s\\0' {text}"], text=True).split("\0")
        assert words[2:-1] == shlex.split(command), columns


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_bars_and_arrows_look_like_themselves_in_any_encoding(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    stream.reconfigure(errors="clusterkit-ascii")
    stream.write(f"{SPARK} a → b… ≤ ░ 漢")
    stream.flush()

    assert stream.buffer.getvalue().decode(encoding) == "_.-~=+*# a -> b... <= . ?"  # type: ignore[attr-defined]
    assert codecs.lookup_error("clusterkit-ascii")


def test_a_terminal_in_ascii_shows_a_sparkline(folder: Path) -> None:
    seen = _on_a_terminal(["status"], folder, PYTHONIOENCODING="ascii", PYTHONUTF8="0", NO_COLOR="1")

    assert "_.-" in seen
    assert "??" not in seen


def test_a_run_that_was_interrupted_is_said_to_be_so_once_and_within_60_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writer = RunWriter(tmp_path / "runs").config().attempt()
    writer.finish("interrupted", message="interrupted during the warm-up: its state is written")

    assert "run1 was interrupted during the warm-up: its" in _on_a_terminal(["diagnose"], tmp_path, COLUMNS="60")
    checked = _on_a_terminal(["recover", "check"], tmp_path, COLUMNS="60").splitlines()
    assert "verdict   there is no recover checkpoint: a start begins at" in checked


def test_the_warm_up_says_how_long_it_will_take() -> None:
    record = {"phase": "recall", "step": 13, "steps": 100, "accuracy": 0.5, "remaining_s": 200.0}

    assert warmup_text(record) == "recall step 13/100, accuracy 50.0%, about 3 min 20 s left of it"
    assert "left" not in warmup_text({**record, "step": 100, "remaining_s": 0.0})
    assert "left" not in warmup_text({"phase": "recall", "step": 13, "steps": 100})  # of an older trainer


def test_logs_as_json_have_text_level_and_time(folder: Path) -> None:
    log = RunWriter(folder / "other").run.logs / "main.log"
    log.write_text("20250222-11:11:56.997 master worker INFO: Epoch 1\nplain, not ended", encoding="utf-8")
    shown = CliRunner().invoke(app, ["logs", "--json", "--fileroot", "other"]).stdout

    first, second = map(json.loads, shown.splitlines())
    assert (first["level"], first["log"]) == ("INFO", str(log))
    assert first["time"].startswith("2025-02-2")
    assert first["text"].endswith("INFO: Epoch 1")
    assert second == {"log": str(log), "time": None, "level": None, "text": "plain, not ended"}


def test_stop_as_json_says_which_run_and_how_it_ended(folder: Path) -> None:
    with _at_work(folder) as holder:
        stopped = json.loads(CliRunner().invoke(app, ["stop", "--json", "--here"]).stdout)

        assert holder.wait(10) == -signal.SIGTERM
    assert (stopped["run"], stopped["forced"]) == ("tiny-recall/run1", False)
    assert stopped["message"].startswith("tiny-recall/run1 is stopped; ")


def test_alerts_as_json_are_what_was_delivered(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["alerts", "--once", "--command", "true", "--json", "--here"])

    assert json.loads(shown.stdout)["event"] == "failed"
    again = CliRunner().invoke(app, ["alerts", "--once", "--command", "true", "--json", "--here"])
    assert (again.exit_code, again.stdout) == (0, "")


def test_servers_that_are_not_there_are_an_empty_list_as_json(folder: Path) -> None:
    assert json.loads(CliRunner().invoke(app, ["serve", "stop", "--here", "--json"]).stdout) == {"ended": []}
    words = ["--judges", "--here", "--json"]
    assert json.loads(CliRunner().invoke(app, ["serve", "list", *words]).stdout) == {"servers": []}
    assert json.loads(CliRunner().invoke(app, ["serve", "stop", *words]).stdout) == {"ended": []}


def test_an_error_is_spelled_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    output.error("error: x")
    output.error("y")

    assert capsys.readouterr().err == "error: x\nerror: y\n"


def test_a_terminal_that_closes_and_says_so_twice_leaves_the_cleanup_alone() -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from clusterkit.cli import main\n"
        "def app(**_):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        print('cleaned up', flush=True)\n"
        "main.app = app\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("cleaned up\n", -signal.SIGINT)
