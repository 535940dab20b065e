"""What `clusterkit status` says about a run in each of its states."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_writer import RunWriter

from clusterkit.backends.base import Place, RunSelector
from clusterkit.backends.table import open_backend
from clusterkit.runs.directory import hold_lock
from clusterkit.runs.status import Status, find_run, observe
from clusterkit.ui.run_status import engine_text, status_lines
from trainer.errors import RunError


def _text(status: Status) -> str:
    return "\n".join(status_lines(status))


@pytest.mark.parametrize(
    ("finish", "state"), [("completed", "finished"), ("interrupted", "interrupted"), ("failed", "failed")]
)
def test_a_run_that_ended_says_how(tmp_path: Path, finish: str, state: str) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3).finish(finish, 3, "because")

    status = observe(writer.run, writer.clock + 5)

    assert (status.state, status.message) == (state, "because")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("cut in a line", "it is not YAML, or cut off"),
        ("cut between lines", "it is cut off: there is no monitor in it"),
        ("empty", "it holds no settings"),
        ("no YAML", "it is not YAML, or cut off"),
        ("no text", "it is not YAML, or cut off"),
        ("folder", "it is a folder"),
        ("loop", "Too many levels of symbolic links"),  # as where it may not be read, which root always may
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_damaged_configuration_is_told_with_what_to_do(tmp_path: Path, damage: str, reason: str, begun: bool) -> None:
    writer = RunWriter(tmp_path).config()
    config = writer.run.config
    whole = config.read_text()
    config.unlink()
    if damage == "folder":
        config.mkdir()
    elif damage == "loop":
        config.symlink_to(config)
    else:
        line = whole.index("monitor:") if damage == "cut between lines" else whole.index("max_tokens_per_mb") + 5
        contents = {"empty": b"", "no YAML": b"{[", "no text": b"\xff\xfe\xfd"}
        config.write_bytes(contents.get(damage, whole[:line].encode()))
    if begun:
        writer.attempt().steps(1, 3).finish("interrupted", 3)
    status = observe(writer.run, writer.clock)

    told = f"{config} is damaged ({reason}): move it away, and the same train command writes it anew"
    if damage == "loop":
        told = f"{config} cannot be read ({reason}): make it readable"
    assert status.state == ("interrupted" if begun else "unreadable")
    assert (f"config       {told}" if begun else f"state        unreadable: {told}") in _text(status)
    assert _text(status).count(told) == 1


def test_a_config_that_is_not_the_trainers_is_not_called_damaged(tmp_path: Path) -> None:
    run = RunWriter(tmp_path).config().run
    run.config.write_text("experiment_name: e\ntrial_name: t\nseed: 1\nactor:\n  path: x\n")  # AReaL's begins so

    assert not run.config_problem()
    assert run.saved_values()["seed"] == 1


@pytest.mark.parametrize("message", ["interrupted: the last one is kept", "interrupted after step 3", "by force"])
def test_a_state_is_not_told_twice(tmp_path: Path, message: str) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3).finish("interrupted", 3, message)
    told = message.removeprefix("interrupted").lstrip(": ")

    assert f" interrupted: {told}" in _text(observe(writer.run, writer.clock + 5))


def test_a_run_without_a_last_word_was_killed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3)
    status = observe(writer.run, writer.clock + 5)

    assert status.state == "killed"
    assert str(writer.run.console(1)) in status.message


@pytest.mark.parametrize("stopping", [False, True])
def test_a_run_whose_trainer_was_killed_while_it_stopped_says_so_and_names_its_checkpoint(
    tmp_path: Path, stopping: bool
) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3).recover(2)
    writer.run.exit_mark(1).write_text(json.dumps({"code": -9, "restart_s": None, "stopping": stopping}))

    status = observe(writer.run, writer.clock + 5)

    assert (status.state, "was ended by SIGKILL" in status.message) == ("killed", True)
    told = " while it stopped; the last recover checkpoint is that after step 2;" in status.message
    assert told == stopping


def test_an_attempt_that_died_before_its_first_record_is_told_from_the_one_before(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3).finish("interrupted", 3)
    writer.run.console(2).parent.mkdir()
    writer.run.console(2).write_text("error: no module named torch\n")

    status = observe(writer.run, writer.clock + 5)

    assert (status.state, status.message) == ("failed", "no module named torch")
    assert status.as_dict()["attempts"] == 2


def test_a_run_whose_servers_load_is_not_stalled(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config()
    writer.number = 1
    writer.record("start", command="clusterkit train")
    with hold_lock(writer.run.logs / "run.lock"):
        assert observe(writer.run, writer.clock + 890).state == "running", "servers.start_seconds is 900"


def test_a_living_run_is_stalled_after_five_steps_of_silence_but_not_within_a_minute(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3, seconds=20.0)
    with hold_lock(writer.run.logs / "run.lock"):
        assert observe(writer.run, writer.clock + 99).state == "running"
        assert observe(writer.run, writer.clock + 101).state == "stalled"
    fast = RunWriter(tmp_path, trial="run2").attempt().steps(1, 3, seconds=0.1)
    with hold_lock(fast.run.logs / "run.lock"):
        assert observe(fast.run, fast.clock + 59).state == "running"
        assert observe(fast.run, fast.clock + 61).state == "stalled"


def test_a_run_is_running_between_the_command_and_the_trainers_own_lock(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config()
    with hold_lock(writer.run.logs / "launch.lock"):
        assert observe(writer.run, writer.clock).state == "running"
    assert observe(writer.run, writer.clock).state == "new"


def test_json_has_the_promised_shape(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 5).recover(4).record("warning", message="look").steps(6, 10)
    writer.record("save", global_step=10, path="actor/x", bytes=99, seconds=1.0)

    facts = json.loads(json.dumps(observe(writer.run, writer.clock + 7).as_dict()))

    assert (facts["experiment"], facts["trial"], facts["state"]) == ("tiny-recall", "run1", "killed")
    assert facts["progress"] == {
        "epoch": 1,
        "epochs": 1,
        "step": 10,
        "steps": 2048,
        "global_step": 10,
        "total_steps": 30,
        "eta_s": 80.0,
        "step_time_s": 4.0,
        "closing_evaluation_s": None,
        "tokens_per_s": 12345.0,
    }
    assert facts["stats"] == {"task_reward": 0.1}
    assert facts["history"]["task_reward"] == [step / 100 for step in range(1, 11)]
    assert facts["recover"]["global_step"] == 4
    assert facts["recover"]["bytes"] == 12_000_000
    assert facts["recover"]["count"] == 1
    assert facts["recover"]["age_s"] == pytest.approx(27.0)
    assert facts["save"]["global_step"] == 10
    assert facts["warnings"] == ["look"]
    assert facts["seconds_since_last_record"] == pytest.approx(7.0)
    assert facts["observed_at"].endswith("+00:00")


def test_the_eta_of_a_living_run_runs_down_while_a_step_runs(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 10)
    with hold_lock(writer.run.logs / "run.lock"):
        assert observe(writer.run, writer.clock + 3).eta == pytest.approx(77.0)
        assert observe(writer.run, writer.clock + 50).eta == pytest.approx(76.0)  # at most one step is under way


def test_the_eta_includes_the_closing_evaluation_by_what_it_took_before_the_first_step(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt(total_steps=12)

    def told() -> str:
        return next(line for line in _text(observe(writer.run, writer.clock)).splitlines() if line.startswith("step "))

    def measured(name: str, step: int, seconds: float, **line: object) -> None:
        writer.record("eval", name=name, global_step=step, seconds=seconds, **line)

    with hold_lock(writer.run.logs / "run.lock"):
        lines: list[dict[str, object]] = [{}, {"documents": 8, "method": ""}, {"blank_memory": True}, {"method": "rag"}]
        for seconds, line in zip((30.0, 15.0, 10.0, 5.0), lines, strict=True):
            measured("before", 0, seconds, **line)
        assert "ETA" not in told(), "the time of a step is unknown"
        writer.steps(1, 10, total_steps=12)
        measured("heldout", 10, 15.0, method="")
        assert told().endswith("ETA 1 min 08 s, closing evaluation included")
        status = observe(writer.run, writer.clock)
        assert status.as_dict()["progress"]["closing_evaluation_s"] == 60.0
        assert status.eta == 8.0, "steps alone"
        writer.steps(11, 12, total_steps=12)
        measured("after", 12, 25.0)
        assert told().endswith("ETA 30 s, closing evaluation included")
        for line in lines[1:]:
            measured("after", 12, 25.0, **line)
        assert "ETA" not in told()
        writer.attempt(resume_step=12, total_steps=14)  # of more steps, after which all is measured again
        assert told().endswith("ETA 1 min 08 s, closing evaluation included")


def test_text_shows_trend_speed_checkpoint_and_what_to_do(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 8).recover(8)

    text = _text(observe(writer.run, writer.clock + 65))

    for part in ("8/30", "0.080  ▁▂▃▄▅▆▇█", "4.0 s a step", "rollout 75%, train 25%", "after step 8, 1 min 05 s ago"):
        assert part in text
    assert "clusterkit train" in text


def test_warmup_is_shown_before_the_first_step_and_gone_after(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config("train.total_steps=12")
    writer.record("warmup", phase="sft", step=40, steps=150, loss=0.5, accuracy=0.25, tokens_per_s=40000)

    before = _text(observe(writer.run, writer.clock))
    writer.attempt(total_steps=12).steps(1, 1)

    assert "0/12" in before
    assert "sft step 40/150, loss 0.500, accuracy 25.0%" in before
    assert "sft" not in _text(observe(writer.run, writer.clock))


def test_a_supervised_start_is_shown_with_what_is_left_of_it_and_is_no_step(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config("train.total_steps=12")
    record = {"phase": "supervised", "step": 30, "steps": 600, "loss": 0.412, "tokens_per_s": 40000, "remaining_s": 190}
    writer.record("warmup", **record, recover_step=20)

    text = _text(observe(writer.run, writer.clock))

    assert "0/12" in text
    assert (
        "start        supervised start: step 30 of 600, loss 0.412, 40 k tokens/s, about 3 min 10 s left of it, "
        "recover checkpoint after step 20"
    ) in text


def test_what_a_run_goes_on_from_before_its_first_recover_checkpoint_is_told(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config("train.total_steps=12")
    _, start, done = writer.run.what_is_kept
    told = []

    for path, step in ((None, None), (start, 20), (done, None)):
        if path is not None:
            path.parent.mkdir(parents=True)
            path.touch()
        writer.record("warmup", phase="supervised", step=30, steps=600, recover_step=step)
        text = _text(observe(writer.run, writer.clock))
        told += [line for line in text.splitlines() if line.startswith("recover ")]
    writer.attempt(total_steps=12).steps(1, 2).recover(2)

    assert told == [
        "recover      none yet",
        "recover      that of its supervised start, after step 20",
        "recover      none of its own steps yet; its supervised start is done and kept",
    ]
    assert "recover      after step 2, " in _text(observe(writer.run, writer.clock))


def test_what_is_measured_before_the_first_step_and_after_the_last_one_is_told(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config("train.total_steps=12").attempt(total_steps=12, table_lines=3)
    measured = "start        measuring held-out tasks before step 1, {} lines of the table done"

    with hold_lock(writer.run.logs / "run.lock"):
        assert measured.format(0) in _text(observe(writer.run, writer.clock))
        writer.record("eval", name="before", global_step=0, accuracy=0.0, num_tasks=2)
        assert measured.format(1) in _text(observe(writer.run, writer.clock))
        writer.steps(1, 11)
        assert "measuring" not in _text(observe(writer.run, writer.clock))
        writer.steps(12, 12)
        closing = "closing      measuring held-out tasks, {} of 3 lines of the table done"
        assert closing.format(0) in _text(observe(writer.run, writer.clock))
        writer.record("eval", name="after", global_step=12, accuracy=0.5, num_tasks=2)
        assert closing.format(1) in _text(observe(writer.run, writer.clock))
        assert observe(writer.run, writer.clock + 1199).state == "running"
        assert observe(writer.run, writer.clock + 1201).state == "stalled"
    assert "measuring" not in _text(observe(writer.run, writer.clock))


def test_a_closing_evaluation_may_be_silent_for_as_long_as_the_one_before_tells(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config("train.total_steps=3").attempt(total_steps=3)

    with hold_lock(writer.run.logs / "run.lock"):
        for chunks, seconds in ((0, 100.0), (64, 900.0)):
            fields = {"chunks": chunks, "blank_memory": False, "seconds": seconds, "num_tasks": 2}
            writer.record("eval", name="before", global_step=0, accuracy=0.0, **fields)
        writer.steps(1, 3)
        assert observe(writer.run, writer.clock + 1990).state == "running"
        assert observe(writer.run, writer.clock + 2010).state == "stalled"


@pytest.mark.parametrize("content", ["", '{"kind": "st', "\x00\x00\n", "[]\n"])
def test_a_torn_or_empty_record_file_is_no_obstacle(tmp_path: Path, content: str) -> None:
    writer = RunWriter(tmp_path)
    writer.run.metrics.write_text(content)

    status = observe(writer.run, writer.clock)

    assert status.history.global_step == 0
    assert "state" in _text(status)


def test_the_run_that_was_started_last_is_found_whoever_wrote_last_and_one_can_be_named(tmp_path: Path) -> None:
    for age, trial in ((300, "run2"), (100, "run1"), (200, "run10")):
        writer = RunWriter(tmp_path, trial=trial).config().attempt()
        _set_age(writer.run.config, writer.clock - age)
        for path in (writer.run.metrics, writer.run.logs):
            _set_age(path, writer.clock + age)  # of runs side by side, now this one writes and now that

    assert find_run(tmp_path).trial == "run1"
    assert find_run(tmp_path, "tiny-recall", "run10").trial == "run10"


def test_no_runs_is_an_error_that_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no runs found under .*clusterkit train --preset tiny") as raised:
        find_run(tmp_path / "nothing")
    assert raised.value.exit_code == 1
    RunWriter(tmp_path)
    with pytest.raises(RunError, match="Name one of these: tiny-recall/run1"):
        find_run(tmp_path, "other")
    for number in range(6):
        RunWriter(tmp_path, trial=f"later{number}", experiment="e")
    for typed in ((None, "tiny-recall"), (None, "tiny-recal"), ("tiny-recal", "run1"), ("tiny-recal", None)):
        with pytest.raises(RunError, match=r"Name one of these: tiny-recall/run1 \(`clusterkit runs` shows all 7\)$"):
            find_run(tmp_path, *typed)
    with pytest.raises(RunError, match=r"Name one of these: e/later1, e/later2, e/later3, e/later4, e/later5 \("):
        find_run(tmp_path, "e", "zz")  # the experiment's own
    for number in range(6):
        RunWriter(tmp_path, trial=f"run{number}", experiment="tiny-recall2")
    with pytest.raises(RunError, match=r"Name one of these: tiny-recall/run1 \("):
        find_run(tmp_path, trial="tiny-recall")
    with pytest.raises(RunError, match=r"Name one of these: .*, tiny-recall2/run3 \("):
        find_run(tmp_path, "tiny-recal2", "run3")
    with pytest.raises(RunError, match=r"Name one of these: e/later1, e/later2, e/later3, e/later4, e/later5 \("):
        find_run(tmp_path, "e", "nothing-alike")


def _set_age(path: Path, when: float) -> None:
    os.utime(path, (when, when))


def test_numbers_of_gpus_and_servers_are_shown_where_there_are_any() -> None:
    numbers = {
        "mfu": 0.465,
        "mismatch_kl": 5e-4,
        "staleness_mean": 1.0,
        "weights_interruption_s": 0.1,
        "cached_share": 0.5,
        "rollout_tokens_per_s": 12345.6,
        "decode_roofline": 0.42,
    }
    shown = engine_text(numbers)
    assert shown == (
        "MFU 46.5%, engine-trainer KL 5.0e-04, 12,346 sampled tokens/s, 42% of the memory roofline, "
        "50% of prompts cached, 1.0 versions old, weights 0.10 s"
    )
    assert "50% of prompts cached (75% could be), " in engine_text({**numbers, "shareable_share": 0.75})
    assert engine_text({"mismatch_kl": 0.0, "task_reward": 1.0, "gpu_alloc_retries": 0.0}) == ""
    assert engine_text({"gpu_alloc_retries": 31.0}) == "short of GPU memory 31 times"
    judged = {"judge_share": 0.031, "judge_wait_s": 2.0, "score_seconds": 7.25}
    assert engine_text(judged) == "3.1% of the step waited for the judge, 7.2 s to score a trajectory"


def test_a_finished_run_shows_its_own_measure_not_the_last_line_of_its_table(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3)
    measured = {"name": "after", "global_step": 3, "num_tasks": 128}
    writer.record("eval", chunks=0, blank_memory=False, accuracy=0.75, **measured)
    writer.record("eval", chunks=64, blank_memory=False, accuracy=0.5, **measured)
    writer.record("eval", chunks=0, blank_memory=True, accuracy=0.0, **measured)
    writer.record("eval", chunks=0, method="gold", accuracy=0.9, **measured).finish("completed", 3, "")

    assert "held-out     75.0% of 128 tasks after step 3" in _text(observe(writer.run, writer.clock + 5))


def test_a_run_that_is_watched_is_read_on_not_anew(tmp_path: Path) -> None:
    """The records of a hundred thousand steps take seconds each time."""
    writer = RunWriter(tmp_path).attempt().steps(1, 3)
    with open_backend(Place(fileroot=str(tmp_path)), print) as backend:
        assert backend.status(RunSelector()).facts["progress"]["global_step"] == 3
        writer.run.metrics.write_bytes(b" " * writer.run.metrics.stat().st_size)
        writer.steps(4, 5)
        facts = backend.status(RunSelector()).facts
    assert facts["progress"]["global_step"] == 5
    assert facts["history"]["task_reward"] == [0.01, 0.02, 0.03, 0.04, 0.05]
