"""MemAgent's published Parquet files: rows in their schema, with the order and the leftovers that they have."""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from clusterkit.capacity.runnable import require_inputs
from clusterkit.config.resolve import resolve
from trainer.config import RunConfig
from trainer.config_tasks import HotpotqaConfig
from trainer.errors import UserError
from trainer.evaluate import check_lengths
from trainer.tasks import make_source
from trainer.tasks.hotpotqa import make_hotpotqa
from trainer.tasks.hotpotqa_published import PublishedHotpotQA
from trainer.types import Task

SIZE = 50


def row(n: int, size: int = SIZE, **changes: Any) -> dict[str, Any]:
    """A row as MemAgent's script makes it: ten own documents, others, one shuffle for all."""
    documents = [f"Own {n}-{k}\nText {k} of {n}." for k in range(10)]
    documents += [f"Other {(n + k) % 70}\nText of another one." for k in range(size - 10)]
    random.Random(4).shuffle(documents)
    return {
        "data_source": "hotpotqa",
        "prompt": [{"role": "user", "content": f"What is question {n}?"}],
        "context": "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(documents, 1)),
        "ability": "memory",
        "reward_model": {"style": "rule", "ground_truth": ["yes" if n % 4 == 0 else f"answer {n}"]},
        "extra_info": {"index": n, "question": f"What is question {n}?", "num_docs": size},
        "responses_qwen": [["left", "over"], []],
        **changes,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=7)
    return path


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    return write(tmp_path / "hotpotqa_train_32k.parquet", [row(n) for n in range(40)])


def source(path: Path, **settings: Any) -> PublishedHotpotQA:
    made = make_hotpotqa(HotpotqaConfig(path=str(path), **{"num_documents": SIZE, **settings}), 1)
    assert isinstance(made, PublishedHotpotQA)
    return made


def documents(task: Task) -> list[str]:
    parts = re.split(r"\n\n(?=Document \d+:\n)", task.context)
    assert [part.partition(":")[0] for part in parts] == [f"Document {n}" for n in range(1, len(parts) + 1)]
    return [part.partition(":\n")[2] for part in parts]


def number(task: Task) -> int:
    return int(task.question.split()[-1].rstrip("?"))


def test_a_context_has_the_published_documents_in_an_order_of_its_own(train_file: Path) -> None:
    tasks = source(train_file)
    slots = set()
    for index in range(tasks.train_size):
        task = tasks.train(index)
        published = [text.partition(":\n")[2] for text in row(number(task))["context"].split("\n\n")]
        assert sorted(documents(task)) == sorted(published)
        assert task.answers == ("yes" if number(task) % 4 == 0 else f"answer {number(task)}",)
        assert task.meta["form"] == ("yes_no" if number(task) % 4 == 0 else "span")
        slots.add(tuple(n for n, text in enumerate(documents(task)) if text.startswith("Own")))
    assert len(slots) == tasks.train_size
    assert tasks.train(0) == source(train_file).train(0)


def test_the_published_order_comes_back_when_asked_for(train_file: Path) -> None:
    tasks = source(train_file, compat_upstream=True)
    for index in range(3):
        assert tasks.train(index).context == row(number(tasks.train(index)))["context"]


def test_a_shorter_context_keeps_the_questions_own_documents(train_file: Path) -> None:
    task = source(train_file, num_documents=15).train(0)

    assert sorted(t for t in documents(task) if t.startswith("Own")) == [
        f"Own {number(task)}-{k}\nText {k} of {number(task)}." for k in range(10)
    ]
    assert len(documents(task)) == 15


@pytest.mark.parametrize("size", [2, 9, 51])
def test_lengths_that_cannot_be_made_are_refused(train_file: Path, size: int) -> None:
    with pytest.raises(UserError, match=rf"num_documents={size}: .*choose 10 to 50"):
        source(train_file, num_documents=size)


