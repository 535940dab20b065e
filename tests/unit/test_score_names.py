"""Held-out scores are shown under their own name, F1 or accuracy, wherever a person reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from areal_lines import master
from run_writer import RunWriter
from typer.testing import CliRunner

from clusterkit.cli.main import app
from clusterkit.config.resolve import resolve
from clusterkit.observe.report.page import content
from clusterkit.observe.report.source import RunReader
from clusterkit.runs.final_evaluation import read_summary, summary_lines
from clusterkit.runs.log.progress import LogHistory
from clusterkit.runs.log.scan import LogScanner
from clusterkit.runs.status import observe
from clusterkit.ui.progress import event_line, live_lines
from clusterkit.ui.run_status import status_lines

NAMES = ("accuracy", "F1", "score")
OLD = None
"""Records of before they named their score."""


def measured(root: Path, name: str | None, trial: str = "run1") -> RunWriter:
    """A run at its end, with two held-out evaluations and a closing table of two numbers of documents."""
    said = {} if name is None else {"score_name": name}
    writer = RunWriter(root, trial=trial).config().attempt().steps(1, 30)
    for kind, step, value in (("before", 0, 0.125), ("after", 30, 0.25)):
        writer.record("eval", name=kind, global_step=step, num_tasks=8, accuracy=value, **said)
    rows = [{"chunks": 0, "documents": number, "before": 0.125, "after": 0.25} for number in (0, 8)]
    return writer.summary(table=rows, trained_documents=4, trained_chunks=[], chance=None, **said)


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        *((name, "accuracy") for name in ("boxed", "found", "math", "memalpha")),
        *((name, "F1") for name in ("f1", "reading")),
        ("mine:Reward", "score"),
    ],
)
def test_the_reward_names_the_score(reward: str, name: str) -> None:
    preset = {"memalpha": "memalpha-tiny", "math": "7B_n4"}.get(reward, "tiny")

    assert resolve(preset, None, (f"reward.name={reward}",)).config.reward.score_name == name


@pytest.mark.parametrize("name", [*NAMES, OLD])
def test_train_and_status_and_the_closing_table_name_it(tmp_path: Path, name: str | None) -> None:
    writer, called = measured(tmp_path, name), name or "accuracy"
    run = RunReader(writer.run).read()
    summary = read_summary(writer.run)
    assert summary is not None

    shown = "\n".join(live_lines(run.history, 0.0))
    status = "\n".join(status_lines(observe(writer.run, writer.clock)))

    assert event_line(run.history.evals[0], run.history) == f"before: {called} 12.5% as trained"
    assert summary_lines(summary)[0].startswith(f"held-out {called} (128 tasks, greedy)")
    assert f"measuring held-out {called}, " in shown
    if called == "accuracy":
        assert "\nheld-out     step 0 12.5% → step 30 25.0%" in shown
        assert "\nheld-out     25.0% of 8 tasks after step 30" in status
    else:
        assert f"\n{f'held-out {called}':<11}  step 0 12.5% → step 30 25.0%" in shown
        assert f"\n{f'held-out {called}':<12} 25.0% on 8 tasks after step 30" in status


def test_the_f1_of_marked_answers_alone_is_called_so(tmp_path: Path) -> None:
    metrics = {"f1": 0.125, "yes_no/f1": 0.5, "em": 0.1}
    row = {"chunks": 0, "before": 0.25, "after": 0.25, "metrics_before": metrics, "metrics_after": metrics}
    writer = RunWriter(tmp_path).config().attempt().steps(1, 3)
    summary = read_summary(writer.summary(table=[row], trained_chunks=[], chance=None, score_name="F1").run)
    assert summary is not None

    labels = [line.partition("   ")[0].strip() for line in summary_lines(summary)]
    assert [label for label in labels if "f1" in label.lower()] == [
        "held-out F1 (128 tasks, greedy)",
        "f1 of marked answers",
        "yes_no/f1 of marked answers",
    ]


@pytest.mark.parametrize("name", [*NAMES, OLD])
def test_a_page_names_it(tmp_path: Path, name: str | None) -> None:
    writer, called = measured(tmp_path, name), name or "accuracy"

    page = content([RunReader(writer.run).read()], writer.clock)

    for told in (
        f"<dt>Held-out {called}</dt>",
        f"<h3>Held-out {called} <small>",
        f"held-out {called} (128 tasks",
        f"<h3>Held-out {called} by the number of documents</h3>",
    ):
        assert told in page
    assert ("the number eval/accuracy" in page) == (called != "accuracy")


def test_runs_of_different_rewards_have_scores(tmp_path: Path) -> None:
    runs = [RunReader(measured(tmp_path, name, name).run).read() for name in NAMES[:2]]

    page = content(runs, 0.0)

    assert "<h3>Held-out score <small>" in page
    assert "Their score (accuracy of accuracy; F1 of F1) is the number eval/accuracy." in page
    cells = page.partition(">Held-out score<")[2].partition("</tr>")[0]
    assert re.findall(r">(\w+) <b>([\d.]+%)</b>", cells) == [("accuracy", "25.0%"), ("F1", "25.0%")]
    assert "held-out accuracy (128 tasks" in page
    assert "held-out F1 (128 tasks" in page


def test_a_run_that_has_losses_beside_one_that_has_f1_changes_nothing_of_its_name(tmp_path: Path) -> None:
    taught = RunWriter(tmp_path, trial="sft").config().attempt().steps(1, 3)
    taught.record("eval", name="before", global_step=0, num_tasks=8, loss=0.5)
    runs = [RunReader(writer.run).read() for writer in (measured(tmp_path, "F1"), taught)]

    assert "<h3>Held-out F1 <small>" in content(runs, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_log_is_read_whatever_the_score_is_called(name: str) -> None:
    scanner = LogScanner()
    scanner.feed(master(f"Evaluation before (8 documents): {name} 0.2688 on 128 tasks.", 0.0).encode())

    history: LogHistory = scanner.history
    (found,) = history.evals
    assert (found["score_name"], found["accuracy"], found["num_tasks"]) == (name, 0.2688, 128)


def test_a_table_of_runs_names_it_and_a_pipe_has_the_same_columns_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))

    def table(*words: str) -> str:
        done = CliRunner().invoke(app, ["runs", "--sort", "f1", *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    measured(tmp_path / "runs", "F1")
    piped = table().splitlines()
    assert "accuracy" in piped[0].split("\t")
    assert "25.0%" in piped[1].split("\t")
    told = [(run["score_name"], run["accuracy"]) for run in json.loads(table("--json"))]
    assert told == [("F1", 0.25)]

    monkeypatch.setattr("clusterkit.cli.actions.runs.terminal_width", lambda: 120)
    assert table().splitlines()[0].split()[-1] == "F1"
    measured(tmp_path / "runs", OLD, "run2")
    head, *rows = (line.rstrip() for line in table().splitlines()[:3])
    assert head.split()[-1] == "score"
    assert {" ".join(row.split()[-2:]) for row in rows} == {"F1 25.0%", "accuracy 25.0%"}
