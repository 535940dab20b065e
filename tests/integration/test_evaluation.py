"""Evaluations as they run: the record, killed and resumed, two at once, bad inputs, servers that die."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import yaml
from evalparts import WINDOW, chat_checkpoint, problems_config, problems_file, recall_checkpoint, recall_config
from httpstub import Answer, HttpStub, StubThread
from runs import ENVIRONMENT, REPOSITORY, wait_for

from evaluation.config import EvalConfig
from evaluation.engines import Opened, open_engine
from evaluation.evaluate import evaluate
from evaluation.record import output_lock
from trainer.config_lora import LoraConfig
from trainer.errors import InterruptedRunError, RunError, UserError
from trainer.hf_folder import tensor_shapes
from trainer.locks import hold
from trainer.train.adapterfiles import write_adapter
from trainer.train.lora import Adapter


@pytest.fixture(scope="module")
def recall_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recall_checkpoint(tmp_path_factory.mktemp("models") / "epoch1epochstep4globalstep4")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_checkpoint(tmp_path_factory.mktemp("chat") / "model")


def results_of(place: Path) -> dict[str, Any]:
    return json.loads((place / "results.json").read_text(encoding="utf-8"))


def lines_of(output: Path, pattern: str = "records/*/samples.jsonl") -> list[dict[str, Any]]:
    found = []
    for path in output.glob(pattern):
        for line in path.read_bytes().split(b"\n")[:-1]:
            found.append(json.loads(line))
    return found


@contextmanager
def nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise AssertionError("an engine was opened")

    with monkeypatch.context() as patch:
        patch.setattr("evaluation.asking.open_engine", refuse)
        yield


def test_every_answer_is_recorded_once_and_a_rerun_answers_from_the_record(
    recall_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recall_config(recall_model, tmp_path, methods=["memagent", "long_context", "rag", "no_context"])
    place = evaluate(config)
    results = results_of(place)
    assert results["status"] == "complete"
    names = ["recall@2", "recall@2 long_context", "recall@2 rag", "recall@2 no_context"]
    assert [row["dataset"] for row in results["rows"]] == names
    assert all((row["answers"], row["missing"], row["num_questions"]) == (12, 0, 4) for row in results["rows"])
    turns = {row["suite"] + (row["method"] or ""): row for row in results["rows"]}
    assert set(turns) == {"recall@2memagent", "recall@2long_context", "recall@2rag", "recall@2no_context"}
    before = lines_of(tmp_path)
    assert len(before) == 48
    assert {line["turns"] for line in before} == {3, 1}
    table = (place / "table.txt").read_text(encoding="utf-8")
    assert " recall@2 no_context " in table

    with nothing_is_asked(monkeypatch):
        again = evaluate(config)
    assert again == place
    assert results_of(again)["rows"] == results["rows"]
    assert lines_of(tmp_path) == before


def test_the_trained_reader_answers_from_what_was_found_and_from_a_blank_memory(
    recall_model: Path, tmp_path: Path
) -> None:
    methods = ["memagent", "blank_memory", "rag", "long_context", "no_context"]
    config = recall_config(
        recall_model, tmp_path, methods=methods, reader="agent", rag_top_k=1, n_sampling=0, num_questions=2
    )
    results = results_of(evaluate(config))
    names = ["recall@2", "recall@2 blank_memory", "recall@2 rag reader=agent", "recall@2 long_context reader=agent"]
    assert [row["dataset"] for row in results["rows"]] == [*names, "recall@2 no_context"]
    assert results["status"] == "complete"
    turns = [
        {line["turns"] for line in lines_of(tmp_path, f"{row['record']}/samples.jsonl")} for row in results["rows"]
    ]
    assert turns == [{3}, {1}, {2}, {2}, {1}]  # a turn a section, and the answer
    assert results["differences"] == []  # recall has no F1


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.7}, {"seed": 1}, {"top_p": 0.9}, {"num_questions": 3}, {"agent.max_memory_tokens": 2}],
    ids=str,
)
def test_other_inputs_never_take_over_old_answers(recall_model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    first = recall_config(recall_model, tmp_path)
    evaluate(first)
    count = len(lines_of(tmp_path))
    values = first.model_dump()
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[leaf] = value
    second = results_of(evaluate(EvalConfig.model_validate(values)))
    assert len(lines_of(tmp_path)) == count + second["rows"][0]["answers"]


def test_another_checkpoint_is_asked_anew_though_its_folder_has_the_name(recall_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(recall_model, model)
    first = evaluate(recall_config(model, tmp_path / "out"))
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    second = evaluate(recall_config(model, tmp_path / "out"))
    assert first != second
    assert len(lines_of(tmp_path / "out")) == 24


def test_an_adapter_is_scored_with_the_base_that_is_named_in_its_results(
    recall_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = "model.layers.0.self_attn.q_proj.weight"
    outputs, inputs = tensor_shapes(recall_model)[weight]
    parts = Adapter(torch.zeros(2, inputs), torch.zeros(outputs, 2), 1.0)
    write_adapter(tmp_path / "adapter", str(recall_model), LoraConfig(rank=2), {weight: parts})
    settings = {"n_sampling": 0, "num_questions": 1}

    results = results_of(evaluate(recall_config(tmp_path / "adapter", tmp_path / "out", **settings)))

    assert results["status"] == "complete"
    assert results["base_model"] == str(recall_model)
    said = f"{tmp_path / 'adapter'} is an adapter: it is merged into its base model, {recall_model}\n"
    assert capsys.readouterr().err.count(said) == 1
    assert results_of(evaluate(recall_config(recall_model, tmp_path / "out", **settings)))["base_model"] is None


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_asked_under_its_old_name(
    recall_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a training that was killed, goes on from an earlier step and writes the checkpoint again."""
    model, weights = tmp_path / "model", tmp_path / "model" / "model.safetensors"
    shutil.copytree(recall_model, model)

    @asynccontextmanager
    async def replaced_first(*arguments: Any) -> AsyncIterator[Opened]:
        shutil.copy(weights, tmp_path / "new")
        (tmp_path / "new").rename(weights)
        async with open_engine(*arguments) as opened:
            yield opened

    with monkeypatch.context() as patched:
        patched.setattr("evaluation.asking.open_engine", replaced_first)
        with pytest.raises(RunError, match="was replaced while it was read: nothing was asked"):
            evaluate(recall_config(model, tmp_path / "out"))
    assert lines_of(tmp_path / "out") == []
    assert results_of(evaluate(recall_config(model, tmp_path / "out")))["status"] == "complete"


