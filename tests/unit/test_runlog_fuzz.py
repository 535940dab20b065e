"""Every parser of text that others write: it never fails, and what it says does not hang on how the text was cut."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from areal_lines import grid, lite, lite_step, master, through_ray, v2_stats, v2_step, v2_steps, v3_step
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterkit.provision.ray.state import status_counts
from clusterkit.runs.log.lines import plain, stamp
from clusterkit.runs.log.scan import LogScanner
from clusterkit.runs.log.text import log_lines
from clusterkit.runs.log.view import LogView

RAY_STATUS = (Path(__file__).parents[1] / "cases" / "raycluster" / "ray_status_16_nodes.txt").read_text()
VALUES = {"ppo_actor/task_reward/avg": 0.5, "timeperf/rollout": 3.0, "lr": float("nan")}

TRUE_LINES = [
    v2_step(3, 300.0),
    v2_step(2, 290.0),
    v2_stats(299.0, task_reward=0.5, actor_loss=float("nan")),
    v3_step(7, 700.0),
    master("RPC name actor_train returns (1/2)\n" + grid(VALUES), 600.0),
    lite_step(9, 900.0, VALUES),
    lite("Saved recover checkpoint to /s/recover_checkpoint (with_optim=True)", 890.0),
    lite("Recovering from StepInfo(epoch=0, epoch_step=2, global_step=2, steps_per_epoch=50).", 950.0),
    master("Dumped recover info to file.", 300.1),
    master("Will recover from: StepInfo(epoch=0, epoch_step=3, global_step=3)", 300.2),
    master("Recovering from previous run. Epoch: 1, Epoch Step: 3 Global Step: 3.", 400.0),
    master("Recovering from error E after 10 seconds. Recover count: 1, total recover count 10", 401.0, "WARNING"),
    master("Training will start from: epoch 1 epoch step 3 global step 3.", 402.0),
    master("Invalid recover checkpoint when recover_mode='auto'.", 402.0, "WARNING"),
    master("Model actor saved at /x/epoch1epochstep3globalstep3. Time consumption: 1.5 s.", 302.0),
    master("Model rpc actor_gen finished. Run time 12.5s.", 300.0),
    master("Evaluation heldout (training lengths): accuracy 0.5 on 4 tasks.", 303.0),
    master("interrupted after step 3: it is written", 304.0),
    master("Experiment Completes! Yeah!!!!!!!!", 305.0),
    master("out of memory", 305.0, "ERROR"),
    through_ray(v2_step(4, 410.0)),
    "│ a │ 1.0 │\n",
    "╘═══╛\n",
]

fragments = st.one_of(
    st.sampled_from(TRUE_LINES).map(str.encode),
    st.sampled_from(TRUE_LINES).flatmap(lambda line: st.integers(0, len(line)).map(lambda n: line[:n].encode())),
    st.binary(max_size=40),
    st.sampled_from(
        [b"\n", b"\r", b"\x1b[", b"INFO: ", b"INFO: Epoch ", b"INFO: Stats (1/1):\n", b"{", b"}", b"20259999-"]
    ),
)
logs = st.lists(fragments, max_size=25).map(b"".join)


def scanned(*blocks: bytes) -> LogScanner:
    scanner = LogScanner()
    for block in blocks:
        scanner.feed(block)
    return scanner


def told(scanner: LogScanner) -> str:
    """Everything that a scanner knows; as text, since NaN is not itself."""
    return json.dumps([scanner.state(), scanner.history.steps], sort_keys=True)


@settings(deadline=None)
@given(log=logs)
def test_any_log_can_be_shown(log: bytes) -> None:
    scanner = scanned(log)
    view = LogView(Path("main.log"), scanner.history, len(log), 1.7e9, len(log), 1.7e9)

    assert log_lines(view)
    json.dumps(view.as_dict())
    steps = [step["global_step"] for step in scanner.history.steps]
    assert steps == sorted(set(steps))


@settings(deadline=None)
@given(log=logs, cuts=st.lists(st.integers(0, 2000), max_size=6))
def test_where_a_log_is_cut_into_blocks_does_not_matter(log: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(log), *(cut for cut in cuts if cut < len(log))})
    blocks = [log[start:end] for start, end in itertools.pairwise(places)]

    assert told(scanned(*blocks)) == told(scanned(log))


@settings(deadline=None)
@given(before=logs, after=logs)
def test_what_is_remembered_goes_on_as_if_nothing_had_happened(before: bytes, after: bytes) -> None:
    kept = scanned(before)
    waiting = kept.forget_waiting()
    again = LogScanner.restored(json.loads(json.dumps(kept.state())))
    again.feed(before[len(before) - waiting :] + after)

    assert told(again) == told(scanned(before + after))


@settings(deadline=None)
@given(line=st.binary(max_size=400))
def test_lines_and_stamps_of_any_bytes(line: bytes) -> None:
    text = plain(line)
    assert stamp(text) is None or isinstance(stamp(text), float)


_status_lines = st.lists(st.sampled_from(RAY_STATUS.splitlines()) | st.text(max_size=30), max_size=30)


@settings(deadline=None)
@given(
    lines=_status_lines,
    usage=st.from_regex(r"[\d.]{0,30}[A-Za-z]{0,4}/[\d.]{0,30}[A-Za-z]{0,4} \S{1,9}", fullmatch=True),
)
def test_text_of_ray_status(lines: list[str], usage: str) -> None:
    status_counts("\n".join(["Node status", *lines, "Usage:", f" {usage}", *lines]))


HOSTILE = {
    "one message after another": "INFO: " * 350_000,
    "heads of statistics": "INFO: RPC name actor_train returns {" * 58_000,
    "open names": "INFO: RPC name actor_train returns {" + "'" * 2_000_000 + "}",
    "names without values": "INFO: RPC name actor_train returns {" + "'a': " * 400_000 + "}",
    "half steps": "INFO: Epoch 1/1 step 1/1 (global step 1) " * 50_000,
    "restarts": "WARNING: Recovering from error " + " after 1 seconds" * 130_000,
    "colours": "\x1b[0" * 700_000 + "INFO: Epoch 1",
    "paths": "INFO: Model a saved at " + "x" * 2_000_000,
    "digits": "INFO: Epoch " + "1" * 2_000_000,
    "cells": "INFO: Stats (1/1):\n" + "│ a │ 1 " * 200_000,
    "rows": "INFO: Stats (1/1):\n" + "│ a │ 1 │\n" * 150_000,
    "heads of tables": "INFO: Stats (1/1):\n" * 100_000,
    "parts": "".join(f"INFO: Stats ({n}/99999):\n│ a{n} │ 1 │\n╘\n" for n in range(2, 40_000)),
    "stamps": "20250222-11:11:56.997 " * 90_000 + "INFO: Epoch 1/1",
    "one line without an end": "x" * 20_000_000,
    "attempts": "".join(v2_step(1 + n % 2, n) for n in range(20_000)),
    "dumps": master("Dumped recover info to file.", 1.0) * 40_000,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HOSTILE)
def test_no_log_takes_more_than_seconds(name: str) -> None:
    """Each is megabytes long: whatever grew with the square of that would take hours."""
    data = (v2_steps(1, 1) + HOSTILE[name] + "\n" + v2_steps(2, 2)).encode()
    scanner = scanned(*(data[start : start + (1 << 18)] for start in range(0, len(data), 1 << 18)))

    assert scanner.history.global_step in (1, 2)
