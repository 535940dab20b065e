"""The history of a run as its readers tell it, whatever happened to the file."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_writer import RunWriter

from clusterkit.backends.base import Log
from clusterkit.cli.actions import logs
from clusterkit.observe.report.page import content as page_of
from clusterkit.observe.report.source import RunReader
from clusterkit.runs.directory import hold_lock
from clusterkit.runs.log.metrics import History, MetricsTail, read_history
from clusterkit.runs.status import observe
from clusterkit.ui.run_status import status_lines


def _line(kind: str, **fields: object) -> bytes:
    return json.dumps({"kind": kind, "time": 1.0, "attempt": 1, **fields}).encode() + b"\n"


def test_going_back_to_a_recover_checkpoint_forgets_the_steps_after_it(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 9).record("eval", global_step=8, accuracy=0.5)
    writer.record("save", global_step=7, path="p", bytes=1)
    writer.attempt(resume_step=5).steps(6, 7)

    history = read_history(writer.run.metrics)

    assert [step["global_step"] for step in history.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step["attempt"] for step in history.steps] == [1, 1, 1, 1, 1, 2, 2]
    assert history.evals == []
    assert history.saves == []


def test_a_new_attempt_takes_back_the_end_of_the_one_before(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3).finish("interrupted", 3).attempt(resume_step=3)

    assert read_history(writer.run.metrics).finish is None


def test_a_missing_file_is_an_empty_history(tmp_path: Path) -> None:
    history = read_history(tmp_path / "metrics.jsonl")

    assert (history.global_step, history.total_steps, history.step_time(), history.eta()) == (0, 0, None, None)


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = _line("step", global_step=1)
    path.write_bytes(line[:20])
    tail = MetricsTail(path)

    assert tail.read() == []
    with path.open("ab") as file:
        file.write(line[20:])
    assert [record["global_step"] for record in tail.read()] == [1]
    assert tail.damaged == 0


def test_a_log_that_is_cut_short_while_it_is_followed_goes_on_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As logrotate does with copytruncate."""
    path, shown = tmp_path / "main.log", []
    path.write_text("the first line\n")
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.01)

    def write(data: bytes) -> None:
        shown.append(data)
        if len(shown) == 2:
            raise KeyboardInterrupt
        path.write_text("new\n")

    log = Log(path, lambda: path.stat().st_size, lambda offset, most: path.read_bytes()[offset : offset + most])
    with pytest.raises(KeyboardInterrupt):
        logs._show(log, 5, True, write)
    assert shown == [b"the first line\n", b"new\n"]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_file_that_was_cut_short_is_read_on_from_its_end(left: int, tmp_path: Path) -> None:
    """As the trainer takes back a record that finds no room on the disk; 0: another file has its place."""
    path, lines = tmp_path / "metrics.jsonl", [_line("step", global_step=number) for number in (1, 2, 3)]
    path.write_bytes(lines[0] + lines[1] + lines[2][:20])
    tail = MetricsTail(path)
    assert len(tail.read()) == 2
    path.write_bytes(lines[0] + lines[1] + lines[2][:left] if left else b"")
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(lines[2][left:])
    assert [record["global_step"] for record in tail.read()] == [3]
    assert tail.damaged == 0


def test_a_record_written_on_to_half_a_line_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    torn = _line("step", global_step=2, timings={"rollout": 1.0})[:60]
    path.write_bytes(_line("step", global_step=1) + torn + _line("attempt", resume_step=1, total_steps=9))

    tail = MetricsTail(path)

    assert [record["kind"] for record in tail.read()] == ["step", "attempt"]
    assert tail.damaged == 1


