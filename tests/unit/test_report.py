"""The report: what is drawn and told of a run, that nothing in a run becomes markup, and what the command answers."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_writer import RunWriter

from clusterkit.observe import report
from clusterkit.observe.report.charts import numbers_of
from clusterkit.observe.report.page import content, document
from clusterkit.observe.report.series import MOST_POINTS, Numbers, Series, bucket_width
from clusterkit.observe.report.source import RunReader

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))


class Elements(HTMLParser):
    """Collects a page's elements, its text, and the JSON in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data: list[Any] = []
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = "json" if dict(attrs).get("type") == "application/json" else tag

    def handle_data(self, data: str) -> None:
        if self._open == "json":
            self.data.append(json.loads(data))
        elif self._open not in ("script", "style"):
            self.text += data
        self._open = ""

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.found)


def _page(*writers: RunWriter) -> str:
    return document("a run", content([RunReader(writer.run).read() for writer in writers], writers[0].clock))


def _series(name: str, writer: RunWriter) -> Series:
    return numbers_of([RunReader(writer.run).read()])[name][0]


def _data(*writers: RunWriter) -> dict[str, Any]:
    """What the page's script draws."""
    return next(data for data in Elements(_page(*writers)).data if isinstance(data, dict) and "charts" in data)


def _command(fileroot: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [CLUSTERKIT, "report", "--fileroot", str(fileroot), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=fileroot)


def _long(fileroot: Path, trial: str, steps: int) -> RunWriter:
    """A run of a large model over days, as long as they get."""
    writer = RunWriter(fileroot, trial=trial).config()
    names = [f"number_{index}" for index in range(28)] + ["task_reward", "final_reward", "avg_seq_len", "grad_norm"]
    with writer.run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            stats = {name: math.sin(step * (index + 1)) for index, name in enumerate(names)}
            record = {
                "kind": "step",
                "time": step,
                "attempt": 1,
                "global_step": step,
                "step_time_s": 60.0,
                "stats": stats,
            }
            timings = {"rollout": 40.0 + step % 7, "train": 15.0, "publish": 1.0, "other": 0.5}
            file.write(json.dumps({**record, "timings": timings, "tokens_per_s": 4e5 + step}) + "\n")
            recover = {
                "kind": "recover",
                "time": step,
                "attempt": 1,
                "global_step": step,
                "bytes": 1,
                "path": "x" * 100,
            }
            file.write(json.dumps(recover) + "\n")
    return writer


# What is drawn


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(-1e6, 1e6)), min_size=1, unique_by=lambda pair: pair[0]),
)
def test_thinning_keeps_every_extreme_and_accounts_for_every_step(values: list[tuple[int, float]]) -> None:
    steps = sorted(step for step, _ in values)
    numbers = Numbers(bucket_width(steps))
    for step, value in values:
        numbers.add("x", step, value)
    found = numbers.series()["x"]

    assert len(found.mean) <= MOST_POINTS + 1  # buckets begin at multiples of their width
    assert max(found.high) == max(value for _, value in values)
    assert min(found.low) == min(value for _, value in values)
    assert (found.first[0], found.last[-1]) == (steps[0], steps[-1])
    for low, mean, high in zip(found.low, found.mean, found.high, strict=True):
        assert low - 1e-6 <= mean <= high + 1e-6


def test_a_short_run_is_drawn_as_it_is(tmp_path: Path) -> None:
    line = _series("task_reward", RunWriter(tmp_path).attempt().steps(1, 30))

    assert line.first == line.last == tuple(range(1, 31))
    assert line.mean == tuple(step / 100 for step in range(1, 31))
    assert not line.thinned


def test_steps_that_were_undone_are_not_drawn(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 9).attempt(resume_step=6).steps(7, 8)

    assert _series("task_reward", writer).first == tuple(range(1, 9))