def test_more_samples_are_added_to_those_that_are_there(recall_model: Path, tmp_path: Path) -> None:
    evaluate(recall_config(recall_model, tmp_path))
    before = lines_of(tmp_path)
    place = evaluate(recall_config(recall_model, tmp_path, n_sampling=8))
    after = lines_of(tmp_path)
    assert after[: len(before)] == before
    assert len(after) == 4 * 9
    row = results_of(place)["rows"][0]
    assert row["samples"] == 8
    assert row["pass@8"] is not None


def command(config: EvalConfig, folder: Path, **options: Any) -> subprocess.Popen[str]:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    argv = [sys.executable, "-m", "evaluation", str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, cwd=REPOSITORY, env=ENVIRONMENT, **{**pipes, **options})


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=lambda s: s.name
)
def test_killed_and_resumed_it_goes_on_with_what_is_missing(
    chat_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    config = problems_config(
        chat_model, problems_file(tmp_path, 12), tmp_path / "out", max_gen_tokens=48, server={"concurrency": 2}
    )
    process = command(config, tmp_path)
    wait_for(lambda: len(lines_of(tmp_path / "out")) >= 4 or process.poll() is not None)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    kept = lines_of(tmp_path / "out")
    assert 4 <= len(kept) < 36, err
    if number == signal.SIGTERM:
        assert process.returncode == 130
        assert re.search(r"interrupted: \d+ of 36 answers are written; the same command goes on", err)
    (samples,) = (tmp_path / "out").glob("records/*/samples.jsonl")
    with samples.open("ab") as file:
        file.write(b'{"id": "1", "sample": "0", "text": "half a li')

    process = command(config, tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    answer = json.loads(out)
    row = results_of(Path(answer["results"]))["rows"][0]
    assert (answer["status"], row["answers"], row["missing"]) == ("complete", 36, 0)
    after = [line for line in samples.read_text(encoding="utf-8").split("\n") if line]
    whole = []
    for line in after:
        try:
            whole.append(json.loads(line))
        except ValueError:
            assert line.startswith('{"id": "1", "sample": "0", "text": "half a li')
    assert whole[: len(kept)] == kept
    assert len({(line["id"], line["sample"]) for line in whole}) == len(whole) == 36


def test_two_evaluations_cannot_write_into_one_folder(recall_model: Path, tmp_path: Path) -> None:
    with output_lock(tmp_path), pytest.raises(UserError, match=rf"process {os.getpid()}\) writes into .*--out"):
        evaluate(recall_config(recall_model, tmp_path))
    evaluate(recall_config(recall_model, tmp_path))


def test_a_lock_that_a_refused_evaluation_takes_away_is_not_held_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has opened the very file that goes: a stand-in is refused at that moment."""
    lock, removed = tmp_path / "eval.lock", []

    def hold_late(file: BinaryIO) -> None:
        if not removed:
            removed.append(lock.unlink())
        hold(file)

    monkeypatch.setattr("evaluation.record.hold", hold_late)
    with output_lock(tmp_path):
        assert lock.exists()
        with pytest.raises(UserError, match="another evaluation"), output_lock(tmp_path):
            pass
    assert lock.exists()


def test_a_folder_without_file_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:  # a stand-in: no file system without locks can be mounted here
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("trainer.locks.fcntl.flock", refused)
    expected = r"(?s)eval\.lock: file locks fail \(No locks available\).*--out"
    with pytest.raises(UserError, match=expected), output_lock(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_other_grading_judges_the_same_answers_anew(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = problems_config(chat_model, problems_file(tmp_path), tmp_path / "out")
    first = results_of(evaluate(config))
    with nothing_is_asked(monkeypatch):
        lenient = results_of(evaluate(config.model_copy(update={"last_number": True})))
    assert len(lines_of(tmp_path / "out")) == 9
    assert lenient["rows"][0]["verdicts"] != first["rows"][0]["verdicts"]
    assert lenient["status"] == "complete"


def test_everything_that_defines_the_score_is_in_the_record(chat_model: Path, tmp_path: Path) -> None:
    place = evaluate(problems_config(chat_model, problems_file(tmp_path), tmp_path / "out"))
    results = results_of(place)
    row = results["rows"][0]
    assert set(row["inputs"]) >= {"checkpoint_sha256", "data", "engine", "sampling", "prompt_type", "max_gen_tokens"}
    assert {"python", "commit", "math-verify", "torch", "transformers"} <= set(results["versions"])
    record = json.loads((tmp_path / "out" / row["record"] / "inputs.json").read_text(encoding="utf-8"))
    assert record["first_prompt"].startswith("[user]What is 1 + 1?\nPlease reason step by step")
    assert record["first_prompt"].endswith("[end][assistant]")
    questions = (tmp_path / "out" / row["record"] / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(questions[0])["answers"] == ["2"]
    verdicts = lines_of(tmp_path / "out", f"{row['record']}/{row['verdicts']}")
    assert all({"answer", "how", "right", "reason"} <= set(verdict) for verdict in verdicts)


def broken(checkpoint: Path, change: Callable[[Path], None]) -> None:
    change(checkpoint)


def remove_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    values.pop("chat_template", None)
    path.write_text(json.dumps(values))


def make_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_template, r"sums: the checkpoint's tokenizer has no chat template: .*--prompt-type: .*qwen-boxed"),
        (make_pointer, r"model.safetensors is a Git LFS pointer.*git lfs pull"),
        (lambda folder: (folder / "config.json").unlink(), r"is no Hugging Face checkpoint: it has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no weights"),
    ],
    ids=["no template", "pointer", "no config", "no weights"],
)
def test_what_is_no_checkpoint_is_told_before_anything_is_asked(
    chat_model: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    change(model)
    with pytest.raises(UserError, match=message):
        evaluate(problems_config(model, problems_file(tmp_path), tmp_path / "out"))


def test_a_path_that_is_no_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is neither a folder nor the name of an asset"):
        evaluate(problems_config(tmp_path / "nowhere", problems_file(tmp_path), tmp_path / "out"))


def test_a_response_limit_over_the_context_window_is_told_with_the_one_that_fits(
    chat_model: Path, tmp_path: Path
) -> None:
    data = problems_file(tmp_path)
    with pytest.raises(UserError, match=rf"context window of {WINDOW} tokens: at most --max-gen-tokens (\d+)") as told:
        evaluate(problems_config(chat_model, data, tmp_path / "out", max_gen_tokens=WINDOW))
    fits = int(re.search(r"--max-gen-tokens (\d+)", str(told.value)).group(1))
    assert not list((tmp_path / "out").glob("*/results.json"))
    place = evaluate(
        problems_config(chat_model, data, tmp_path / "out", max_gen_tokens=fits, n_sampling=0, num_questions=1)
    )
    assert results_of(place)["status"] == "complete"


def test_a_problem_file_that_breaks_on_a_line_asks_nothing(chat_model: Path, tmp_path: Path) -> None:
    data = problems_file(tmp_path, 2)
    with data.open("a", encoding="utf-8") as file:
        file.write('{"id": 3, "problem": "What is')
    with pytest.raises(UserError, match=r"sums.jsonl, line 3: not JSON"):
        evaluate(problems_config(chat_model, data, tmp_path / "out"))
    assert lines_of(tmp_path / "out") == []


class Completions(StubThread):
    """A server of /v1/completions on a thread of its own, which can be told to misbehave: a fake, for faults only."""

    def __init__(self, good: int, then: Callable[[HttpStub], Answer]) -> None:
        super().__init__()
        self.good, self.then = good, then

    async def answer(self, stub: HttpStub, path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "served"}]}
        self.good -= 1
        if self.good < 0:
            return self.then(stub)
        return 200, {"choices": [{"text": r"so \boxed{2}", "finish_reason": "stop"}]}


def served_config(model: Path, tmp_path: Path, url: str) -> EvalConfig:
    server = {"engine": "openai", "url": url, "concurrency": 1, "wait_s": 1.5}
    return problems_config(model, problems_file(tmp_path), tmp_path / "out", server=server)


def test_a_server_that_dies_in_the_middle_costs_only_what_it_had_not_answered(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(stub: HttpStub) -> Answer:
        stub.die()
        return 500, {}

    with Completions(4, die) as server:
        url = server.url
        with pytest.raises(
            RunError, match=r"does not answer, for 2 s now: .*then the same command; the answers until now are written"
        ):
            evaluate(served_config(chat_model, tmp_path, url))
    kept = lines_of(tmp_path / "out")
    assert len(kept) == 4
    with Completions(100, die) as server:
        monkeypatch.setattr("evaluation.plan.row_inputs", _with_url(url))
        results = results_of(evaluate(served_config(chat_model, tmp_path, server.url)))
    assert results["status"] == "complete"
    assert lines_of(tmp_path / "out")[:4] == kept
    assert results["rows"][0]["greedy_acc"] == pytest.approx(1 / 3)


def _with_url(url: str) -> Callable[..., dict[str, Any]]:
    """The stub comes back on another port; a server that is started again has its old address."""
    from evaluation.plan import row_inputs  # noqa: PLC0415

    return lambda *arguments: row_inputs(*arguments) | {"url": url}


def test_a_server_that_is_away_for_a_moment_is_waited_for(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(_: HttpStub) -> Answer:
        server.good = 100
        return 503, {"error": "the model is being loaded"}

    with Completions(2, away) as server:
        results = results_of(evaluate(served_config(chat_model, tmp_path, server.url)))
    assert results["status"] == "complete"
    said = capsys.readouterr().err
    assert "does not answer: it answered 503" in said
    assert f"{server.url} answers again" in said


@pytest.mark.parametrize(("status", "message"), [(404, "it answered 404.*Put that right"), (400, "")])
def test_a_request_that_a_server_refuses(chat_model: Path, tmp_path: Path, status: int, message: str) -> None:
    with Completions(2, lambda _: (status, {"message": "no"})) as server:
        config = served_config(chat_model, tmp_path, server.url)
        if message:
            with pytest.raises(RunError, match=message):
                evaluate(config)
            return
        results = results_of(evaluate(config))
    assert (results["status"], results["rows"][0]["failed"]) == ("incomplete", 7)


def test_a_stop_before_the_first_answer_is_in_order(chat_model: Path, tmp_path: Path) -> None:
    config = problems_config(chat_model, problems_file(tmp_path), tmp_path / "out")
    with pytest.raises(InterruptedRunError, match="0 of 9 answers are written"):
        evaluate(config, stop=lambda: True)
