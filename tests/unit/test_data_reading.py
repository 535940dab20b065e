"""`clusterkit data prepare reading`: the files that it writes, and that nothing of one split is in another."""

from __future__ import annotations

import gzip
import hashlib
import json
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from readingfiles import SMALL, prepare, rows, texts, world
from typer.testing import CliRunner

from clusterkit.capacity.runnable import require_inputs
from clusterkit.cli.main import app
from clusterkit.config.resolve import resolve
from clusterkit.data.datasets.passages import read_passages
from clusterkit.data.datasets.prepare import make_plan
from clusterkit.data.datasets.reading import ReadingShape, mix_text, parse_mix, parse_sizes
from clusterkit.data.datasets.texts import Shape
from evaluation.suites.hqa import build_items
from trainer.config_tasks import HotpotqaConfig
from trainer.errors import UserError
from trainer.evaluate import check_lengths
from trainer.tasks.hotpotqa import HotpotQA
from trainer.tasks.hotpotqa_data import DOCUMENTS, GENERATED, QUESTIONS, document_key

SPLITS = ("train", "dev", "test")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reading")
    (folder / "world.json").write_text(json.dumps(world()))
    prepare(folder / "out", folder / "world.json")
    return folder / "out"


@pytest.fixture
def own_texts(tmp_path: Path) -> Path:
    """A folder of 30 text files of the user's, in folders."""
    folder = tmp_path / "mine"
    (folder / "more").mkdir(parents=True)
    for n in range(30):
        place = folder / "more" if n % 2 else folder
        text = f"# Engine Type{n}\n\nThe Engine Type{n} was built by Karl Fritz{n} in {1900 + n}\nfor the railway.\n\n"
        text += f"It weighs {2000 + n} tons and it was repaired in the works of Little Harbour{n}.\n"
        (place / f"engine_{n}.md").write_text(text)
    (folder / ".hidden").write_bytes(b"\xff\0")
    return folder


def test_no_document_and_no_question_of_one_split_is_in_another(prepared: Path) -> None:
    keys, wordings = {}, {}
    for name in SPLITS:
        documents = {row["id"]: row for row in rows(prepared / name / DOCUMENTS)}
        questions = rows(prepared / name / QUESTIONS)
        keys[name] = {document_key(row["title"], row["text"]) for row in documents.values()}
        wordings[name] = {row["question"].lower() for row in questions}
        assert {row["source"] for row in questions} == {"cloze", "chain", "comparison", "fact", "hotpotqa"}
        for row in questions:
            assert set(row["own_documents"]) <= set(documents)
            for number, sentence in zip(row["supporting"], row["evidence"], strict=True):
                assert sentence in documents[number]["text"]
    for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")):
        assert not keys[one] & keys[other]
        assert not wordings[one] & wordings[other]
    held = {text for name in ("dev", "test") for text in keys[name]}
    assert not any(text in trace.get("context", "") for trace in rows(prepared / "traces.jsonl") for text in held)
    held_questions = wordings["dev"] | wordings["test"]
    assert not any(trace["problem"].lower() in held_questions for trace in rows(prepared / "traces.jsonl"))


