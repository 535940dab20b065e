"""SmolLM2-135M learns the answers of a file of chats, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import RunConfig
from trainer.sft.encoding import Encoder
from trainer.tasks.examples import load_examples
from trainer.train.model import load_tokenizer

FACTS = {"Arnby": "the Ouzel", "Belk": "the Pell", "Corvale": "the Quern", "Dunmere": "the Rushy", "Eskow": "the Sable"}


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    path = tmp_path / "facts.jsonl"
    rows = [{"prompt": f"On which river is {town}?", "answer": f"On {river}."} for town, river in FACTS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder: Path, *settings: str) -> Path:
    """Run the preset to its end; returns the run's folder."""
    command = [sys.executable, "-m", "clusterkit.cli.main", "train", "--preset", "135M_cpu", f"fileroot={folder}"]
    done = subprocess.run(
        [*command, "trial_name=one", "train.threads=1", *settings],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next(folder.glob("logs/*/*/one"))


@pytest.mark.data
def test_a_row_is_the_chat_templates_text_with_the_loss_on_the_answer(facts: Path, smollm2_path: Path) -> None:
    config = RunConfig.model_validate(
        {"task": {"name": "sft", "path": str(facts)}, "trainer": {"type": "sft"}, "model": {"path": str(smollm2_path)}}
    )
    tokenizer = load_tokenizer(smollm2_path)
    example = load_examples(config.task).train[0]

    (row,) = Encoder(config, tokenizer).rows(example, 0)

    messages = [{"role": role, "content": text} for role, text in example.messages]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(row.prompt_ids + row.response_ids) == whole.rstrip("\n")
    assert tokenizer.decode(row.response_ids) == f"{messages[-1]['content']}<|im_end|>"


@pytest.mark.data
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_real_model_learns_examples(tmp_path: Path, facts: Path, smollm2_path: Path) -> None:
    settings = ["train.total_steps=4", "train.warmup_steps=0", "train.learning_rate=1e-4", "rollout.batch_size=4"]

    logs = train(tmp_path, f"model.path={smollm2_path}", "trainer.type=sft", f"task.path={facts}", *settings)

    records = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    losses = [record["stats"]["loss"] for record in records if record["kind"] == "step"]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    assert json.loads((logs / "summary.json").read_text())["heldout_loss"]["before"] > 0