@pytest.mark.parametrize("rubbish", [b"\x00\xff\xfe", b"[1, 2]", b'"text"', b"{}", b'{"kind": 3}', b"null"])
def test_rubbish_between_records_is_passed_over(tmp_path: Path, rubbish: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(_line("step", global_step=1) + rubbish + b"\n" + _line("step", global_step=2))

    assert [record["global_step"] for record in MetricsTail(path).read()] == [1, 2]


@given(cuts=st.lists(st.integers(min_value=0, max_value=400), max_size=8))
def test_records_are_the_same_however_the_file_grows(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    data = b"".join(_line("step", global_step=step, note="ä → z") for step in range(6))
    tail, seen, written = MetricsTail(path), [], 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        with path.open("ab") as file:
            file.write(data[written:cut])
        written = cut
        seen += tail.read()

    assert [record["global_step"] for record in seen] == list(range(6))
    assert tail.damaged == 0


def test_numbers_of_the_wrong_type_do_not_stop_the_reader() -> None:
    history = History()
    history.add({"kind": "attempt", "resume_step": None, "total_steps": "many"})
    history.add({"kind": "step", "global_step": 1, "step_time_s": "slow", "stats": None, "timings": {"rollout": "?"}})
    history.add({"kind": "from a later version"})

    assert (history.global_step, history.step_time(), history.eta()) == (1, None, None)
    assert history.stat("task_reward") == []
    assert history.time_split() == {}


def test_eta_is_the_median_of_recent_steps_over_attempts(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 40, seconds=100.0, total_steps=70)
    writer.attempt(resume_step=40, total_steps=70).steps(41, 55, seconds=2.0, total_steps=70)
    writer.steps(56, 56, seconds=500.0, total_steps=70)  # one slow step is no trend

    history = read_history(writer.run.metrics)

    assert history.step_time() == 2.0
    assert history.eta() == 2.0 * (70 - 56)


def test_time_split_sums_over_the_steps(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 4, seconds=8.0)

    assert read_history(writer.run.metrics).time_split() == {"rollout": 24.0, "train": 8.0}


def test_a_warmup_before_the_attempt_record_is_of_that_attempt_and_ends_with_it(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.number = 1
    writer.record("warmup", phase="sft", step=3, steps=9).finish("interrupted", 0)
    writer.number = 2
    writer.record("warmup", phase="sft", step=4, steps=9)

    warming = read_history(writer.run.metrics)
    assert warming.finish is None
    assert warming.warmup is not None
    assert warming.warmup["step"] == 4

    writer.record("attempt", resume_step=0, total_steps=30)
    assert read_history(writer.run.metrics).warmup is None


def _odd_steps() -> list[bytes]:
    """Steps as no trainer writes them; the last line is a good one."""
    whole = {"global_step": 2, "total_steps": 9, "step_time_s": 1.5, "stats": {"task_reward": 0.5}}
    odd: list[dict[str, object]] = [
        {"global_step": float("nan")},
        {"global_step": float("inf"), "total_steps": float("nan")},
        {"global_step": [1], "time": [2], "step_time_s": {}},
        {"timings": [1, 2], "stats": [3]},
        {"timings": {"rollout": float("nan"), "train": "long"}, "stats": {"task_reward": 10**400}},
        {"timings": 7, "stats": None, "epoch": float("nan")},
        {"time": 1e300, "step_time_s": float("inf"), "attempt": float("nan")},
        {"time": -5.0, "attempt": "one"},
    ]
    junk = [
        b"\x00\xff\xfe binary\n",
        b"[]\n",
        b"NaN\n",
        b'{"kind": ["step"]}\n',
        b'{"kind": "attempt", "resume_step": NaN}\n',
    ]
    return [*junk, *(_line("step", **fields) for fields in odd), _line("step", **whole)]


def test_numbers_that_are_none_and_binary_junk_stop_no_reader(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.run.metrics.write_bytes(b"".join(_odd_steps()))

    status = observe(writer.run, 100.0)
    facts = status.as_dict()

    assert (facts["progress"]["global_step"], facts["progress"]["total_steps"]) == (2, 9)
    assert facts["progress"]["step_time_s"] == 1.5
    assert facts["history"]["task_reward"] == [0.5]
    assert all(value == value for value in facts["time_split"].values())
    assert status_lines(status)
    assert RunReader(writer.run).read().damaged > 0
    assert page_of([RunReader(writer.run).read()], 100.0)


def test_times_of_a_clock_that_was_put_back_give_no_negative_ages(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3).recover(3)
    with hold_lock(writer.run.logs / "run.lock"):
        status = observe(writer.run, writer.clock - 3600)
        facts = status.as_dict()
        text = "\n".join(status_lines(status))

    assert (facts["seconds_since_last_record"], facts["recover"]["age_s"]) == (0.0, 0.0)
    assert facts["progress"]["eta_s"] >= 0
    assert "-" not in text.replace("tiny-recall", "").replace(str(tmp_path), "")


def test_names_of_fields_are_in_memory_once(tmp_path: Path) -> None:
    first, second = read_history(RunWriter(tmp_path).attempt().steps(1, 2).run.metrics).steps
    for one, other in ((first, second), (first["stats"], second["stats"])):
        assert all(a is b for a, b in zip(one, other, strict=True))


class StaleFile(io.BytesIO):
    """A file of a network disk that does not answer beyond a place."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() >= 1500:
            raise OSError(errno.ESTALE, "stale")
        return super().read(size)


def test_a_file_is_read_piece_by_piece_up_to_where_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterkit.runs.log.metrics.PIECE_BYTES", 100)
    path = RunWriter(tmp_path).attempt().steps(1, 5).run.metrics
    data, tail = path.read_bytes(), MetricsTail(path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: StaleFile(data))
        before = tail.read()
        with pytest.raises(OSError, match="stale"):
            tail.read()

    assert 0 < len(before) < 6
    assert [*before, *tail.read()] == MetricsTail(path).read()
