"""benchmarks/reading.py: records from results, tables and the picture from records alone, stages that were done."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import reading  # noqa: E402
from reading_records import Arm, Records, tables  # noqa: E402

from trainer.errors import UserError  # noqa: E402
from trainer.paths import RunPaths  # noqa: E402

QUESTIONS = [f"q{n}" for n in range(10)]


def results(scores: dict[str, list[float]], documents: int = 8, questions: list[str] = QUESTIONS) -> dict[str, Any]:
    """What an evaluation leaves: F1 of every question by method; the last two questions ask for yes or no."""
    rows = []
    for method, f1 in scores.items():
        asked = {
            q: {"f1": value, "em": float(value == 1), "form": "yes_no" if q in questions[-2:] else "span"}
            for q, value in zip(questions, f1, strict=True)
        }
        name = f"ruler_hqa@{documents}"
        rows.append({"suite": name, "dataset": f"{name} {method}", "method": method, "questions": asked})
    facts = {"status": "complete", "checkpoint_sha256": "ab", "engine": "embedded", "seconds": 1.5}
    return {**facts, "versions": {"torch": "2", "python": "3"}, "rows": rows}


def filled() -> Records:
    """Two seeds of the trained arm and one of the supervised start, at one or two numbers of documents."""
    records = Records()
    records.add(results({"memagent": [1.0] * 8 + [0, 1], "blank_memory": [0.0] * 10}), "trained", 1, "a GPU")
    records.add(results({"memagent": [0.5] * 8 + [0, 1], "blank_memory": [0.0] * 10}), "trained", 2, "a GPU")
    records.add(results({"memagent": [0.5] * 10, "rag": [2 / 3] * 10}), "supervised", 0, "a GPU")
    records.add(results({"memagent": [0.25] * 10}, 32), "supervised", 0, "a GPU")
    return records


def test_records_survive_their_file_and_equal_ones_are_equal_bytes(tmp_path: Path) -> None:
    filled().write(tmp_path / "a" / "records.jsonl")
    again = Records.read(tmp_path / "a" / "records.jsonl")
    again.write(tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a" / "records.jsonl").read_bytes()
    assert again.scores(Arm("trained", "memagent"), 8) == [0.75] * 8  # the mean over the seeds, spans alone
    assert again.scores(Arm("trained", "memagent"), 8, yes_no=True) == [0.0, 1.0]
    assert again.scores(Arm("supervised", "rag"), 8) == [0.667] * 8
    assert again.scores(Arm("trained", "memagent"), 32) == []
    assert again.cells[Arm("trained", "memagent"), 1, 8][1] == "1111111101"
    assert again.evaluations["trained", 2]["versions"] == {"torch": "2"}


def test_two_arms_are_compared_by_the_seeds_that_both_have() -> None:
    records = filled()
    ours, start = Arm("trained", "memagent"), Arm("supervised", "memagent")
    assert records.changes(ours, start, 8) == [0.25] * 8  # a start that all seeds began with has a number of its own
    records.add(results({"memagent": [0.75] * 10}), "supervised", 1, "a GPU")
    assert records.changes(ours, start, 8) == [0.25] * 8, "1.0 less 0.75: seed 2 has no start"
    records.add(results({"memagent": [0.0] * 10}), "supervised", 2, "a GPU")
    assert records.changes(ours, start, 8) == [0.375] * 8
    assert records.changes(ours, start, 32) == records.changes(ours, Arm("shuffled", "memagent"), 8) == []


def test_what_cannot_be_put_beside_the_records_is_refused(tmp_path: Path) -> None:
    records = filled()
    with pytest.raises(UserError, match=r"asked other questions than the records have: name another file"):
        records.add(results({"rag": [0.0] * 9}, questions=QUESTIONS[:9]), "trained", 3, "")
    with pytest.raises(UserError, match="lacks answers"):
        records.add({**results({"rag": [0.0] * 10}), "status": "incomplete"}, "trained", 3, "")
    (tmp_path / "records.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match=r"no records of benchmarks/reading\.py"):
        Records.read(tmp_path / "records.jsonl")


def test_the_table_has_means_intervals_differences_and_yes_no_apart() -> None:
    lines = tables(filled())
    assert lines[0] == "8 documents:"
    assert "F1 of 8 questions" in lines[2]
    assert "F1 of 2 yes/no questions" in lines[2]
    by_arm = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in lines if line.startswith("| ")}
    memory = by_arm["trained: memory"]
    assert memory[1:3] == ["75.0 (75.0 … 75.0)", "100.0, 50.0"]
    assert memory[3:5] == ["+75.0 (+75.0 … +75.0)", "+25.0 (+25.0 … +25.0)"]
    assert memory[5].startswith("50.0 (0.0 … 100.0)")
    assert by_arm["trained: blank memory"][3:5] == ["·", "-50.0 (-50.0 … -50.0)"]
    assert lines[lines.index("32 documents:") + 4].startswith("| supervised only: memory | 25.0 ")


def test_tables_and_picture_are_drawn_from_the_records_alone(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    filled().write(file)
    drawn = []
    for _ in range(2):
        command = [sys.executable, str(BENCHMARKS / "reading.py"), "draw", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True)
        drawn.append((done.stdout, (tmp_path / "records.svg").read_bytes()))
    assert drawn[0] == drawn[1]
    assert "| trained: memory | 75.0 " in drawn[0][0]
    assert "a GPU, engine embedded, torch 2" in drawn[0][0]
    svg = ElementTree.fromstring(drawn[0][1])
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert {"8", "32", "trained: memory", "supervised only: memory", "trained: blank memory"} <= set(texts)
    lines = [e.attrib for e in svg.iter() if e.tag.endswith("path") and e.attrib.get("fill") == "none"]
    assert len(lines) == 1  # the supervised start alone was measured at two numbers of documents

    lost = subprocess.run([*command[:-1], "nowhere"], capture_output=True, text=True, timeout=120, check=False)
    assert (lost.returncode, lost.stderr.count("\n")) == (2, 1)


def bench(tmp_path: Path, **changes: Any) -> reading.Bench:
    words = ["run", str(tmp_path / "questions"), "--out", str(tmp_path), "--task", "hotpotqa", "--preset", "135M_cpu"]
    given = reading.parse([*words, "--model", "base", "--seeds", "1", "2", "--documents", "8"])
    for name, value in changes.items():
        setattr(given, name, value)
    return reading.Bench(given, tmp_path, tmp_path / "records.jsonl", 1e18, "a machine")


def test_runs_differ_in_seed_and_rewards_alone_and_every_checkpoint_is_asked_the_same(tmp_path: Path) -> None:
    one = bench(tmp_path, supervised="start")
    trained, shuffled = one.config("trained", 2), one.config("shuffled", 2)
    assert (trained.seed, trained.control.rewards, shuffled.control.rewards) == (2, "true", "shuffled")
    assert trained.model.path == shuffled.model.path == str(Path("start").resolve())
    same = {"trial_name": "", "control": trained.control}
    assert trained.model_copy(update=same) == shuffled.model_copy(update=same)

    asked = [one.request(kind, 1, "somewhere") for kind in ("trained", "supervised", "shuffled")]
    assert asked[0].methods == asked[1].methods == reading.ALL
    assert asked[2].methods == ["memagent", "blank_memory"]
    assert (asked[2].data_names, asked[0].data_names) == (["ruler_hqa@8", "ruler_hqa@32"], ["ruler_hqa@8"])
    assert {(a.reader, a.rag_top_k, a.split, a.n_sampling) for a in asked} == {("agent", 2, "dev+test", 0)}
    assert asked[0].agent == asked[1].agent == trained.agent


def test_the_control_on_shuffled_rewards_begins_with_the_supervised_start_of_its_seed(tmp_path: Path) -> None:
    one = bench(tmp_path, preset="135M_read_cpu", task=None)
    assert one.config("trained", 1).supervised.dataset
    with pytest.raises(UserError, match=r"the run of seed 1 keeps no supervised start: .*--supervised"):
        one.supervised(1)
    kept = RunPaths.of(one.config("trained", 1)).supervised.checkpoints
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    shuffled = one.config("shuffled", 1)
    assert (shuffled.model.path, shuffled.supervised.dataset) == (str(kept), "")
    assert one.supervised(1) == str(kept)
    assert one.config("trained", 1).model.path == one.untrained() == "base"
    assert one.config("shuffled", 2).supervised.dataset  # its run is not there yet


def test_a_folder_of_runs_takes_no_other_questions_and_no_other_model(tmp_path: Path) -> None:
    given = bench(tmp_path, arms=[]).given
    given.questions.mkdir()
    (given.questions / "questions.jsonl").write_text("{}\n")
    reading.run(bench(tmp_path, arms=[]))
    reading.run(bench(tmp_path, arms=[]))
    with pytest.raises(UserError, match="name another --out"):
        reading.run(bench(tmp_path, arms=[], model="another"))
    (given.questions / "questions.jsonl").write_text("{} \n")
    with pytest.raises(UserError, match="name another --out"):
        reading.run(bench(tmp_path, arms=[]))

    # One of an earlier version goes on.
    (tmp_path / "settings.json").write_text(
        '{"preset": "135M_cpu", "task": "hotpotqa", "settings": [], "start": false}'
    )
    reading.run(bench(tmp_path, arms=[]))


def test_a_stage_whose_result_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages' processes are stood in for; tests/integration/test_reading_benchmark.py runs them."""
    ran: list[str] = []
    one = bench(tmp_path)

    def carry_out(self: reading.Bench, name: str, command: list[str]) -> None:
        ran.append(name)
        with (self.out / "stages.jsonl").open("a") as file:
            file.write(json.dumps({"stage": name, "seconds": 1.0, "code": 0, "device": "that GPU"}) + "\n")
        if name.startswith("evaluate"):
            request = SimpleNamespace(**reading.yaml.safe_load(Path(command[-1]).read_text()))
            rows = [results({method: [0.5] * 10 for method in request.methods}, 8)]
            found = {**rows[0], "config": vars(request)}
            folder = Path(request.output_path) / str(len(ran))
            folder.mkdir(parents=True)
            (folder / "results.json").write_text(json.dumps(found))

    monkeypatch.setattr(reading.Bench, "stage", carry_out)
    made: list[str] = []

    def checkpoint() -> str:
        made.append("checkpoint")
        return "checkpoint"

    one.measure("trained", 1, checkpoint)
    one.measure("trained", 1, checkpoint)
    assert (ran, made) == (["evaluate trained seed 1"], ["checkpoint"])
    assert Records.read(one.records).evaluations["trained", 1]["device"] == "that GPU"
    bench(tmp_path, documents=[16]).measure("trained", 1, checkpoint)
    assert len(ran) == 2


