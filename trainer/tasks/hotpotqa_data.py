"""HotpotQA questions and their documents as files on disk: found, read, checked.

A folder holds `questions.jsonl` (id, question, answers, supporting, own_documents; source and evidence may be missing)
and `documents.jsonl` (id, title, text), each plain or gzipped. `supporting` and `own_documents` list document ids,
`evidence` the sentence of each supporting document that proves the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.assets import data_places
from trainer.errors import UserError
from trainer.tasks.jsonl import Row, read_rows

QUESTIONS = "questions.jsonl"
DOCUMENTS = "documents.jsonl"
GENERATED = ("cloze", "chain", "comparison", "fact")
"""Sources of questions that `clusterkit data prepare reading` makes by rule."""
HOW_TO_GET = (
    "To get it: clusterkit assets get hotpotqa. Data of your own: set task.path (eval: --data-path) to its folder, "
    "which clusterkit data prepare reading --from FOLDER --out OUT makes of texts"
)


@dataclass(frozen=True, slots=True)
class Document:
    """One Wikipedia paragraph. Two documents with an equal `key` read the same."""

    id: str
    title: str
    text: str
    key: str

    def render(self) -> str:
        """Title line, then the paragraph."""
        return f"{self.title}\n{self.text}"


def render(documents: Iterable[Document]) -> str:
    """Text of several documents, numbered from 1."""
    return "\n\n".join(render_one(number, d.title, d.text) for number, d in enumerate(documents, start=1))


def render_one(number: int, title: str, text: str) -> str:
    """Text of one document among several."""
    return f"Document {number}:\n{title}\n{text}"


@dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Document, ...]  # the paragraphs that answer it
    own: tuple[Document, ...]  # its own paragraphs, these among them; no two read the same
    source: str
    evidence: tuple[str, ...] = ()
    """A sentence of each of `gold` that proves the answer; empty where the data name none."""
    traced: bool = True
    """False where `data prepare reading` kept a training question out of the examples of a supervised start."""

    @property
    def form(self) -> str:
        """What kind of answer is wanted: yes_no, or span (words of a document). Half of yes_no is right by chance."""
        return "yes_no" if is_yes_no(self.answers) else "span"


def is_yes_no(answers: Iterable[str]) -> bool:
    """Whether yes and no are the only answers."""
    return {answer.strip().lower() for answer in answers} <= {"yes", "no"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Everything in a folder. `documents` holds one of those that read the same, in the file's order."""

    questions: list[Question]
    documents: list[Document]


def find_folder(path: str | None, cache_dir: str = "") -> Path:
    """Folder of the data: `path`, or the first of the usual places (`assets.data_places`) that has questions.

    Raises:
        UserError: lists where it looked.
    """
    if path:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            what = "is a file; give the folder that holds it" if folder.exists() else "there is no such folder"
            raise UserError(f"task.path={path}: {what}. {HOW_TO_GET}")
        return folder
    places = data_places("hotpotqa", cache_dir)
    for place in places:
        if has_data(place):
            return place
    raise UserError(f"no HotpotQA data; looked in {', '.join(map(str, places))}. {HOW_TO_GET}")


def has_data(folder: Path) -> bool:
    """Whether a folder has questions, as a whole or split already."""
    return _has_questions(folder) or is_prepared(folder)


def is_prepared(folder: Path) -> bool:
    """Whether a folder is of `clusterkit data prepare reading`: each split with questions and documents of its own."""
    return all(_has_questions(folder / name) for name in ("train", "dev", "test"))


def _has_questions(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (QUESTIONS, f"{QUESTIONS}.gz"))


def load_corpus(folder: Path) -> Corpus:
    """Read and check a folder. Raises UserError that names the file, and the line where there is one."""
    documents, by_id = _read_documents(find_file(folder, DOCUMENTS))
    questions = list(_read_questions(find_file(folder, QUESTIONS), by_id))
    return Corpus(questions, documents)


def find_file(folder: Path, name: str) -> Path:
    """`name` in `folder`, or else `name.gz`. Raises UserError when neither is there."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.exists():
            return candidate
    raise UserError(f"{folder} holds neither {name} nor {name}.gz. {HOW_TO_GET}")


def document_key(title: str, text: str) -> str:
    """What two documents that differ only in whitespace (or whose texts are equal under two titles) have in common."""
    return " ".join(text.split()) or " ".join(title.split())


def distinct(documents: Iterable[Document], preferred: Iterable[Document] = ()) -> tuple[Document, ...]:
    """One of those documents that read the same, in order: the first, or the one that is also in `preferred`."""
    chosen: dict[str, Document] = {}
    for document in documents:
        chosen.setdefault(document.key, document)
    for document in preferred:
        chosen[document.key] = document
    return tuple(chosen.values())


def _read_documents(path: Path) -> tuple[list[Document], dict[str, Document]]:
    by_id: dict[str, Document] = {}
    by_key: dict[str, Document] = {}
    for row in read_rows(path):
        title, text = row.text("title"), row.text("text")
        document = Document(_new_id(row, by_id), title, text, document_key(title, text))
        # The second id of one and the same text stands for the first document.
        by_id[document.id] = document
        by_key.setdefault(document.key, document)
    return list(by_key.values()), by_id


def _read_questions(path: Path, documents: dict[str, Document]) -> Iterator[Question]:
    seen: dict[str, Question] = {}
    for row in read_rows(path):
        own_ids, gold_ids = row.texts("own_documents"), row.texts("supporting")
        for document_id in (*own_ids, *gold_ids):
            if document_id not in documents:
                raise row.error(f"unknown document id '{document_id}': {DOCUMENTS} has no row with it")
        for document_id in gold_ids:
            if document_id not in own_ids:
                raise row.error(
                    f"supporting document '{document_id}' is not among own_documents: the answer could not be found"
                )
        gold = distinct(documents[i] for i in gold_ids)
        question = Question(
            id=_new_id(row, seen),
            question=row.text("question"),
            answers=row.texts("answers"),
            gold=gold,
            own=distinct((documents[i] for i in own_ids), preferred=gold),
            source=row.text("source", default=""),
            evidence=_evidence(row, [documents[i] for i in gold_ids], gold),
            traced=row.fields.get("traced") is not False,
        )
        seen[question.id] = question
        yield question


def _evidence(row: Row, supporting: Sequence[Document], gold: Sequence[Document]) -> tuple[str, ...]:
    """Return the named sentence of each gold document; empty where the column is missing, or is something else."""
    named = row.fields.get("evidence")
    if not isinstance(named, list) or len(named) != len(supporting) or not all(isinstance(one, str) for one in named):
        return ()
    by_key = dict(zip((document.key for document in supporting), named, strict=True))
    found = tuple(by_key[document.key] for document in gold)
    return found if all(found) else ()


def _new_id(row: Row, known: dict[str, Document] | dict[str, Question]) -> str:
    name = row.text("id")
    if name in known:
        raise row.error(f"id '{name}' occurs a second time")
    return name
