"""`clusterkit ask` as a user types it, of a tiny model that was really warmed up to look facts up."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import byte_tokenizer
from evalparts import chat_checkpoint
from runs import ENVIRONMENT, Trial, command, wait_for

from clusterkit.evaluate.request import LIMITS
from evaluation.lengths import within_window
from trainer.agents.memagent import MemAgent
from trainer.config_agents import MemagentConfig

FIRST = "zezi lamp . there was kege chair . calm and"
SECOND = "toku spoon . later there was rifo kettle . evening"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A run of one step after a warm-up of half a minute, whose gate is what `ask` needs: lookup in one section."""
    folder = tmp_path_factory.mktemp("ask")
    settings: dict[str, Any] = {
        "model.tiny": {"hidden_size": 128, "intermediate_size": 256},
        "task.num_keys": 16,
        "warmup": {"recall_steps": 100, "steps": 200, "gate": 0.9, "retries": 2},
        "train.total_steps": 1,
        "eval": {"every_steps": 0},
    }
    trial = Trial(folder / "runs", folder / "cache", **settings)
    process = command(trial)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (trial.paths.logs / "config.yaml").write_bytes(trial.file.read_bytes())  # where the command puts it
    return trial


def words(run: Trial, *more: str | Path) -> list[str]:
    return [sys.executable, "-m", "clusterkit.cli.main", "ask", "--fileroot", str(run.config.fileroot), *map(str, more)]


def ask(run: Trial, *more: str | Path, text: str | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    pipes: dict[str, Any] = {"input": text} if text is not None else {"stdin": subprocess.DEVNULL}
    done = subprocess.run(
        words(run, *more), env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False, **pipes
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


@pytest.mark.parametrize(("key", "value"), [("toku", "spoon"), ("rifo", "kettle")])
def test_it_shows_its_memory_and_answers_what_the_files_say(run: Trial, tmp_path: Path, key: str, value: str) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text(FIRST)
    second.write_text(SECOND)
    done = ask(run, "--question", key, first, second)
    assert done.stdout == f"{value}\n"
    assert "20 tokens in 2 sections" in done.stderr
    assert "section 1 of 2: memory" in done.stderr
    assert f"section 2 of 2: memory 2 tokens\n    {key} {value}\n" in done.stderr


def test_words_that_it_does_not_know_are_named(run: Trial) -> None:
    done = ask(run, "--question", "Ouzel", text=f"{FIRST} Swans nest there.")
    assert "does not know 1 word of the question: Ouzel\n" in done.stderr
    assert "of the document: Swans, nest, there.\n" in done.stderr


def test_lines_of_json_of_a_text_that_is_piped_in(run: Trial) -> None:
    done = ask(run, "--question", "kege", "--json", text=FIRST)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["document", "section", "answer"]
    document, section, answer = events
    assert (document["tokens"], document["sections"], document["engine"]) == (10, 1, "embedded")
    assert Path(document["model_path"]).name == "epoch1epochstep1globalstep1"
    assert (section["memory"], section["memory_tokens"], section["truncated"]) == ("kege chair", 2, False)
    assert answer["answer"] == "chair"
    assert "memory" not in done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--question", "kege is there was calm and kege chair calm"], "agent.max_question_tokens is 8"),
        (["--question", "kege", "--set", "agent.name=single_turn"], "the checkpoint's agent is single_turn"),
        (["--question", "kege", "--set", "agent.chunk_tokens=500"], "lower agent.chunk_tokens"),
        (["--question", "kege", "--engine", "vllm", "--server-python", "/nowhere"], "name the interpreter"),
    ],
    ids=["long", "agent", "window", "server"],
)
def test_limits_are_told_in_words(run: Trial, more: list[str], message: str) -> None:
    done = ask(run, *more, text=FIRST, code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("typed", "section", "memory"),
    [([], 512, 128), (["max_memory_tokens=60"], 512, 60), (["chunk_tokens=700"], 700, 128)],
    ids=["nothing", "memory", "section"],
)
def test_a_checkpoint_from_elsewhere_reads_with_lengths_that_its_context_window_has_room_for(
    run: Trial, tmp_path: Path, typed: list[str], section: int, memory: int
) -> None:
    model = chat_checkpoint(tmp_path / "model", window=2048)
    settings = [word for one in typed for word in ("--set", f"agent.{one}")]

    said = ask(run, "--model-path", model, "--question", "Who?", *settings, text="a b " * 300).stderr

    lengths = f"sections have at most {section} tokens, the memory {memory} and an answer 128"
    assert f"{lengths}, which its context window of 2048" in said
    count = -(-1200 // section)
    assert f"1200 tokens in {count} sections" in said
    memories = re.findall(r"section \d+ of \d+: memory (?:unchanged|(\d+) tokens)", said)
    assert len(memories) == count
    assert max(int(tokens or 0) for tokens in memories) <= memory


def test_a_section_longer_than_the_context_window_of_a_checkpoint_from_elsewhere_is_refused(
    run: Trial, tmp_path: Path
) -> None:
    model = chat_checkpoint(tmp_path / "model", window=2048)
    words = ["--model-path", model, "--question", "Who?", "--set", "agent.chunk_tokens=5000"]
    refused = ask(run, *words, text="a", code=2)
    assert "over the model's context window of 2048: lower agent.chunk_tokens" in refused.stderr


@pytest.mark.parametrize("window", [1024, 2048, 4096, 8192, 32768])
def test_lengths_that_nobody_has_set_fit_into_any_context_window(window: int) -> None:
    usual, tokenizer = MemagentConfig(), byte_tokenizer()

    found = within_window(usual, LIMITS, tokenizer, window)

    MemAgent(found, tokenizer).check_window(window)
    assert found.chunk_tokens >= 200
    assert (found == usual) == (window == 32768)
    assert within_window(usual, [], tokenizer, window) == usual


def test_ctrl_c_ends_a_long_reading_at_once(run: Trial, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n".join([FIRST, SECOND] * 20_000))
    log = tmp_path / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            words(run, "--question", "kege", book), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=stderr
        )
        wait_for(lambda: b"section 2 of 40000" in log.read_bytes(), every=0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, log.read_text()[-2000:]
    assert out == b""
    assert "error: interrupted before the answer" in log.read_text()
