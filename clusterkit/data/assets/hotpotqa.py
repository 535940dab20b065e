"""Convert HotpotQA's official distractor file, or copy a folder in our schema, for the task hotpotqa.

The official file (https://hotpotqa.github.io, CC BY-SA 4.0) is a JSON list of items
`{_id, question, answer, context: [[title, [sentence, …]], …], supporting_facts: [[title, sentence number], …]}`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clusterkit.data.assets.download import Say, download
from clusterkit.data.assets.manifest import origin
from trainer.errors import UserError
from trainer.tasks.hotpotqa_data import DOCUMENTS, QUESTIONS, find_file, load_corpus
from trainer.tasks.jsonl import kind

DEFAULT_URL = "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json"
DEFAULT_SHA256 = "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea"


def fetch(source: str, folder: Path, say: Say) -> dict[str, Any]:
    """Fill a folder with questions and documents, and check that they load.

    Args:
        source: a URL or file in the official format, or a folder in our schema; empty: the official development set.

    Returns:
        `source`, `questions`, `documents` and `left_out`, for the manifest.

    Raises:
        UserError: the source is missing or not in its format; the message names the file and the item.
        RunError: the download failed.
    """
    address = source or DEFAULT_URL
    details: dict[str, Any] = {"source": origin(address)}
    local = Path(address).expanduser()
    if urlsplit(address).scheme in ("http", "https"):
        raw = folder / "download.json"
        download(address, raw, say, expected_sha256="" if source else DEFAULT_SHA256)
        details["left_out"] = _convert(raw, folder, say)
        raw.unlink()
    elif local.is_dir():
        _copy(local, folder)
    else:
        details["left_out"] = _convert(local, folder, say)
    corpus = load_corpus(folder)
    return {**details, "questions": len(corpus.questions), "documents": len(corpus.documents)}


def _copy(source: Path, folder: Path) -> None:
    missing = [n for n in (QUESTIONS, DOCUMENTS) if not (source / n).exists() and not (source / f"{n}.gz").exists()]
    if missing:
        raise UserError(
            f"--from {source}: the folder lacks {' and '.join(missing)} (or .gz): give a folder with both, or the "
            "official HotpotQA JSON file"
        )
    load_corpus(source)
    for name in (QUESTIONS, DOCUMENTS):
        file = find_file(source, name)
        shutil.copyfile(file, folder / file.name)


def _convert(file: Path, folder: Path, say: Say) -> int:
    """Convert an official file; return how many items were left out (incomplete evidence, or repeated)."""
    items = _read(file)
    say(f"converting {len(items)} questions")
    documents: dict[str, dict[str, str]] = {}
    questions: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, item in enumerate(items, start=1):
        question, paragraphs = _question(item, f"{file}, item {number}")
        if question is None or question["id"] in seen or question["question"] in seen:
            continue
        seen.update((question["id"], question["question"]))
        questions.append(question)
        documents.update((paragraph["id"], paragraph) for paragraph in paragraphs)
    if not questions:
        raise UserError(f"{file}: no item has all its supporting paragraphs: this is not a distractor file of HotpotQA")
    _write(folder / f"{QUESTIONS}.gz", questions)
    _write(folder / f"{DOCUMENTS}.gz", (documents[key] for key in sorted(documents)))
    return len(items) - len(questions)


def _read(file: Path) -> list[Any]:
    try:
        packed = file.suffix == ".gz"
        text = (gzip.decompress(file.read_bytes()) if packed else file.read_bytes()).decode("utf-8-sig")
        items = json.loads(text)
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file or folder") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise UserError(f"{file}: damaged gzip data ({error}): download it again") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file}: not JSON (line {error.lineno}, column {error.colno}: {error.msg}): expected the official HotpotQA"
            " file, or the folder that holds questions.jsonl and documents.jsonl"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: not UTF-8 text ({error})") from error
    if not isinstance(items, list) or not items:
        what = "an empty list" if items == [] else kind(items)
        raise UserError(f"{file} must hold a list of HotpotQA items, not {what}")
    return items


def _question(item: Any, where: str) -> tuple[dict[str, Any] | None, list[dict[str, str]]]:
    """Return an item in our schema, or None if a supporting paragraph is missing; and its paragraphs."""
    if not isinstance(item, dict):
        raise UserError(f"{where}: must be an object, not {kind(item)}")
    columns = {"_id": str, "question": str, "answer": str, "context": list, "supporting_facts": list}
    for column, type_ in columns.items():
        if column not in item:
            hint = " (the test set has no answers: it cannot be trained on)" if column == "answer" else ""
            raise UserError(f"{where}: column '{column}' is missing{hint}")
        if not isinstance(item[column], type_):
            expected = "a string" if type_ is str else "a list"
            raise UserError(f"{where}: column '{column}' must be {expected}, not {kind(item[column])}")
    try:
        paragraphs = [_paragraph(title, sentences) for title, sentences in item["context"]]
        gold_titles = list(dict.fromkeys(str(title) for title, _ in item["supporting_facts"]))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where}: context must be [[title, [sentence, …]], …] and supporting_facts [[title, number], …]"
        ) from error
    paragraphs = [paragraph for paragraph in paragraphs if paragraph["text"]]
    by_title = {paragraph["title"]: paragraph["id"] for paragraph in paragraphs}
    if not gold_titles or not item["answer"].strip() or any(title not in by_title for title in gold_titles):
        return None, []
    question = {
        "id": item["_id"],
        "question": item["question"],
        "answers": [item["answer"]],
        "gold_titles": gold_titles,
        "supporting": [by_title[title] for title in gold_titles],
        "own_documents": list(dict.fromkeys(paragraph["id"] for paragraph in paragraphs)),
        "source": "hotpotqa",
    }
    return question, paragraphs


def _paragraph(title: Any, sentences: Any) -> dict[str, str]:
    if not isinstance(title, str) or not isinstance(sentences, list):
        raise TypeError
    # Sentences of the official file carry their own leading space.
    text = " ".join("".join(sentences).split())
    return {
        "id": hashlib.sha1(f"{title}\n{text}".encode(), usedforsecurity=False).hexdigest()[:12],
        "title": title,
        "text": text,
    }


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    # Without time and name in the header, the same input gives the same bytes.
    with file.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
        for row in rows:
            packed.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