def test_what_a_held_out_sentence_says_is_not_asked_for_in_training(tmp_path: Path) -> None:
    same = "Brandt Works is run by Otto Meier for the county of Little Harbour.\n"
    files = {
        f"{n}.md": f"# Engine Type{n}\n\nThe Engine Type{n} was built by Karl Fritz{n} in {1900 + n} for the railway.\n"
        f"{same}"
        for n in range(40)
    }
    prepare(tmp_path / "out", texts(tmp_path / "mine", files))
    asked = {name: rows(tmp_path / "out" / name / QUESTIONS) for name in SPLITS}
    proofs = {name: {(row["answers"][0], *row["evidence"]) for row in found} for name, found in asked.items()}

    assert any("Otto Meier" in proof for proof in proofs["test"])
    assert not any(proofs[one] & proofs[other] for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")))


def test_questions_that_differ_in_punctuation_are_the_same(tmp_path: Path) -> None:
    items = world()
    for item in items:
        item["question"] = f"Where was S.{' ' if item['_id'] in ('h3', 'h7', 'h11') else ''}A. Smith born?"
    (tmp_path / "world.json").write_text(json.dumps(items))
    prepare(tmp_path / "out", tmp_path / "world.json")
    real = [row for name in SPLITS for row in rows(tmp_path / "out" / name / QUESTIONS) if row["source"] == "hotpotqa"]

    assert len(real) == 1


def test_yes_no_questions_are_marked_in_files_tasks_and_suites(prepared: Path) -> None:
    real = [row for name in SPLITS for row in rows(prepared / name / QUESTIONS) if row["source"] == "hotpotqa"]
    source = HotpotQA(HotpotqaConfig(path=str(prepared), num_documents=3), 1)
    tasks = [source.train(index) for index in range(source.train_size)]

    assert {row["form"] for row in real} == {"yes_no", "span"}
    assert all((row["form"] == "yes_no") == (row["answers"] == ["yes"]) for row in real)
    for task in [*tasks, *build_items(prepared, 3)]:
        assert (task.meta["form"] == "yes_no") == (task.answers in (("yes",), ("no",)))


def test_a_run_takes_the_splits_as_they_were_made(prepared: Path) -> None:
    source = HotpotQA(HotpotqaConfig(path=str(prepared), num_documents=3, eval_fraction=0.9), 1)

    for name, number in (("dev", source.num_heldout("dev")), ("test", source.num_heldout("test"))):
        there = rows(prepared / name / QUESTIONS)
        assert {source.heldout(name, i).question for i in range(number)} == {row["question"] for row in there}  # type: ignore[arg-type]
    assert {source.train(i).question for i in range(source.train_size)} == {
        row["question"] for row in rows(prepared / "train" / QUESTIONS)
    }
    asked = {task.question for task in build_items(prepared, 3)}
    assert asked == {row["question"] for row in rows(prepared / "test" / QUESTIONS) if row["source"] == "hotpotqa"}
    with pytest.raises(UserError, match="choose at most"):
        HotpotQA(HotpotqaConfig(path=str(prepared), num_documents=150), 1)


def test_traces_have_their_evidence_in_their_documents_and_the_mix_that_was_asked_for(prepared: Path) -> None:
    traces = rows(prepared / "traces.jsonl")

    kinds = ("cloze", "chain", "comparison", "fact", "real", "final")
    assert [sum(row["kind"] == kind for row in traces) for kind in kinds] == [6, 12, 6, 18, 6, 12]
    assert [row["kind"] for row in traces[:20]].count("fact") == 6
    for row in traces:
        assert row["answer"].startswith("\\boxed{")
        if row["kind"] == "final":
            assert "context" not in row
            continue
        assert row["context"].count("Document ") in (2, 3)
        assert all(f"\n{title}\n" in row["context"] and text in row["context"] for title, text in row["evidence"])


def test_questions_of_a_rare_kind_are_not_repeated_by_the_hundred(tmp_path: Path) -> None:
    notes = {
        f"{n}.md": f"# Note {n}\n\nThe engine {n} was built by Karl Fritz{n} for the railway then.\n"
        for n in range(150)
    }
    works = {  # the only ones that name each other
        f"works{n}.md": f"# Brandt Works{n}\n\n"
        f"The Brandt Works{n} were founded by Otto Meier{n} in {1850 + n} on the river.\n\n"
        f"# Anna Pier{n}\n\nShe later worked for Brandt Works{n} as a clerk for many a year.\n"
        for n in range(5)
    }
    prepare(tmp_path / "out", texts(tmp_path / "mine", notes | works), shape=ReadingShape(traces=4000, sizes=(2,)))
    questions = rows(tmp_path / "out" / "train" / QUESTIONS)
    traces = [row["problem"] for row in rows(tmp_path / "out" / "traces.jsonl") if row["kind"] != "final"]
    times = Counter(traces)

    assert len(traces) == 3200
    assert 1 <= sum(row["source"] == "chain" for row in questions) <= 5
    assert set(times) == {row["question"] for row in questions}
    assert max(times.values()) <= 8 * len(traces) / len(questions) + 1


def test_a_few_questions_make_no_twenty_thousand_traces(tmp_path: Path, own_texts: Path) -> None:
    words = ["data", "prepare", "reading", "--from", str(own_texts), "--out", str(tmp_path / "out"), "--json"]
    mix = ["--trace-mix", "cloze=4,final=1", "--test-share", "0.2", "--per-document", "1"]
    done = CliRunner().invoke(app, [*words, *mix])
    number = sum(row["source"] == "cloze" for row in rows(tmp_path / "out" / "train" / QUESTIONS))
    traces = rows(tmp_path / "out" / "traces.jsonl")
    card = json.loads(done.stdout)

    assert len(traces) == 40 * number < 20000
    assert card["settings"]["traces"] == len(traces)
    assert any(f"{len(traces)} examples, not 20000: 40 for each of the {number} questions" in w for w in card["notes"])
    contexts = {row["context"] for row in traces if "context" in row}
    assert len(contexts) > 0.9 * 0.8 * len(traces), "the same question comes among other documents"


def test_few_training_questions_are_told(tmp_path: Path, own_texts: Path) -> None:
    words = ["data", "prepare", "reading", "--from", str(own_texts), "--out", str(tmp_path / "out"), "--traces", "30"]
    done = CliRunner().invoke(app, [*words, "--test-share", "0.2"])
    number = len(rows(tmp_path / "out" / "train" / QUESTIONS))

    assert f"there are only {number} training questions, which a run learns by heart" in done.stderr


def test_real_questions_can_be_kept_out_of_the_traces_and_are_marked(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "world.json").write_text(json.dumps(world()))
    card = prepare(tmp_path / "out", tmp_path / "world.json", shape=replace(SMALL, traces=400, traced=0.5))

    train = [row for row in rows(tmp_path / "out" / "train/questions.jsonl") if row["source"] not in GENERATED]
    marked = {row["question"] for row in train if row.get("traced") is False}
    asked = {row["problem"] for row in rows(tmp_path / "out" / "traces.jsonl")}
    assert len(marked) == len(train) - round(0.5 * len(train)) > 5
    assert not marked & asked
    assert card["notes"][-1].startswith(f"{len(marked)} real training questions are in no trace")
    assert {row["question"] for row in train} - marked <= asked
    for split in ("dev", "test"):
        same = [rows(folder / split / "questions.jsonl") for folder in (prepared, tmp_path / "out")]
        assert same[0] == same[1]


def test_the_same_inputs_and_seed_make_the_same_bytes_another_seed_others(tmp_path: Path, own_texts: Path) -> None:
    first, again = (prepare(tmp_path / name, own_texts)["files"] for name in "ab")
    other = prepare(tmp_path / "c", own_texts, seed=2)["files"]

    assert first == again
    assert first["traces.jsonl"]["sha256"] != other["traces.jsonl"]["sha256"]
    assert first["test/documents.jsonl"]["sha256"] == other["test/documents.jsonl"]["sha256"]


def test_settings_that_differ_from_those_of_a_folder_are_named_as_they_are_typed(
    tmp_path: Path, own_texts: Path
) -> None:
    prepare(tmp_path / "out", own_texts)
    mixed = replace(SMALL, mix=parse_mix("cloze=3,final=1"), sizes=(2, 5))
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "out", own_texts, shape=mixed)

    assert parse_mix(mix_text(SMALL.mix)) == SMALL.mix
    assert f"with --trace-mix {mix_text(SMALL.mix)}, not cloze=3,final=1;" in str(error.value)
    assert "with --trace-documents 2,3, not 2,5: choose another folder with --out, or" in str(error.value)
    assert mix_text((40, 20, 10, 10, 20)) == "40,20,10,10,20", "of 0.1, without the kinds that have come since"


