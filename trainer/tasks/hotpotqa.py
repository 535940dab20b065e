"""HotpotQA (Yang et al. 2018) with long contexts: a question's own paragraphs among many others.

The layout of a context follows MemAgent's data script, save that every item is shuffled with a seed of its own. That
script shuffles every item with one and the same seed, so that the own paragraphs stand in the same slots each time and
a model can learn where to look instead of what to look for; `compat_upstream` brings that back, for comparisons.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache

from trainer.config_tasks import DocumentsConfig
from trainer.errors import UserError
from trainer.seeding import derive_seed, shuffled_numbers
from trainer.tasks.base import RowSource, Split, TaskSource
from trainer.tasks.evidence import evidence_of
from trainer.tasks.hotpotqa_data import GENERATED, Question, find_folder, render
from trainer.tasks.hotpotqa_published import UPSTREAM_SHUFFLE_SEED, PublishedHotpotQA, published_file
from trainer.tasks.hotpotqa_split import Side, draw_documents, load_sides
from trainer.types import Task


def make_hotpotqa(config: DocumentsConfig, seed: int, cache_dir: str = "") -> TaskSource:
    """The task source of a folder of ours, or of MemAgent's published files. Raises UserError as both do."""
    published = published_file(config.path)
    if published and config.curriculum:
        raise UserError(
            f"task.curriculum={config.curriculum} draws contexts of other lengths from a folder of questions.jsonl and "
            f"documents.jsonl, and {published} has its own contexts: leave it out, or set task.path to such a folder"
        )
    if published and config.real_share is not None:
        raise UserError(
            f"task.real_share={config.real_share} is for a folder of `clusterkit data prepare reading`, and the "
            f"questions of {published} are all of one kind: leave it out, or set task.path to such a folder"
        )
    return PublishedHotpotQA(config, seed, published) if published else HotpotQA(config, seed, cache_dir)


def documents_of_task(config: DocumentsConfig, index: int) -> int:
    """Documents in the context of training task number `index` of a run; it depends on nothing else."""
    stage = index // config.curriculum_tasks
    return config.curriculum[stage] if stage < len(config.curriculum) else config.num_documents


