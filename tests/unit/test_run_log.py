"""What the trainer says: lines that scripts written for AReaL v0.2 understand, and a metrics file that stays whole."""

from __future__ import annotations

import ast
import json
import logging
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import learner, small_config, small_parts

from clusterkit.backends.local.train import prepared
from clusterkit.config.resolve import resolve
from clusterkit.runs.status import observe
from clusterkit.runs.trials import run_directory
from trainer.evaluate import time_split
from trainer.metrics import Monitor, epoch_line, make_sinks, open_log, stats_line
from trainer.rollout.batch import make_batch

# Lines of AReaL's own log, with the numbers of two of them shortened.
AREAL_EPOCH = (
    "20250222-12:27:25.084 master worker INFO: Epoch 1/1 step 3/19 (global step 3) finishes. Average #tokens per batch "
    "is 111847. #End to end# execution time: *2122.318*s. Total time consumption: 6811.949s. Estimated remaining time: "
    "33957.093s. "
)
AREAL_STATS = (
    "20250222-11:11:56.991 master worker INFO: RPC name actor_train returns {'ppo_approx_kl': -2.26e-05, 'actor_loss': "
    "1.11e-06, 'actor_clip_ratio': 2.11e-07, 'importance_weight': 1.0000014305114746, 'task_reward': -0.2996826171875, "
    "'kl_reward': -2.27e-07, 'final_reward': -0.3014, 'advantage': 0.0035, 'avg_seq_len': 7907.8955078125, "
    "'avg_prompt_len': 105.845703125, 'n_tokens': 127828786.0, 'n_valid_tokens': 127828786.0, 'n_seqs': 16384.0, "
    "'no_eos_ratio': 0.122802734375, 'disable_value': 1.0, 'mask_no_eos_with_zero': 0.0}"
)
AREAL_RECOVER = "20250222-11:52:02.760 master worker INFO: Dumped recover info to file."

STAMP = r"\d{8}-\d\d:\d\d:\d\d\.\d{3} master worker INFO: "
EPOCH = re.compile(
    STAMP + r"Epoch (?P<epoch>\d+)/(?P<epochs>\d+) step (?P<epoch_step>\d+)/(?P<steps_per_epoch>\d+) "
    r"\(global step (?P<global_step>\d+)\) finishes\. Average #tokens per batch is (?P<tokens>\d+)\. "
    r"#End to end# execution time: \*(?P<seconds>\d+\.\d{3})\*s\. Total time consumption: (?P<total>\d+\.\d{3})s\. "
    r"(?:Estimated remaining time: (?P<remaining>\d+\.\d{3})s\. ?)?$"
)
STATS = re.compile(STAMP + r"RPC name actor_train returns (?P<stats>\{.*\})$")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The trainer's log in a file of its own; the logger is put back as it was."""
    logger = logging.getLogger("trainer")
    before = logger.handlers[:], logger.level, logger.propagate
    open_log(tmp_path / "main.log")
    yield tmp_path / "main.log"
    logger.handlers[:], logger.level, logger.propagate = before


def records(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines if line]


POSITION = {"epoch": 2, "epochs": 3, "epoch_step": 4, "steps_per_epoch": 19, "global_step": 23, "total_steps": 57}


def test_a_finished_step_is_told_in_areals_words(log: Path, tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, attempt=1)
    monitor.info(epoch_line(POSITION, 1234, 5.6789, 100.0, 60.25))
    monitor.info(epoch_line(POSITION, 1234, 5.6789, 100.0, None))
    monitor.info("Dumped recover info to file.")

    theirs, (with_rest, without, recover) = EPOCH.match(AREAL_EPOCH), log.read_text().splitlines()
    ours = EPOCH.match(with_rest)
    assert theirs is not None
    assert theirs["remaining"] == "33957.093"
    assert ours is not None
    assert ours.groupdict() == {
        **{name: str(value) for name, value in POSITION.items() if name != "total_steps"},
        "tokens": "1234",
        "seconds": "5.679",
        "total": "100.000",
        "remaining": "60.250",
    }
    unknown = EPOCH.match(without)
    assert unknown is not None
    assert unknown["remaining"] is None
    assert re.sub(r"^\S+", "", recover) == re.sub(r"^\S+", "", AREAL_RECOVER)