def test_a_folder_of_texts_becomes_documents_whose_files_are_in_one_split(tmp_path: Path, own_texts: Path) -> None:
    prepare(tmp_path / "out", own_texts, share=0.1)
    there = {name: rows(tmp_path / "out" / name / DOCUMENTS) for name in SPLITS}

    assert {name: len(found) for name, found in there.items()} == {"train": 24, "dev": 3, "test": 3}
    assert {row["title"] for found in there.values() for row in found} == {f"Engine Type{n}" for n in range(30)}
    one = there["train"][0]["text"]
    assert " for the railway. It weighs " in one
    asked = rows(tmp_path / "out" / "train" / QUESTIONS)
    assert any("Karl Fritz" in row["answers"][0] for row in asked)
    assert HotpotQA(HotpotqaConfig(path=str(tmp_path / "out"), num_documents=3), 1).train(0).context


@pytest.mark.parametrize("seed", range(5))
def test_a_share_is_one_of_passages_however_large_the_files_are(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for n in range(40):  # about five passages each, and one to nine
        text = "\n\n".join(
            f"The engine {n} of {k} was built by Karl Fritz{n}. " + "It ran. " * 100 for k in range(n % 9 + 1)
        )
        (folder / f"{seed}-{n}.txt").write_text(text)
    prepare(tmp_path / "files", folder, share=0.1)
    (folder / f"{seed}-book.txt").write_text(
        "\n\n".join(f"The painter John Smith{k} came to Little Town{k}. " + "He slept. " * 80 for k in range(2000))
    )
    prepare(tmp_path / "book", folder, share=0.1)

    for out, whole_files in (("files", True), ("book", False)):
        there = {name: rows(tmp_path / out / name / DOCUMENTS) for name in SPLITS}
        total = sum(map(len, there.values()))
        assert all(0.05 * total <= len(there[name]) <= 0.1 * total + 1 for name in ("dev", "test"))
        titles = [{row["title"].partition(", part ")[0] for row in found} for found in there.values()]
        assert (not titles[0] & titles[1] and not titles[0] & titles[2] and not titles[1] & titles[2]) is whole_files


def test_pictures_beside_the_texts_are_left_out_and_named(
    tmp_path: Path, own_texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = prepare(tmp_path / "texts", own_texts)["files"]
    for name in "abcdefg":
        (own_texts / "more" / f"{name}.png").write_bytes(b"\x89PNG\0\xff")
    prepare_reading = ["data", "prepare", "reading", "--from", str(own_texts), "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(app, [*prepare_reading, "--per-document", "2", "--traces", "60", "--test-share", "0.2"])

    assert told.exit_code == 0
    assert "7 files are not text and were left out (more/a.png, more/b.png, more/c.png" in " ".join(told.output.split())
    for name in ("train/documents.jsonl", "test/documents.jsonl"):
        found = hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
        assert found == expected[name]["sha256"]


def test_what_was_prepared_in_the_folder_of_the_texts_is_no_text_of_it(
    tmp_path: Path, own_texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_texts)
    first = prepare(Path("set"), Path())
    again = prepare(Path("set"), Path())
    (own_texts / "more.md").write_text("# More\n\nThe mill was built by Otto Brandt in 1850 for the old town.\n")
    with pytest.raises(UserError, match="was prepared when mine held something else"):
        prepare(Path("set"), Path())
    other = prepare(tmp_path / "other", own_texts)

    assert (first["outcome"], again["outcome"]) == ("made", "present")
    assert other["inputs"][0]["rows"] == first["inputs"][0]["rows"] + 1 == 31


def test_one_long_text_is_cut_into_passages_between_sentences(tmp_path: Path) -> None:
    book = tmp_path / "my_book.txt"
    book.write_text(
        " ".join(f"In the year {1000 + n} the painter John Smith{n} came to Little Town{n}." for n in range(300))
    )
    passages, _, _ = read_passages(book)

    assert len(passages) > 15
    assert all(len(one.document.text) <= 900 and one.document.text.endswith(".") for one in passages)
    assert [one.document.title for one in passages[:2]] == ["my book", "my book, part 2"]
    prepare(tmp_path / "out", book)
    assert all(rows(tmp_path / "out" / name / QUESTIONS) for name in SPLITS)


def test_headings_are_those_of_markdown_and_restructuredtext_and_no_comments_of_code(tmp_path: Path) -> None:
    text = "# One\n\nFirst.\n\n```sh\n# no heading\nmake it\n```\n\nSecond.\n\n    # none either\n    run\n\nTwo\n~~~\n"
    text += "\nThird.\n\n=====\nThree\n=====\n\nFourth.\n\n---\n\nFifth\nand more.\n---\n"
    (tmp_path / "notes.md").write_text(text)
    passages, _, _ = read_passages(tmp_path / "notes.md")

    assert [(one.document.title, one.document.text) for one in passages] == [
        ("One", "First.\n# no heading\nmake it\nSecond.\n# none either run"),
        ("Two", "Third."),
        ("Three", "Fourth. Fifth and more."),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("book.pdf", b"%PDF-1.4\n1 0 obj", r"book\.pdf is not text in UTF-8 \(byte 1\).*pdftotext"),
        ("book.txt.gz", gzip.compress(b"text"), r"book\.txt\.gz is not text in UTF-8 \(byte 1\): .*\(gunzip\)"),
        ("notes", b"Too little text.", "1 passages of text are too few"),
        ("notes.log", b"", "notes.log has no text"),
        ("rows", b"[1, 2", "not JSON"),
        ("rows.gz", gzip.compress(b"{1, 2"), "not JSON"),
        ("rows.jsonl.gz", gzip.compress(b"no JSON"), "not JSON"),
        ("cut.gz", gzip.compress(b"text")[:12], "damaged gzip data"),
        ("rows.jsonl", b"no JSON", "not JSON"),
    ],
)
def test_one_file_of_any_name_is_read_as_what_it_is(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "out", tmp_path / name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no file with text: name a folder of text files"),
        ({"a.txt": b"  \n"}, "has no file with text"),
        ({"report.pdf": b"%PDF-1.4\n\0\xff"}, r"report\.pdf is not text in UTF-8.*turn it into a text file first"),
        ({"latin.txt": "Köln".encode("latin-1")}, r"latin\.txt is not text in UTF-8 \(byte 2\)"),
        (
            {"a.txt": b"Some text.", **{f"{n}.txt": b"K\xf6ln" for n in range(7)}},
            r"7 files are not text in UTF-8 \(0\.txt, 1\.txt, .*4\.txt, …\): turn such a text into UTF-8 first \(iconv",
        ),
        ({"a.txt": b"Too little text."}, "1 passages of text are too few.*add files"),
    ],
)
def test_folders_that_cannot_be_used_are_refused_in_one_sentence(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        prepare(tmp_path / "out", folder)

    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_texts_without_anything_to_ask_for_are_refused(tmp_path: Path) -> None:
    nothing = {
        f"{n}.txt": f"there is nothing here that could be asked for at all {'and ' * n}so on." for n in range(25)
    }
    with pytest.raises(UserError, match="no question can be made for train"):
        prepare(tmp_path / "out", texts(tmp_path / "mine", nothing))


@pytest.mark.parametrize("text", ["cloze=x", "words=3", "cloze=-1", "cloze=0", "", "cloze=1e9", f"cloze={'9' * 5000}"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    assert parse_mix("real=1,cloze=2") == (2.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    with pytest.raises(UserError, match="--trace-mix") as refused:
        parse_mix(text)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("text", ["1,2", "0", "-2", "2,many", "2.5", "2,,4", "", "2,1000000000", "9" * 5000])
def test_numbers_of_documents_are_at_least_two(tmp_path: Path, own_texts: Path, text: str) -> None:
    assert parse_sizes("2, 8, 16") == (2, 8, 16)
    words = ["data", "prepare", "reading", "--from", str(own_texts), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, f"--trace-documents={text}"])

    assert isinstance(done.exception, UserError)
    assert done.exception.exit_code == 2
    assert str(done.exception).startswith(
        f"--trace-documents {text[:60]}{'…' if len(text) > 60 else ''}: write numbers"
    )
    assert not (tmp_path / "out").exists()


def test_examples_that_are_to_have_more_documents_than_there_are_are_told(tmp_path: Path, own_texts: Path) -> None:
    words = ["data", "prepare", "reading", "--from", str(own_texts), "--traces", "30", "--trace-documents"]
    done = CliRunner().invoke(app, [*words, "2,4000,24", "--out", str(tmp_path / "out")])

    assert done.exit_code == 0, done.output
    assert len(rows(tmp_path / "out" / "train" / DOCUMENTS)) == 24
    told = (
        "--trace-documents 2,4000,24: train has only 24 documents, and an example that is to have 4000 has all of them"
    )
    assert told in done.stderr
    contexts = [row["context"] for row in rows(tmp_path / "out" / "traces.jsonl") if "context" in row]
    assert {text.count(" was built by ") for text in contexts} == {2, 24}
    fitting = CliRunner().invoke(app, [*words, "2,24", "--out", str(tmp_path / "fits")])
    assert "--trace-documents" not in fitting.output


def test_kinds_that_there_are_none_of_leave_their_room_to_questions(tmp_path: Path, own_texts: Path) -> None:
    shape = replace(SMALL, traces=200, mix=parse_mix("cloze=10,comparison=10,real=60,final=20"))
    make = make_plan("reading", [own_texts], Shape(), 0.2, 0, 1, shape).outputs[-1].make
    assert Counter(make(number)["kind"] for number in range(200)) == {"cloze": 160, "final": 40}


def test_the_command_says_what_it_made_and_what_comes_next(tmp_path: Path, own_texts: Path) -> None:
    words = ["data", "prepare", "reading", "--from", str(own_texts), "--out", str(tmp_path / "out"), "--traces", "30"]
    done = CliRunner().invoke(app, [*words, "--test-share", "0.2"])

    assert done.exit_code == 0, done.output
    assert "train/questions.jsonl" in done.output
    assert "rows  rows" not in done.output
    assert f"clusterkit train --preset 135M_read task.path={tmp_path / 'out'}" in done.output
    assert f"clusterkit train --preset 135M_read_cpu task.path={tmp_path / 'out'}" in done.output


def test_what_comes_next_asks_among_no_more_documents_than_are_held_out(tmp_path: Path, own_texts: Path) -> None:
    out = tmp_path / "made of mine"
    words = ["data", "prepare", "reading", "--from", str(own_texts), "--out", str(out), "--traces", "30"]
    done = CliRunner().invoke(app, [*words, "--test-share", "0.2"])
    assert done.exit_code == 0, done.output
    heldout = min(len(rows(out / split / "documents.jsonl")) for split in ("dev", "test"))
    assert 4 <= heldout < 8, "the presets ask among 4, 8, 16 and 32"
    assert f"dev or test has only {heldout} documents" in done.stderr

    for line, preset in zip(
        done.stdout.partition("next: ")[2].splitlines(), ("135M_read", "135M_read_cpu"), strict=True
    ):
        argv = shlex.split(line.partition("clusterkit ")[2])
        assert argv[:3] == ["train", "--preset", preset]
        config = resolve(preset, None, argv[3:]).config
        check_lengths(config, HotpotQA(config.task, config.seed))
        assert all(length < config.task.num_documents for length in config.task.curriculum)

    # Told before anything starts, by a dry run too.
    config = resolve("135M_read_cpu", None, [f"task.path={out}"]).config
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": None})})
    with pytest.raises(UserError, match=f"contexts of 8 documents .* has {heldout} documents: lower it"):
        require_inputs(config)


def test_what_comes_next_takes_no_more_questions_a_step_than_there_are(tmp_path: Path, own_texts: Path) -> None:
    words = ["data", "prepare", "reading", "--from", str(own_texts), "--out", str(tmp_path / "out"), "--traces", "30"]
    done = CliRunner().invoke(app, [*words, "--test-share", "0.4", "--per-document", "1"])
    number = len(rows(tmp_path / "out" / "train" / QUESTIONS))
    gpu, cpu = done.stdout.partition("next: ")[2].splitlines()

    assert 2 <= number < 16
    assert f" rollout.batch_size={number // 2 * 2}" in gpu
    config = resolve("135M_read", None, shlex.split(gpu)[4:]).config
    assert config.rollout.batch_size % config.train.minibatches == 0
    assert "rollout.batch_size" not in cpu, "it takes 2 at a time"


def test_tens_of_thousands_of_questions_come_of_the_real_documents(tmp_path: Path, shared_data: Path) -> None:
    plan = make_plan("reading", [shared_data / "hotpotqa"], Shape(), 0.1, 0, 1, ReadingShape(traces=0))
    counts = {output.name: output.count for output in plan.outputs}

    assert sum(count for name, count in counts.items() if name.endswith(QUESTIONS)) > 30_000
    assert sum(count for name, count in counts.items() if name.endswith(DOCUMENTS)) == 12_839


def test_a_document_under_two_titles_is_one_and_every_question_names_it_so(tmp_path: Path) -> None:
    items = world()
    for title, item in zip(("Lake One", "Lake Two"), items[1:3], strict=True):
        item["context"].append([title, ["The water of the lake is very deep and cold."]])
    file = tmp_path / "items.json"
    file.write_text(json.dumps(items))
    prepare(tmp_path / "out", file)
    found = set()
    for split in SPLITS:
        written = {row["id"] for row in rows(tmp_path / "out" / split / DOCUMENTS)}
        for row in rows(tmp_path / "out" / split / QUESTIONS):
            assert {*row["own_documents"], *row["supporting"]} <= written
            found.add(row["id"])
    assert {"h1", "h2"} <= found
    HotpotQA(HotpotqaConfig(path=str(tmp_path / "out"), num_documents=3), 1)
