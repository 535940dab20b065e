"""What is shown while a run is followed, and the table at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from run_writer import RunWriter

from clusterkit.runs.final_evaluation import read_summary, summary_lines
from clusterkit.runs.log.metrics import History, MetricsTail
from clusterkit.ui.progress import LiveDisplay, PlainLines, live_lines


def _plain(writer: RunWriter, capsys: pytest.CaptureFixture[str]) -> list[str]:
    history, plain = History(), PlainLines()
    news = MetricsTail(writer.run.metrics).read()
    for record in news:
        history.add(record)
    plain.show(history, news)
    return capsys.readouterr().err.splitlines()


def test_plain_lines_tell_every_step_checkpoint_and_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 2).recover(2).record("warning", message="memory is low")
    writer.record("eval", name="heldout", global_step=2, accuracy=0.5, num_tasks=128)
    writer.record("save", global_step=2, path="actor/x")
    writer.record("eval", name="after", global_step=2, chunks=64, blank_memory=True, accuracy=0.0, num_tasks=128)
    writer.record("eval", name="after", global_step=2, documents=8, method="rag", accuracy=0.25, num_tasks=128)

    assert _plain(writer, capsys) == [
        "step 1/30  task_reward 0.010  12.3 k tokens/s  4.0 s  ETA 1 min 52 s",
        "step 2/30  task_reward 0.020  12.3 k tokens/s  4.0 s  ETA 1 min 52 s",
        "recover checkpoint after step 2 (12 MB)",
        "warning: memory is low",
        "held-out accuracy 50.0% (128 tasks) after step 2",
        "checkpoint after step 2: actor/x",
        "after: accuracy 0.0% at 64 chunks, memory blanked",
        "after: accuracy 25.0% with BM25's top 2 at 8 documents",
    ]


def test_plain_warmup_lines_come_every_ten_seconds_and_with_every_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = RunWriter(tmp_path)
    for second in range(25):
        writer.clock += 1
        writer.record("warmup", phase="recall" if second < 12 else "sft", step=second, steps=25, loss=1.0, accuracy=0.5)

    steps = [line.split()[3].partition("/")[0] for line in _plain(writer, capsys)]

    assert steps == ["0", "10", "12", "22"]


def test_a_supervised_start_is_told_as_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = RunWriter(tmp_path).record("warmup", phase="supervised", step=3, steps=6, loss=0.5, recover_step=None)

    assert _plain(writer, capsys) == ["supervised start: step 3 of 6, loss 0.500, no recover checkpoint yet"]


def test_the_time_between_loading_and_the_first_step_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = RunWriter(tmp_path).record("warmup", phase="supervised", step=6, steps=6, remaining_s=0.0, recover_step=4)
    writer.attempt()

    assert _plain(writer, capsys) == [
        "supervised start: step 6 of 6, recover checkpoint after step 4",
        "the trainer has loaded; held-out tasks are measured before step 1",
    ]


def drawn(history: History, width: int) -> str:
    """What the live display shows in a terminal of that many columns."""
    display = LiveDisplay("tiny-recall/run1")
    display.close()
    console = Console(width=width)
    with console.capture() as captured:
        console.print(display.drawing(history))
    return captured.get()


@pytest.mark.parametrize("phase", ["recall", "supervised"])
def test_beside_its_bar_the_warm_up_says_nothing_twice(phase: str) -> None:
    history = History()
    history.add({"kind": "warmup", "phase": phase, "step": 38, "steps": 100, "loss": 0.6, "remaining_s": 110.0})
    shown = drawn(history, 80)

    assert shown.count("38") == shown.count("1 min 50 s") == 1
    assert "loss 0.600" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_held_out_accuracy_is_told_from_before_the_first_step_on() -> None:
    """Where the first evaluation between steps was late, both ends were 100 %."""
    history = History([{"kind": "attempt", "total_steps": 60}])
    for name, step, accuracy, chunks in (("before", 0, 0.375, 0), ("before", 0, 0.1, 8), ("heldout", 20, 1.0, 0)):
        history.add({"kind": "eval", "name": name, "global_step": step, "accuracy": accuracy, "chunks": chunks})
    history.add({"kind": "step", "global_step": 20, "stats": {}})
    assert "held-out     step 0 37.5% → step 20 100.0%" in live_lines(history, 0.0)
    for step in (30, 40, 50):
        history.add({"kind": "eval", "name": "heldout", "global_step": step, "accuracy": step / 100})
    assert "held-out     step 0 37.5% → step 30 30.0% → step 40 40.0% → step 50 50.0%" in live_lines(history, 0.0)


def test_the_live_display_shows_reward_speed_time_and_checkpoint(tmp_path: Path) -> None:
    history = History()
    assert "loading" in live_lines(history, 0.0)[0]
    writer = RunWriter(tmp_path).attempt().steps(1, 8).recover(8)
    for record in MetricsTail(writer.run.metrics).read():
        history.add(record)

    text = drawn(history, 100)
    for part in ("tiny-recall/run1", "step 8/30", "ETA 1 min 28 s", "▁▂▃▄▅▆▇█", "rollout 75%", "after step 8"):
        assert part in text


def test_the_closing_table_compares_before_and_after(tmp_path: Path) -> None:
    summary = read_summary(RunWriter(tmp_path).summary().run)
    assert summary is not None

    lines = [" ".join(line.split()) for line in summary_lines(summary)]

    assert lines[:5] == [
        "held-out accuracy (128 tasks, greedy) before after",
        "as trained, 2 to 4 chunks 34.0% 98.0%",
        "64 chunks (16 x the longest trained) 14.0% 97.0%",
        "64 chunks (16 x the longest trained), memory blanked 0.0% 0.17%",
        "a blind guess 0.17% 0.17%",
    ]
    assert "time 3 min 20 s: rollout 45%, warmup 40%, train 15%" in lines
    assert "checkpoint actor/epoch1epochstep30globalstep30" in lines


def test_a_task_without_lengths_shows_its_other_metrics(tmp_path: Path) -> None:
    row = {"chunks": 0, "blank_memory": False, "before": 0.1, "after": 0.2}
    row |= {"metrics_before": {"f1": 0.15}, "metrics_after": {"f1": 0.25}}
    summary = read_summary(RunWriter(tmp_path).summary(table=[row], chance=None, trained_chunks=[]).run)
    assert summary is not None

    lines = [" ".join(line.split()) for line in summary_lines(summary)]

    assert lines[1:3] == ["as trained 10.0% 20.0%", "f1 of marked answers 15.0% 25.0%"]
    assert not any("blind" in line for line in lines)


def test_rows_at_numbers_of_documents_have_their_intervals(tmp_path: Path) -> None:
    rows = [
        {"chunks": 0, "documents": documents, "blank_memory": blank, "before": 0.1, "after": 0.2}
        | {"interval_before": None, "interval_after": [0.155, 0.25]}
        for documents, blank in ((0, False), (16, False), (0, True))
    ]
    metrics = {"metrics_before": {"f1": 0.15}, "metrics_after": {"f1": 0.25}}
    read = [(0, "rag"), (16, "rag"), (0, "gold"), (0, "long_context"), (0, "of a newer version")]
    rows += [{**rows[1], "documents": documents, "method": method, **metrics} for documents, method in read]
    told = {"global_step": 600, "heldout_loss": {"before": 2.0, "after": 0.5}}
    facts = {"table": rows, "chance": None, "trained_chunks": [], "trained_documents": 8, "supervised": told}
    summary = read_summary(RunWriter(tmp_path).summary(**facts).run)
    assert summary is not None

    lines = [" ".join(line.split()) for line in summary_lines(summary)]

    assert lines[1:4] == [
        "as trained, 8 documents 10.0% 20.0% (15.5 … 25.0)",
        "16 documents 10.0% 20.0% (15.5 … 25.0)",
        "as trained, 8 documents, memory blanked 10.0% 20.0% (15.5 … 25.0)",
    ]
    assert [line.partition(" 10.0%")[0] for line in lines[4:9]] == [
        "8 documents, BM25's top 2",
        "16 documents, BM25's top 2",
        "8 documents, gold documents alone",
        "8 documents, all at once, cut to the window",
        "8 documents, of a newer version",
    ]
    assert "start 600 supervised steps, held-out loss 2.000 → 0.500" in lines


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_summary_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    writer = RunWriter(tmp_path)
    writer.run.summary.write_text(content)

    assert read_summary(writer.run) is None
    assert summary_lines({})[0].startswith("held-out accuracy")