def test_held_out_contexts_may_be_shorter_or_longer_than_trained_ones(train_file: Path) -> None:
    tasks = source(train_file, num_documents=15)

    assert [len(documents(tasks.heldout("test", 0, size))) for size in (0, 10, 50)] == [15, 10, 50]
    with pytest.raises(UserError, match=r"final_documents has 51: .*choose 10 to 50"):
        tasks.heldout("test", 0, 51)


def test_what_answers_a_question_is_not_said_and_not_asked_for(train_file: Path) -> None:
    task, model = {"name": "hotpotqa", "path": str(train_file), "num_documents": 15}, {"path": "/model"}
    agent = {"template": "memagent"}
    for methods, refused in ((["rag", "long_context"], False), (["gold"], True)):
        config = RunConfig.model_validate(
            {"model": model, "agent": agent, "task": task, "eval": {"num_tasks": 1, "final_methods": methods}}
        )
        with pytest.raises(UserError, match=r"gold in eval\.final_methods cannot") if refused else nullcontext():
            check_lengths(config, source(train_file, num_documents=15))


def test_the_dev_file_beside_it_is_what_is_held_out(train_file: Path) -> None:
    write(train_file.with_name("hotpotqa_dev.parquet"), [row(n) for n in range(35, 60)])
    tasks = source(train_file.parent)
    held = {number(tasks.heldout(s, i)) for s in ("dev", "test") for i in range(tasks.num_heldout(s))}  # type: ignore[arg-type]

    assert held == set(range(35, 60))
    assert {number(tasks.train(i)) for i in range(tasks.train_size)} == set(range(35))


def test_without_one_a_share_of_the_questions_is(train_file: Path) -> None:
    tasks = source(train_file, eval_fraction=0.4)
    held = {number(tasks.heldout(s, i)) for s in ("dev", "test") for i in range(tasks.num_heldout(s))}  # type: ignore[arg-type]
    train = {number(tasks.train(i)) for i in range(tasks.train_size)}

    assert held
    assert held | train == set(range(40))
    assert not held & train
    assert source(train_file, train_size=5).train_size == 5


def test_a_run_is_configured_with_verls_own_option(train_file: Path) -> None:
    settings = [f"data.train_files={train_file}", "task.num_documents=20", "model.path=x"]
    config = resolve("135M_cpu", "hotpotqa", settings).config

    assert isinstance(make_source(config), PublishedHotpotQA)
    here = {"model": config.model.model_copy(update={"path": None})}
    require_inputs(config.model_copy(update=here))
    here["eval"] = config.eval.model_copy(update={"final_methods": ["rag", "gold"]})
    with pytest.raises(UserError, match=r"eval\.final_methods has gold, .* does not say which documents answer"):
        require_inputs(config.model_copy(update=here))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": "no documents"}, "column 'context' has 0 documents"),
        ({"context": "Document 1:\na\n\nDocument 3:\nb"}, "number 2 is not"),
        ({"prompt": []}, "column 'prompt' must be a list of messages"),
        ({"reward_model": {"style": "rule", "ground_truth": [" "]}}, "must hold ground_truth"),
        ({"reward_model": None}, "must hold ground_truth"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "mine.parquet", [row(0), row(1, **changes)])
    with pytest.raises(UserError, match=rf"mine\.parquet, line 2: .*{message}"):
        source(path)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        source(tmp_path / "nothing.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + b"x" * 50)
    with pytest.raises(UserError, match="damaged Parquet"):
        source(tmp_path / "bad.parquet")
    parquet.write_table(arrow.table({"question": ["q"]}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match="prompt"):
        source(tmp_path / "other.parquet")


def test_a_curriculum_is_for_folders_whose_contexts_are_drawn(train_file: Path) -> None:
    with pytest.raises(UserError, match=r"task\.curriculum=\[2\] draws contexts .* has its own contexts"):
        source(train_file, curriculum=[2])


def test_a_share_of_real_questions_is_for_prepared_folders(train_file: Path) -> None:
    with pytest.raises(UserError, match=r"task\.real_share=0\.5 is for a folder of .*all of one kind: leave it out"):
        source(train_file, real_share=0.5)
