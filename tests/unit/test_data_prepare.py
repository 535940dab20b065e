"""`clusterkit data prepare`: small inputs of every style, what is made of them, and what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from clusterkit.cli.main import app
from clusterkit.data.datasets import build as building
from clusterkit.data.datasets.build import build
from clusterkit.data.datasets.corpora import keywords
from clusterkit.data.datasets.prepare import SETTINGS, make_plan
from clusterkit.data.datasets.texts import Shape, pack
from trainer.config_tasks import HotpotqaConfig, MemalphaConfig
from trainer.errors import UserError
from trainer.tasks.hotpotqa import HotpotQA
from trainer.tasks.memalpha import Item, MemAlphaTexts, read_items

SHAPE = Shape(questions=3, documents=8, chunk_words=60)


def hotpotqa(count: int = 40) -> list[dict[str, Any]]:
    """Questions with two gold paragraphs and one other each, in the official form; no two share a paragraph."""
    return [
        {
            "_id": f"h{n}",
            "question": f"In which country was person {n} born?",
            "answer": f"Country{n}",
            "context": [
                [f"Person {n}", [f"Person {n} was born in Town{n}.", " He paints."]],
                [f"Town{n}", [f"Town{n} is a town in Country{n}."]],
                [f"River {n}", [f"River {n} is long."]],
            ],
            "supporting_facts": [[f"Person {n}", 0], [f"Town{n}", 0]],
        }
        for n in range(count)
    ]


def squad(articles: int = 20) -> list[dict[str, Any]]:
    """Two paragraphs an article, two questions a paragraph, in the form of the hub."""
    return [
        {
            "id": f"s{a}-{p}-{q}",
            "title": f"Article {a}",
            "context": f"Paragraph {p} of article {a} says that item 0 is item 1 and item 1 is item 0.",
            "question": f"What does paragraph {p} of article {a} say of {q}?",
            "answers": {"text": [f"item {1 - q}", f"item {1 - q}"], "answer_start": [0, 0]},
        }
        for a in range(articles)
        for p in range(2)
        for q in range(2)
    ]


def books(count: int = 12) -> list[dict[str, Any]]:
    text = "\n\n".join(f"Chapter part {i}. Captain Ahab spoke to Ishmael about Nantucket." for i in range(20))
    return [
        {
            "bid": n // 2,
            "chapter": f"{text} Book {n}.",
            "summary": "The captain, Captain Ahab, meets Ishmael and Queequeg.",
        }
        for n in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(kind: str, out: Path, *files: Path, **changes: Any) -> dict[str, Any]:
    settings = {"test_share": 0.25, "most": 0, "seed": 1, **changes}
    force = settings.pop("force", False)
    return build(make_plan(kind, files, SHAPE, **settings), out, lambda _: None, force)


def passages(items: list[Item]) -> set[str]:
    return {
        p for item in items for chunk in item.chunks for p in chunk.split("\n\n") if not p.startswith("Chapter part")
    }


def test_memalpha_files_of_three_styles_can_be_trained_on_and_share_no_document(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "hotpot.json", hotpotqa()),
        write(tmp_path / "squad.parquet", squad()),
        write(tmp_path / "books.jsonl", books()),
    ]
    card = prepare("memalpha", tmp_path / "out", *files)
    train, test = (read_items(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "test"))

    assert {item.source for item in train} == {item.source for item in test} == {"hotpotqa", "squad", "booksum"}
    assert not passages(train) & passages(test)
    for item in train:
        assert len(item.questions) <= 3
        assert all(len(chunk.split()) <= 60 for chunk in item.chunks)
        if item.source != "booksum":
            for question in item.questions:
                assert any(answer in chunk for answer in question.answers for chunk in item.chunks)
    source = MemAlphaTexts(MemalphaConfig(path=str(tmp_path / "out"), eval_fraction=0.2), seed=1)
    assert source.train(0).questions
    assert source.num_heldout("test") == len(test)
    epoch = [source.train(i).id.rsplit("-", 1)[0] for i in range(source.train_size)]
    dev = {source.heldout("dev", i).id.removeprefix("dev-") for i in range(source.num_heldout("dev"))}
    assert len(set(epoch)) == source.train_size
    assert not dev & {name.removeprefix("train-") for name in epoch}
    assert card["files"]["test.jsonl"]["rows"] == len(test)
    assert "| squad.parquet | squad | 80 |" in (tmp_path / "out" / "README.md").read_text()


def test_texts_of_one_build_have_their_evidence_in_different_places(tmp_path: Path) -> None:
    prepare("memalpha", tmp_path / "out", write(tmp_path / "hotpot.json", hotpotqa()), test_share=0.0)
    places = set()
    for item in read_items(tmp_path / "out" / "train.jsonl"):
        text = "\n\n".join(item.chunks).split("\n\n")
        places.add(next(i for i, passage in enumerate(text) if item.questions[0].answers[0] in passage))

    assert len(places) > 2


def test_the_same_inputs_make_the_same_bytes_and_a_second_build_changes_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "squad.jsonl", squad())
    first = prepare("memalpha", tmp_path / "a", file)
    other = prepare("memalpha", tmp_path / "b", file)
    stamp = (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns
    again = prepare("memalpha", tmp_path / "a", file)

    assert first["files"] == other["files"]
    assert again["outcome"] == "present"
    assert (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns == stamp


def test_an_interrupted_build_goes_on_with_the_first_part_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "PART_ROWS", 2)
    file = write(tmp_path / "squad.jsonl", squad())
    whole = prepare("memalpha", tmp_path / "whole", file)

    def interrupt(text: str) -> None:
        if "train.jsonl: 4 of" in text:
            raise KeyboardInterrupt

    plan = make_plan("memalpha", [file], SHAPE, 0.25, 0, 1)
    with pytest.raises(KeyboardInterrupt):
        build(plan, tmp_path / "out", interrupt)
    assert not (tmp_path / "out").exists()
    said: list[str] = []
    card = build(plan, tmp_path / "out", said.append)

    assert "train.jsonl: 2 of" not in " ".join(said)
    assert "train.jsonl: 6 of" in " ".join(said)
    assert card["files"] == whole["files"]
    assert [path.name for path in tmp_path.glob(".out*")] == []


def test_a_second_command_that_makes_the_same_folder_is_refused_and_the_first_one_finishes(tmp_path: Path) -> None:
    file = write(tmp_path / "squad.jsonl", squad())
    plan = make_plan("memalpha", [file], SHAPE, 0.25, 0, 1)
    refusals: list[str] = []

    def meanwhile(_: str) -> None:
        with pytest.raises(UserError) as refused:
            build(plan, tmp_path / "out", lambda _: None)
        refusals.append(str(refused.value))

    card = build(plan, tmp_path / "out", meanwhile)

    assert card["outcome"] == "made"
    assert refusals
    assert all("is being made by another command: give yours again" in one for one in refusals)
    assert build(plan, tmp_path / "out", lambda _: None)["outcome"] == "present"
    assert [path.name for path in tmp_path.glob(".out*")] == []


def test_what_differs_from_a_folder_that_is_there_is_named_as_it_is_typed(tmp_path: Path) -> None:
    out, file = tmp_path / "out", write(tmp_path / "a.jsonl", squad(10))
    prepare("memalpha", out, file)
    with pytest.raises(UserError, match=r"prepared with --test-share 0\.25, not 0\.5; with --seed 1, not 2: choose"):
        prepare("memalpha", out, file, test_share=0.5, seed=2)
    with pytest.raises(UserError, match="prepared for memalpha, not for memagent: choose"):
        prepare("memagent", out, file)
    write(file, squad(14))
    with pytest.raises(UserError, match=r"prepared when a\.jsonl held something else: choose"):
        prepare("memalpha", out, file)


def test_a_folder_of_other_inputs_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare("memalpha", out, write(tmp_path / "a.jsonl", squad(10)))
    other = write(tmp_path / "b.jsonl", squad(14))
    with pytest.raises(UserError, match=r"was prepared from a\.jsonl and without b\.jsonl: choose .*--force"):
        prepare("memalpha", out, other)
    assert prepare("memalpha", out, other, force=True)["outcome"] == "made"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        prepare("memalpha", tmp_path / "mine", other, force=True)


@pytest.mark.parametrize("name", ["hotpot.json", "hotpot.jsonl", "hotpot.parquet"])
def test_memagent_files_are_read_by_its_task(tmp_path: Path, name: str) -> None:
    items = hotpotqa()
    if name.endswith("parquet"):  # the form of the hub
        for item in items:
            item["context"] = {"title": [t for t, _ in item["context"]], "sentences": [s for _, s in item["context"]]}
            facts = item["supporting_facts"]
            item["supporting_facts"] = {"title": [t for t, _ in facts], "sent_id": [n for _, n in facts]}
            item["id"] = item.pop("_id")
    prepare("memagent", tmp_path / "out", write(tmp_path / name, items))
    source = HotpotQA(HotpotqaConfig(path=str(tmp_path / "out"), num_documents=5), seed=1)

    task = source.train(0)
    assert task.answers[0] in task.context
    assert source.train_size + source.num_heldout("dev") + source.num_heldout("test") == 40


def test_a_folder_of_our_hotpotqa_files_is_an_input_like_any_other(tmp_path: Path) -> None:
    prepare("memagent", tmp_path / "ours", write(tmp_path / "h.json", hotpotqa(40)))
    card = prepare("memalpha", tmp_path / "out", tmp_path / "ours")
    assert [one["style"] for one in card["inputs"]] == ["hotpotqa"]
    (whole,) = (prepare("memalpha", tmp_path / "direct", tmp_path / "h.json")["files"],)
    assert card["files"]["train.jsonl"]["rows"] == whole["train.jsonl"]["rows"]
    with pytest.raises(UserError, match="looks like hotpotqa; this command wants math"):
        make_plan("math", [tmp_path / "ours"], SHAPE, 0.1, 0, 1)


def test_memagent_takes_one_question_of_each_squad_paragraph(tmp_path: Path) -> None:
    card = prepare("memagent", tmp_path / "out", write(tmp_path / "squad.jsonl", squad()))

    assert card["files"]["questions.jsonl"]["rows"] == 40
    assert card["left_out"] == 40


def test_squads_nested_file_is_read_as_that_of_the_hub(tmp_path: Path) -> None:
    data = [
        {
            "title": f"Article {a}",
            "paragraphs": [
                {
                    "context": row["context"],
                    "qas": [{"id": row["id"], "question": row["question"], "answers": [{"text": "x"}]}],
                }
                for row in squad()
                if row["title"] == f"Article {a}"
            ],
        }
        for a in range(20)
    ]
    nested = tmp_path / "dev-v1.1.json"
    nested.write_text(json.dumps({"version": "1.1", "data": data}))

    assert prepare("memagent", tmp_path / "out", nested)["files"]["questions.jsonl"]["rows"] == 40


def test_math_files_have_areals_schema_and_every_problem_once(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1?", "answer": f"So it is <<{n}+1={n + 1}>>\n#### 1,{n:03d}"} for n in range(20)]
    rows += [{"question": "0+1?", "answer": "#### 9"}, {"question": "unknown", "answer": ""}]
    amc = [{"problem": "What is 27?", "answer": 27.0}, {"prompt": "p", "problem": None, "answer": r"\boxed{x}"}]
    card = prepare("math", tmp_path / "out", write(tmp_path / "g.jsonl", rows), write(tmp_path / "a.jsonl", amc))
    made = [json.loads(line) for path in (tmp_path / "out").glob("*.jsonl") for line in path.open()]

    assert len(made) == 22
    assert card["left_out"] == 2
    assert {"prompt": "3+1?", "solutions": [r"\boxed{1003}"]}.items() <= next(
        r for r in made if r["prompt"] == "3+1?"
    ).items()
    assert [r["solutions"] for r in made if r["prompt"] == "What is 27?"] == [[r"\boxed{27}"]]
    assert all(set(r) == {"prompt", "task", "query_id", "solutions"} for r in made)


def test_real_questions_of_hotpotqa_and_gsm8k(tmp_path: Path, shared_data: Path) -> None:
    card = prepare("math", tmp_path / "m", shared_data / "math" / "gsm8k_test.jsonl.gz")

    assert sum(facts["rows"] for facts in card["files"].values()) == 1319


def test_keywords_are_names_that_both_hold() -> None:
    text = "Call me Ishmael. The ship of Captain Ahab left Nantucket; the whale was white."
    summary = "Call it a hunt. When the ship leaves Nantucket, Captain Ahab and Ishmael sail. Then Queequeg dies."

    assert set(keywords(text, summary)) == {"Captain Ahab", "Nantucket", "Ishmael"}  # "Call" only begins a sentence
    assert keywords(text, "Nothing of it.") == ()


def test_chunks_hold_whole_passages_and_cut_only_what_is_too_long() -> None:
    assert pack(["a b", "c d", "e"], 4) == ["a b\n\nc d", "e"]
    assert pack(["a b c d e"], 2) == ["a b", "c d", "e"]
    assert pack([], 3) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chunks": "no json", "questions_and_answers": "[]"}, "column 'chunks' is no JSON"),
        ({"chunks": '{"a": 1}', "questions_and_answers": "[]"}, "must be a list of texts, not an object"),
        ({"chunks": "[1]", "questions_and_answers": "[]"}, "holds a number"),
        ({"chunks": '[" "]', "questions_and_answers": "[]"}, "has no text"),
        ({"chunks": '["a"]', "questions_and_answers": "[]"}, "has no question.*remove the row"),
        ({"chunks": '["a"]', "questions_and_answers": '["q"]'}, "must be an object with question and answer"),
        ({"chunks": '["a"]', "questions_and_answers": '[{"question": "", "answer": "x"}]'}, "has no text"),
        (
            {"chunks": '["a"]', "questions_and_answers": '[{"question": "q", "answer": null}]'},
            "must be a text, a number",
        ),
        ({"questions_and_answers": "[]"}, "column 'chunks' is missing"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = {"instance_id": "a", "data_source": "squad", "chunks": '["t"]'}
    good["questions_and_answers"] = '[{"question": "q", "answer": 3}]'
    path = write(tmp_path / "train.jsonl", [good, {"instance_id": "b", "data_source": "squad", **row}])

    with pytest.raises(UserError, match=rf"train\.jsonl, line 2: .*{message}"):
        read_items(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"colour": 1}\n', "are of no known style"),
        ("", "is empty"),
        ("[]", "has no items"),
        ('{"question": "q", "answer": "a"}\n', "looks like math; this command wants"),
        ('{"question": "q", "context": 3, "supporting_facts": [], "answer": "a"}\n', "context must be"),
    ],
)
def test_inputs_that_cannot_be_used_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text(content)

    with pytest.raises(UserError, match=message):
        prepare("memalpha", tmp_path / "out", path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["reading", "memagent"])
def test_memagents_published_files_need_no_preparing(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "hotpotqa_train_32k.parquet"
    row = {"prompt": [{"role": "user", "content": "Who?"}], "context": "Document 1:\nA\nB", "reward_model": {"x": 1}}
    parquet.write_table(arrow.Table.from_pylist([row]), file)
    for place in (file, tmp_path):
        with pytest.raises(UserError, match=r"needs no preparing: clusterkit train .* --task hotpotqa task\.path=FILE"):
            make_plan(kind, [place], Shape(), 0.1, 0, 1)


def test_a_damaged_parquet_file_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1" + b"x" * 100)

    with pytest.raises(UserError, match="damaged Parquet file"):
        read_items(path)


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_a_pointer_in_place_of_the_data_is_said_to_be_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")

    with pytest.raises(UserError, match=r"is a Git LFS pointer.*git lfs pull"):
        read_items(path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"<html>"])
def test_what_is_called_parquet_and_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(content)

    with pytest.raises(UserError, match="no Parquet file"):
        read_items(path)


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("math", "--traced-share 0.5", "--traced-share is for reading, and changes nothing of math: leave it out"),
        ("math", "--trace-distractors 0.5", "--trace-distractors is for reading, and changes nothing of math"),
        ("memagent", "--seed 1", "--seed is for memalpha, math, reading, and changes nothing of memagent"),
        ("memagent", "--test-share 0.1", "--test-share is for memalpha, math, reading, and"),
        ("reading", "--max-per-source 5", "--max-per-source is for memagent, memalpha, math, and"),
        ("reading", "--chunk-words 50", "--chunk-words is for memalpha, and"),
    ],
)
def test_an_option_that_a_kind_has_no_use_for_is_refused_by_name(
    tmp_path: Path, kind: str, words: str, message: str
) -> None:
    command = ["data", "prepare", kind, "--from", str(tmp_path / "none.json"), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, [*command, *words.split()], catch_exceptions=False)


def test_what_a_folder_depends_on_are_the_options_of_its_kind(tmp_path: Path) -> None:
    sums = write(tmp_path / "sums.jsonl", [{"question": f"{n} + 1", "answer": f"#### {n + 1}"} for n in range(20)])
    for kind, file in (("memagent", None), ("memalpha", None), ("math", sums)):
        plan = make_plan(kind, [file or write(tmp_path / "squad.jsonl", squad())], SHAPE, 0.25, 0, 1)
        assert set(plan.settings) == SETTINGS[kind]