def test_values_that_are_no_finite_numbers_are_told(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 3)
    for step in (4, 5):
        writer.record("step", global_step=step, stats={"task_reward": "nan", "grad_norm": "inf"})

    text = Elements(_page(writer)).text

    assert "task_reward was no finite number at 2 steps, first at step 4." in text
    assert "grad_norm was no finite number at 2 steps, first at step 4." in text


def test_numbers_that_no_plot_is_made_for_are_drawn_all_the_same(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().record("step", global_step=1, stats={"device_memory_gb": 61.5})

    data = _data(writer)
    assert [chart["names"] for chart in data["charts"]] == [["device_memory_gb"]]
    assert data["numbers"]["device_memory_gb"][0]["mean"] == [61.5]


def test_the_page_of_two_long_runs_stays_below_two_megabytes(tmp_path: Path) -> None:
    writers = [_long(tmp_path, trial, 10_000) for trial in ("run1", "run2")]

    assert len(_page(*writers).encode()) < 2_000_000


def test_a_run_without_steps_and_one_without_records_have_a_page(tmp_path: Path) -> None:
    started = RunWriter(tmp_path, trial="run1")
    started.record("warmup", phase="sft", step=3, steps=9, loss=1.5)
    empty = RunWriter(tmp_path, trial="run2")

    assert "No training step has ended yet" in Elements(_page(started)).text
    assert "sft step 3/9, loss 1.500" in Elements(_page(started)).text
    assert "No training step has ended yet" in Elements(_page(empty)).text


@pytest.mark.parametrize("value", [None, [], "text", 7, {"task_reward": []}, {"task_reward": {}}])
def test_records_of_another_shape_cost_nothing_but_their_values(tmp_path: Path, value: Any) -> None:
    writer = RunWriter(tmp_path).attempt().record("step", global_step=1, stats=value).steps(2, 4)

    assert _series("task_reward", writer).first == (2, 3, 4)


def test_the_plots_of_a_page_have_every_number_once_and_the_numbers_of_tensorboard(tmp_path: Path) -> None:
    """`clusterkit` tells W&B, TensorBoard and the page the same names (trainer/metrics.py)."""
    writer = (
        RunWriter(tmp_path)
        .attempt()
        .record(
            "step",
            global_step=1,
            stats={"lr": 1e-5},
            timings={"train": 2.0},
            machine={"cpu_share": 0.5},
            tokens_per_s=9.0,
        )
    )
    writer.record("eval", global_step=1, name="heldout", accuracy=0.5, metrics={"f1": 0.25})

    data = _data(writer)

    assert set(data["numbers"]) == {
        "lr", "time/train", "machine/cpu_share", "tokens_per_s", "eval/accuracy", "eval/f1"
    }  # fmt: skip
    drawn = [name for chart in data["charts"] for name in chart["names"]]
    assert sorted(drawn) == sorted(data["numbers"])


def test_a_part_of_a_step_that_some_steps_lack_took_no_time_there(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt()
    for step, timings in ((1, {"train": 2.0, "eval": 1.0}), (2, {"train": 2.0}), (3, {"train": 2.0, "eval": 3.0})):
        writer.record("step", global_step=step, timings=timings)

    assert _series("time/eval", writer).mean == (1.0, 0.0, 3.0)


def test_numbers_of_a_growing_run_are_those_of_one_that_is_read_at_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 900)
    reader = RunReader(writer.run)
    numbers_of([reader.read()])
    writer.steps(901, 1500)  # from here on two steps make a point
    numbers_of([reader.read()])
    writer.attempt(resume_step=1200).steps(1201, 1210)  # and steps are undone

    grown = numbers_of([reader.read()])
    assert grown == numbers_of([RunReader(writer.run).read()])
    assert grown["task_reward"][0].last[-1] == 1210


# What is told


def test_restarts_say_why_and_what_they_cost(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 9).finish("failed", 9, "NCCL time-out on rank 3")
    writer.attempt(resume_step=6).steps(7, 8)
    writer.run.console(2).write_text("Traceback …\nerror: CUDA out of memory\n")
    writer.attempt(resume_step=8).steps(9, 9).attempt(resume_step=9)

    found = RunReader(writer.run).read().restarts

    assert [(one.attempt, one.resume_step, one.lost_steps) for one in found] == [(2, 6, 3), (3, 8, 0), (4, 9, 0)]
    assert [one.reason for one in found[:2]] == ["NCCL time-out on rank 3", "CUDA out of memory"]
    assert "without a message" in found[2].reason
    assert "3; 3 steps made again" in Elements(_page(writer)).text


def test_two_runs_are_told_apart_by_their_settings(tmp_path: Path) -> None:
    one = RunWriter(tmp_path, trial="run1").config("seed=1").attempt().steps(1, 3)
    other = RunWriter(tmp_path, trial="run2").config("seed=2").attempt().steps(1, 5)

    page = Elements(_page(one, other))

    assert "seed12" in page.text  # a row: the name, and a value for each
    different = page.text.partition("Settings that differ")[2].partition("Command, code and machine")[0]
    assert "learning_rate" not in different
    data = _data(one, other)
    assert data["runs"] == ["run1", "run2"]
    assert data["x"] == [1, 5]


def test_any_number_of_runs_is_drawn_over_one_another(tmp_path: Path) -> None:
    runs = [RunWriter(tmp_path, trial=f"run{number}").attempt().steps(1, number) for number in range(1, 12)]
    other = RunWriter(tmp_path, "other", "run1").attempt().steps(1, 3)

    data = _data(*runs, other)

    assert [line["run"] for line in data["numbers"]["task_reward"]] == list(range(12))
    assert data["runs"][0] == "tiny-recall/run1"  # two trials have this name
    assert data["runs"][-1] == "other/run1"


def test_the_page_has_the_configuration_and_what_a_run_was_started_with(tmp_path: Path) -> None:
    machine = {"host": "node7", "system": "Linux 6", "cores": 32, "memory_gib": 256.0, "gpus": ["H200", "H200"]}
    writer = RunWriter(tmp_path).config("train.learning_rate=3e-5")
    origin = {"command": "clusterkit train --preset tiny", "code": "4bad1dea+", "versions": {"torch": "2.9"}}
    writer.record("attempt", attempt=1, total_steps=3, ranks=2, machine=machine, **origin)

    text = Elements(_page(writer.steps(1, 3))).text

    assert "Commandclusterkit train --preset tinyCode4bad1dea+" in text
    assert "Machinenode7, Linux 6, 32 cores, 256 GiBGPUs2 x H200Ranks2" in text
    assert "Versionstorch 2.9" in text
    assert "train.learning_rate3e-05" in text


@pytest.mark.parametrize("value", [7, "x", [], {"gpus": 7, "memory_gib": "much"}, {"gpus": [None]}])
def test_a_machine_of_another_shape_costs_nothing_but_itself(tmp_path: Path, value: Any) -> None:
    writer = RunWriter(tmp_path).record("attempt", attempt=1, machine=value, versions=value, command=value, ranks=1)

    assert "Ranks1" in Elements(_page(writer)).text


def test_a_reader_follows_a_run_that_grows_and_notices_one_that_began_afresh(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 4)
    reader = RunReader(writer.run)
    assert reader.read().history.global_step == 4

    writer.steps(5, 6)
    assert reader.read().history.global_step == 6

    writer.run.metrics.unlink()
    assert reader.read().history.global_step == 0
    writer.steps(1, 1)
    assert reader.read().history.global_step == 1


# Nothing in a run becomes markup


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<!--"


def test_names_numbers_and_messages_of_a_run_never_become_markup(tmp_path: Path) -> None:
    plain = RunWriter(tmp_path, "plain", "run1").attempt().steps(1, 3)
    hostile = RunWriter(tmp_path, "<img src=x onerror=alert(1)>", "<script>").attempt().steps(1, 3)
    hostile.record("step", global_step=4, stats={HOSTILE: 1.0, "task_reward": 1.0}, timings={HOSTILE: 1.0})
    hostile.record("warning", message=HOSTILE).record("save", global_step=4, path=HOSTILE, bytes=HOSTILE)
    hostile.finish("failed", 4, HOSTILE).attempt(resume_step=4).finish(HOSTILE, 4, HOSTILE)
    hostile.summary(num_tasks=HOSTILE)

    page, harmless = Elements(_page(hostile)), Elements(_page(plain))

    assert page.count("img") == 0
    scripts = [attributes for name, attributes in page.found if name == "script"]
    assert [one for one in scripts if one.get("type") != "application/json"] == [{}]
    assert page.count("section") == harmless.count("section")
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 4


def test_a_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    page = Elements(_page(RunWriter(tmp_path).attempt().steps(1, 3)))

    addresses = [attributes.get(name) for _, attributes in page.found for name in ("src", "href") if name in attributes]
    assert addresses == ["data:,"]
    policy = next(a["content"] for _, a in page.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_the_plotting_library_is_the_pinned_one_with_its_licence(tmp_path: Path) -> None:
    """scripts/uplot.sh renews it."""
    folder = Path(report.__file__).parent / "uplot"
    name, *sums = folder.joinpath("PINNED").read_text().splitlines()
    pinned = dict(reversed(line.split()) for line in sums)

    assert pinned == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "PINNED"
    }  # fmt: skip
    library = folder.joinpath("uPlot.iife.min.js").read_text()
    assert f"(v{name.split()[1]})" in library.partition("\n")[0]
    text = _page(RunWriter(tmp_path).attempt().steps(1, 3))
    assert library in text
    assert "Copyright (c) 2022 Leon Sorokin" in text


# The command


def test_the_command_writes_one_file_and_names_it(tmp_path: Path) -> None:
    RunWriter(tmp_path).attempt().steps(1, 3)
    RunWriter(tmp_path, trial="run2").attempt().steps(1, 3)

    written = _command(tmp_path, "--trial", "run1")
    RunWriter(tmp_path, "other", "run3").attempt().steps(1, 3)
    others = ("--compare", "run2", "--compare", "other/run3")
    compared = _command(tmp_path, "--trial", "run1", *others, "--out", "three.html", "--json")

    assert (written.returncode, written.stdout) == (0, f"{tmp_path / 'tiny-recall-run1.html'}\n")
    assert (tmp_path / "tiny-recall-run1.html").read_text().startswith("<!DOCTYPE html>")
    facts = json.loads(compared.stdout)
    assert facts["runs"] == ["tiny-recall/run1", "tiny-recall/run2", "other/run3"]
    assert facts["bytes"] == (tmp_path / "three.html").stat().st_size
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "tiny-recall-run1.html", "three.html"}
    assert _command(tmp_path, "--trial", "run1", "--out", "-").stdout.startswith("<!DOCTYPE html>")


def test_records_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    RunWriter(tmp_path).run.metrics.mkdir()  # as a file without permission, which root can read all the same

    result = _command(tmp_path)

    assert (result.returncode, result.stdout) == (1, "")
    assert "metrics.jsonl cannot be read (Is a directory)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--trial", "run9"], 1, "no run */run9"),
        (["--compare", "run9"], 1, "no run tiny-recall/run9"),
        (["--compare", "run1"], 2, "compared with itself"),
        (["--trial", "run1", "--compare", "run2", "--compare", "run2"], 2, "compared with itself"),
        (["--compare", "../run1"], 2, "'..' is no name"),
        (["--experiment", "*"], 2, "'*' is no name"),
        (["--out", "."], 2, "is a folder: name a file"),
        (["--out", "nowhere/report.html"], 2, "there is no folder"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    for trial in ("run2", "run1"):
        RunWriter(tmp_path, trial=trial).attempt().steps(1, 3)

    result = _command(tmp_path, *arguments)

    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}