class HotpotQA(RowSource[Question]):
    """TaskSource over a folder of HotpotQA questions and documents; every epoch has other contexts, too.

    Raises:
        UserError: data are missing or unusable, or more documents are asked for than there are.
    """

    rows_are = "questions"

    def __init__(self, config: DocumentsConfig, seed: int, cache_dir: str = "") -> None:
        self.config, self.trained_documents = config, config.num_documents
        self.folder = find_folder(config.path, cache_dir)
        self.sides = load_sides(self.folder, config.eval_fraction)
        self._check()
        # Real questions first: a score over the first few is theirs.
        heldout = {
            "dev": sorted(self.sides.dev.questions, key=_is_made),
            "test": sorted(self.sides.test.questions, key=_is_made),
        }
        train = self.sides.train.questions[: config.train_size]
        super().__init__("hotpotqa", seed, self.folder, train, heldout)
        self._kind_order = lru_cache(maxsize=4)(shuffled_numbers)

    def set_rows(self, train: Sequence[Question], heldout: Mapping[str, Sequence[Question]]) -> None:
        """See RowSource."""
        super().set_rows(train, heldout)
        real = [row for row in train if not _is_made(row)]
        # Where the supervised start left some out, they alone: it knows the others by heart.
        self._kinds = [row for row in real if not row.traced] or real, [row for row in train if _is_made(row)]

    def train_row(self, index: int) -> tuple[Question, int]:
        """See RowSource; with task.real_share, real questions and made ones have an order and epochs of their own."""
        share, (real, made) = self.config.real_share, self._kinds
        if share is None or not real or not made:
            return super().train_row(index)
        before = math.floor(index * share)
        is_real = math.floor((index + 1) * share) > before
        rows, number = (real, before) if is_real else (made, index - before)
        epoch, place = divmod(number, len(rows))
        kind = "real" if is_real else "made"
        return rows[self._kind_order(len(rows), f"hotpotqa-{kind}-epoch", self.seed, epoch)[place]], epoch

    def train(self, index: int) -> Task:
        """See TaskSource; the first contexts are as long as the curriculum says."""
        row, epoch = self.train_row(index)
        return self._made(f"train-{row.id}-{epoch}", row, "train", epoch, documents_of_task(self.config, index))

    def heldout(self, split: Split, index: int, chunks: int = 0) -> Task:
        """See TaskSource; chunks is the number of documents.

        Raises:
            UserError: the split has no such task, or not so many documents.
        """
        if not chunks or chunks == self.config.num_documents:
            return super().heldout(split, index)
        side: Side = getattr(self.sides, split)
        if chunks > len(side.pool):
            raise UserError(
                f"contexts of {chunks} documents are asked for (eval.final_documents), and the {split} split of "
                f"{self.folder} has {len(side.pool)} documents: lower it"
            )
        row = self.heldout_row(split, index)
        if chunks < len(row.gold):
            raise UserError(
                f"contexts of {chunks} documents are asked for (eval.final_documents), and question {row.id} of the "
                f"{split} split of {self.folder} needs {len(row.gold)}: raise it"
            )
        return self._made(f"{split}-{row.id}", row, split, 0, chunks)

    def asked(self, row: Question) -> Task:
        """See RowSource."""
        return Task(row.id, row.question, row.answers)

    def make(self, task_id: str, row: Question, split: str, epoch: int) -> Task:
        """See RowSource."""
        return self._made(task_id, row, split, epoch, self.config.num_documents)

    def _made(self, task_id: str, row: Question, split: str, epoch: int, size: int) -> Task:
        name = f"hotpotqa-{'train' if split == 'train' else 'heldout'}"
        parts = (self.seed, epoch) if split == "train" else ()
        rng = random.Random(derive_seed(name, row.id, size, *parts))
        documents = draw_documents(rng, row, getattr(self.sides, split), size)
        if self.config.compat_upstream:
            random.Random(UPSTREAM_SHUFFLE_SEED).shuffle(documents)
        else:
            rng.shuffle(documents)
        gold_keys = {document.key for document in row.gold}
        positions = [number for number, document in enumerate(documents, start=1) if document.key in gold_keys]
        return Task(
            id=task_id,
            question=row.question,
            answers=row.answers,
            context=render(documents),
            meta={
                "source": row.source,
                "form": row.form,
                "num_documents": len(documents),
                # As in the labels, from 1.
                "gold_documents": " ".join(map(str, positions)),
            },
            evidence=evidence_of(row),
        )

    def _check(self) -> None:
        sides, fraction = self.sides, self.config.eval_fraction
        if not sides.train.questions:
            raise UserError(f"{self.folder}: no question is left for training: lower task.eval_fraction={fraction}")
        if not sides.dev.questions and not sides.test.questions:
            raise UserError(f"{self.folder}: no question is held out: raise task.eval_fraction={fraction}")
        held = min(len(sides.dev.pool), len(sides.test.pool))
        largest = min(len(sides.train.pool), held)
        if self.config.num_documents > largest:
            raise UserError(
                f"task.num_documents={self.config.num_documents} is more than {self.folder} has: "
                f"{len(sides.train.pool)} documents are for training and {held} are held out; "
                f"choose at most {largest}"
            )
        if any(size > len(sides.train.pool) for size in self.config.curriculum):
            raise UserError(
                f"task.curriculum={self.config.curriculum}: {self.folder} has {len(sides.train.pool)} documents for "
                "training: lower its numbers"
            )


def _is_made(question: Question) -> bool:
    """Whether a rule made it (`clusterkit data prepare reading`)."""
    return question.source in GENERATED
