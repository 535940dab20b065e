"""HotpotQA as MemAgent published it: Parquet files of questions with whole contexts (BytedTsinghua-SIA/hotpotqa).

A row has the question in `prompt`, its gold answers in `reward_model.ground_truth`, and a `context` of documents
`Document i:` that all files of one length put into the same order (see hotpotqa.py). That order is undone here: a
question's own documents are known by their places, every task shuffles anew, and shorter contexts can be drawn.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.config_tasks import DocumentsConfig
from trainer.errors import UserError
from trainer.seeding import derive_seed, unit_interval
from trainer.tasks.base import RowSource, Split
from trainer.tasks.hotpotqa_data import is_yes_no
from trainer.tasks.hotpotqa_split import split_of
from trainer.tasks.jsonl import Row, kind, read_table
from trainer.types import Task

UPSTREAM_SHUFFLE_SEED = 4
OWN_DOCUMENTS = 10
"""The first documents of a context before it was shuffled: two gold ones and HotpotQA's eight distractors."""
TRAIN = ("hotpotqa_train_32k.parquet", "hotpotqa_train.parquet")
HELDOUT = "hotpotqa_dev.parquet"
COLUMNS = ("prompt", "context", "reward_model")
"""What is read; the files also have leftovers of their filtering, whose nesting some readers refuse."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question. documents: numbers of its documents, its own ones first."""

    id: str
    question: str
    answers: tuple[str, ...]
    documents: array[int]


def published_file(path: str | None) -> Path | None:
    """The training file that `task.path` means: itself, or within a folder; None where it is no such data."""
    if not path:
        return None
    place = Path(path).expanduser()
    if place.suffix == ".parquet":
        if not place.is_file():
            raise UserError(f"task.path={path}: there is no such file")
        return place
    return next((place / name for name in TRAIN if (place / name).is_file()), None)


class PublishedHotpotQA(RowSource[Item]):
    """TaskSource over a published file; hotpotqa_dev.parquet beside it is what is held out, else a share of its own.

    Raises:
        UserError: a file cannot be used, or more documents are asked for than its contexts have.
    """

    rows_are = "questions"

    def __init__(self, config: DocumentsConfig, seed: int, path: Path) -> None:
        self.config, self.trained_documents = config, config.num_documents
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}
        beside = path.with_name(HELDOUT)
        heldout: dict[str, list[Item]] = {"dev": [], "test": []}
        if beside.is_file() and beside != path:
            for item in self._items(beside):
                heldout["dev" if unit_interval("hotpotqa-published", item.id) < 0.5 else "test"].append(item)
        known = {item.id for items in heldout.values() for item in items}
        fraction = 0.0 if known else config.eval_fraction
        train: list[Item] = []
        for item in self._items(path):
            side = split_of(item.id, fraction)
            if side != "train":
                heldout[side].append(item)
            elif item.id not in known:
                train.append(item)
                if len(train) == config.train_size:
                    break
        if not train:
            raise UserError(f"{path}: no question is left for training: lower task.eval_fraction={fraction}")
        self._numbers.clear()
        self._fewest = min(len(item.documents) for item in [*train, *heldout["dev"], *heldout["test"]])
        self._check(path, f"task.num_documents={config.num_documents}", config.num_documents)
        super().__init__("hotpotqa", seed, path, train, heldout)

    def heldout(self, split: Split, index: int, chunks: int = 0) -> Task:
        """See TaskSource; chunks is the number of documents. Raises UserError where contexts have fewer, too."""
        size, row = chunks or self.config.num_documents, self.heldout_row(split, index)
        self._check(self.place, f"eval.final_documents has {size}", size)
        return self._made(f"{split}-{row.id}", row, split, 0, size)

    def asked(self, row: Item) -> Task:
        """See RowSource."""
        return Task(row.id, row.question, row.answers)

    def make(self, task_id: str, row: Item, split: str, epoch: int) -> Task:
        """See RowSource."""
        return self._made(task_id, row, split, epoch, self.config.num_documents)

    def _made(self, task_id: str, row: Item, split: str, epoch: int, size: int) -> Task:
        name = f"hotpotqa-{'train' if split == 'train' else 'heldout'}"
        rng = random.Random(derive_seed(name, row.id, size, *((self.seed, epoch) if split == "train" else ())))
        own, others = row.documents[:OWN_DOCUMENTS], row.documents[OWN_DOCUMENTS:]
        chosen = [*own, *(others if size == len(row.documents) else rng.sample(others, size - len(own)))]
        (random.Random(UPSTREAM_SHUFFLE_SEED) if self.config.compat_upstream else rng).shuffle(chosen)
        texts = (f"Document {place}:\n{self._texts[number]}" for place, number in enumerate(chosen, start=1))
        form = "yes_no" if is_yes_no(row.answers) else "span"
        meta: dict[str, str | int | float] = {"source": "hotpotqa", "form": form, "num_documents": size}
        return Task(task_id, row.question, row.answers, "\n\n".join(texts), meta=meta)

    def _check(self, path: Path, asked: str, size: int) -> None:
        """Raise UserError where contexts have not so many documents. asked: the setting and its value."""
        if not OWN_DOCUMENTS <= size <= self._fewest:
            raise UserError(
                f"{asked}: the contexts of {path} have {self._fewest} documents, {OWN_DOCUMENTS} of them the "
                f"question's own, and which of these answer it is not said: choose {OWN_DOCUMENTS} to {self._fewest}"
            )

    def _items(self, path: Path) -> Iterator[Item]:
        seen = set[str]()
        for row in read_table(path, COLUMNS):
            question, answers = _question(row), _answers(row)
            name = hashlib.sha256(" ".join(question.lower().split()).encode()).hexdigest()[:16]
            if name not in seen:
                seen.add(name)
                yield Item(name, question, answers, self._documents(row))

    def _documents(self, row: Row) -> array[int]:
        """Numbers of a context's documents in the order before the shuffle; each text is kept once."""
        context = row.text("context")
        pieces = f"\n\n{context}".split("\n\nDocument ")[1:]
        texts = []
        for number, piece in enumerate(pieces, start=1):
            label, found, text = piece.partition(":\n")
            if not found or label != str(number):
                raise row.error(
                    f"column 'context' must be documents below Document 1:, Document 2: …, and number {number} is not"
                )
            texts.append(text)
        if len(texts) < OWN_DOCUMENTS:
            raise row.error(f"column 'context' has {len(texts)} documents: MemAgent's have {OWN_DOCUMENTS} and more")
        places = list(range(len(texts)))
        random.Random(UPSTREAM_SHUFFLE_SEED).shuffle(places)
        before = array("l", bytes(array("l").itemsize * len(texts)))
        for place, text in zip(places, texts, strict=True):
            number = self._numbers.setdefault(text, len(self._texts))
            if number == len(self._texts):
                self._texts.append(text)
            before[place] = number
        return before


def _question(row: Row) -> str:
    messages = row.fields.get("prompt")
    last = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, dict) else None
    if not isinstance(content, str) or not content.strip():
        raise row.error(f"column 'prompt' must be a list of messages that ends with the question, not {kind(messages)}")
    return content.strip()


def _answers(row: Row) -> tuple[str, ...]:
    reward = row.fields.get("reward_model")
    golds = reward.get("ground_truth") if isinstance(reward, dict) else None
    golds = [golds] if isinstance(golds, str) else golds
    if not isinstance(golds, list) or not golds or not all(isinstance(one, str) and one.strip() for one in golds):
        raise row.error("column 'reward_model' must hold ground_truth, the gold answers as texts")
    return tuple(golds)