def test_commands_side_by_side_lose_nothing_of_each_other(tmp_path: Path) -> None:
    """Eight seeds whose results are there are taken into one file of records at the same moment."""
    one = bench(tmp_path)
    for seed in range(8):
        request = one.request("trained", seed, "")
        found = {**results({"memagent": [seed / 8] * 10}), "config": request.model_dump(mode="json")}
        folder = Path(request.output_path) / "checkpoint"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(found))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: bench(tmp_path).measure("trained", seed, lambda: "unused"), range(8)))
    records = Records.read(one.records)
    assert {seed: records.cells[Arm("trained", "memagent"), seed, 8][0][0] for seed in range(8)} == {
        seed: seed / 8 for seed in range(8)
    }


def test_two_commands_that_want_the_same_checkpoint_measured_run_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two commands begins with the untrained arm; the evaluation is stood in for."""
    ran: list[str] = []

    def carry_out(self: reading.Bench, name: str, command: list[str]) -> None:
        ran.append(name)
        request = reading.yaml.safe_load(Path(command[-1]).read_text())
        found = {**results({method: [0.5] * 10 for method in request["methods"]}), "config": request}
        folder = Path(request["output_path"]) / "checkpoint"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(found))

    monkeypatch.setattr(reading.Bench, "stage", carry_out)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: bench(tmp_path).measure("untrained", 0, lambda: "base"), range(4)))
    assert ran == ["evaluate untrained seed 0"]


def test_seeds_side_by_side_are_dealt_to_the_gpus_and_one_that_fails_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages are stood in for: all three must be under way at once before any of them ends."""
    together = threading.Barrier(3)
    done: dict[int, str] = {}

    def measure(self: reading.Bench, kind: str, seed: int, checkpoint: object) -> None:
        together.wait(30)
        if seed == 2:
            raise UserError("seed 2 failed")
        done[seed] = self.gpu

    monkeypatch.setattr(reading.Bench, "measure", measure)
    monkeypatch.setattr(reading, "visible_gpus", lambda: ["4", "5"])
    with pytest.raises(UserError, match="seed 2 failed"):
        reading.run(bench(tmp_path, arms=["trained"], seeds=[1, 2, 3], jobs=3))
    assert set(done) == {1, 3}
    assert set(done.values()) <= {"4", "5"}


def test_a_stage_ends_in_order_when_all_are_told_to(tmp_path: Path) -> None:
    one = bench(tmp_path)
    waits = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nprint('up', flush=True)\n"
        "try:\n time.sleep(600)\nexcept KeyboardInterrupt:\n raise SystemExit(130)"
    )
    log = tmp_path / "logs" / "train.log"

    def stop_it() -> None:
        while not (log.exists() and "up" in log.read_text()):
            time.sleep(0.05)
        one.stop.set()

    stopper = threading.Thread(target=stop_it)
    stopper.start()
    with pytest.raises(reading.TimeIsOverError):
        one.stage("train", ["-c", waits])
    stopper.join()
    assert json.loads((tmp_path / "stages.jsonl").read_text())["code"] == 130
    with pytest.raises(reading.TimeIsOverError):
        one.stage("evaluate", ["-c", "print('never')"])
    assert not (tmp_path / "logs" / "evaluate.log").exists()
