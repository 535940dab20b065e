"""`clusterkit report --log FILE`: the page of a run of which only the log is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clusterkit.cli.main import app

SAMPLE = Path(__file__).parents[1] / "cases" / "runlog" / "areal_v0.2_master_worker.log"


def _report(*words: str) -> Result:
    return CliRunner().invoke(app, ["report", *words])


def test_a_log_of_areal_has_a_page_with_its_numbers_and_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = json.loads(_report("--log", str(SAMPLE), "--json").stdout)
    page = Path(made["path"]).read_text(encoding="utf-8")

    assert made["path"] == str(tmp_path / "areal_v0.2_master_worker.html")
    assert made["runs"] == [SAMPLE.name]
    assert f"<b>{SAMPLE.name}</b>" in page
    assert "6 of 19" in page
    assert "task_reward" in page
    assert "importance_weight" in page
    assert "None" not in re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def test_out_names_the_file_and_a_pipe_is_read() -> None:
    command = [sys.executable, "-m", "clusterkit.cli.main", "report", "--log", "-", "--out", "-"]
    shown = subprocess.run(command, input=SAMPLE.read_bytes(), capture_output=True, check=True).stdout.decode()

    assert shown.startswith("<!DOCTYPE html>")
    assert "standard input" in shown


def test_what_is_no_log_or_names_a_run_besides_is_refused(tmp_path: Path) -> None:
    letter = tmp_path / "letter"
    letter.write_text("Dear Sir\n", encoding="utf-8")

    assert "is not a log of AReaL or clusterkit" in str(_report("--log", str(letter)).exception)
    beside = _report("--log", str(SAMPLE), "--trial", "x", "--compare", "y").exception
    assert "leave --trial and --compare out" in str(beside)
    assert "there is no" in str(_report("--log", str(tmp_path / "none")).exception)