def test_statistics_have_areals_form_and_all_of_its_names(log: Path, tmp_path: Path) -> None:
    parts = small_parts()
    batch = make_batch(parts.rollouts(), parts.config, step=1)
    ours = batch.stats | learner(parts.lm, parts.config).step(batch.minibatches[0]).values
    Monitor(tmp_path, attempt=1).info(stats_line(ours))

    found, theirs = STATS.match(log.read_text().rstrip("\n")), STATS.match(AREAL_STATS)
    assert found is not None
    assert theirs is not None
    assert ast.literal_eval(found["stats"]) == ours
    assert ast.literal_eval(theirs["stats"]).keys() <= ours.keys()
    assert all(isinstance(value, float) for value in ours.values())


def test_records_are_appended_with_kind_time_and_attempt(tmp_path: Path) -> None:
    for attempt in (1, 2):
        monitor = Monitor(tmp_path, attempt)
        monitor.record("step", global_step=attempt)
        monitor.close()

    found = records(tmp_path)
    assert [(r["kind"], r["attempt"], r["global_step"]) for r in found] == [("step", 1, 1), ("step", 2, 2)]
    assert all(r["time"] > 1e9 for r in found)


def test_a_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, attempt=1)
    monitor.record("step", global_step=1)

    assert len(records(tmp_path)) == 1


def test_half_a_line_of_a_killed_writer_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step"}\n{"kind": "st')

    Monitor(tmp_path, attempt=2).record("step", global_step=7)

    first, torn, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert (first, torn) == ('{"kind": "step"}', '{"kind": "st')
    assert json.loads(last)["global_step"] == 7


def test_an_interruption_is_recorded_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    config = resolve("tiny", None, [f"fileroot={tmp_path}"]).config
    run = run_directory(config, "run1")
    run.logs.mkdir(parents=True)
    run.metrics.write_text('{"kind": "step", "glo')

    with pytest.raises(KeyboardInterrupt), prepared(run, config):
        raise KeyboardInterrupt

    torn, record = run.metrics.read_text().splitlines()
    assert torn == '{"kind": "step", "glo'
    assert json.loads(record)["status"] == "interrupted"
    assert observe(run, time.time()).state == "interrupted"


def test_a_whole_file_gets_no_empty_line(tmp_path: Path) -> None:
    Monitor(tmp_path, attempt=1).record("step")
    Monitor(tmp_path, attempt=2).record("step")

    assert "\n\n" not in (tmp_path / "metrics.jsonl").read_text()


def test_numbers_that_json_does_not_know_are_words(tmp_path: Path) -> None:
    values = {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}, "e": (math.nan,), "f": 2}
    Monitor(tmp_path, attempt=1).record("step", stats=values)

    assert records(tmp_path)[0]["stats"] == {"a": "nan", "b": ["inf", 1.5], "c": {"d": "-inf"}, "e": ["nan"], "f": 2}


def test_a_warning_is_in_both_files(log: Path, tmp_path: Path) -> None:
    Monitor(tmp_path, attempt=1).warn("the disk is slow")

    assert "master worker WARNING: the disk is slow" in log.read_text()
    assert [(r["kind"], r["message"]) for r in records(tmp_path)] == [("warning", "the disk is slow")]


def test_other_ranks_are_mute(log: Path, tmp_path: Path) -> None:
    monitor = Monitor(None, attempt=1)
    monitor.record("step")
    monitor.info("something")
    monitor.warn("something")
    monitor.close()

    assert log.read_text() == ""
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sinks = make_sinks(small_config(), tmp_path)
    monitor = Monitor(tmp_path, attempt=1, sinks=sinks)
    monitor.scalars({"task_reward": 0.25}, step=3)
    monitor.close()

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("task_reward")] == [(3, 0.25)]
    assert make_sinks(small_config("monitor.tensorboard=false"), tmp_path) == []


def test_seconds_are_added_up_whatever_the_disk_did_to_some_records(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, 1)
    monitor.record("step", timings={"rollout": 2.0, "train": 1.0})
    monitor.record("eval", name="before", seconds=4.0)
    monitor.close()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    damaged = b'{"kind": "step", "timi\xff\x00\xfe\n7\n{"kind": "step"}\n\x00\x00\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole + damaged + whole)

    assert time_split(tmp_path) == {"rollout": 4.0, "train": 2.0, "eval": 8.0}
