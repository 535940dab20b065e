"""HotpotQA (Yang et al. 2018) with long contexts: a question's own paragraphs among many others.

The layout of a context follows MemAgent's data script, save that every item is shuffled with a seed of its own. That
script shuffles every item with one and the same seed, so that the own paragraphs stand in the same slots each time and
a model can learn where to look instead of what to look for; `compat_upstream` brings that back, for comparisons.
"""

from __future__ import annotations

import random
from functools import lru_cache

from trainer.config_tasks import DocumentsConfig
from trainer.errors import UserError
from trainer.seeding import derive_seed
from trainer.tasks.base import Split
from trainer.tasks.hotpotqa_data import Document, Question, find_folder, load_corpus
from trainer.tasks.hotpotqa_split import Side, split_corpus
from trainer.types import Task

UPSTREAM_SHUFFLE_SEED = 4


class HotpotQA:
    """TaskSource over a folder of HotpotQA questions and documents.

    config: the task section; path, num_documents, eval_fraction, train_size and compat_upstream are read. seed: of the
    run; held-out tasks do not depend on it. cache_dir: as in RunConfig. Raises UserError for data that is missing or
    unusable, and for more documents than there are.
    """

    def __init__(self, config: DocumentsConfig, seed: int, cache_dir: str = "") -> None:
        self.config = config
        self.seed = seed
        self.folder = find_folder(config.path, cache_dir)
        self.sides = split_corpus(load_corpus(self.folder), config.eval_fraction)
        self._check()
        self._questions = self.sides.train.questions[: config.train_size]
        self.train_size = len(self._questions)
        self._order = lru_cache(maxsize=2)(self._shuffled_order)

    def train(self, index: int) -> Task:
        """Training task `index`: another question order and other contexts in every epoch."""
        epoch, position = divmod(index, self.train_size)
        question = self._questions[self._order(epoch)[position]]
        seed = derive_seed("hotpotqa-train", question.id, self.config.num_documents, self.seed, epoch)
        return self._task(f"train-{question.id}-{epoch}", question, self.sides.train, seed)

    def heldout(self, split: Split, index: int, chunks: int = 0) -> Task:  # noqa: ARG002 (length is num_documents)
        """Held-out task `index` of a split, from 0: the same question and context in every run.

        Raises UserError when the split has no such task.
        """
        side = self._side(split)
        if not 0 <= index < len(side.questions):
            raise UserError(
                f"the {split} split of {self.folder} has {len(side.questions)} questions; there is no number {index} "
                "(counted from 0): lower eval.num_tasks or raise task.eval_fraction"
            )
        question = side.questions[index]
        seed = derive_seed("hotpotqa-heldout", question.id, self.config.num_documents)
        return self._task(f"{split}-{question.id}", question, side, seed)

    def num_heldout(self, split: Split) -> int:
        """Questions in a held-out split."""
        return len(self._side(split).questions)

    def describe(self) -> str:
        """One line for the log: where the data is, what each split holds and what was left out to keep them apart."""
        sides = self.sides
        return (
            f"hotpotqa: {self.folder}: {self.train_size} training, {len(sides.dev.questions)} dev and "
            f"{len(sides.test.questions)} test questions; {len(sides.train.pool)} training and {len(sides.test.pool)} "
            f"held-out documents, none in both; {sides.dropped} training questions dropped because a held-out one owns "
            f"a gold document of theirs, {sides.trimmed} lost {sides.trimmed_documents} other documents for that reason"
        )

    def _side(self, split: Split) -> Side:
        return self.sides.dev if split == "dev" else self.sides.test

    def _check(self) -> None:
        sides, fraction = self.sides, self.config.eval_fraction
        if not sides.train.questions:
            raise UserError(f"{self.folder}: no question is left for training: lower task.eval_fraction={fraction}")
        if not sides.dev.questions and not sides.test.questions:
            raise UserError(f"{self.folder}: no question is held out: raise task.eval_fraction={fraction}")
        largest = min(len(sides.train.pool), len(sides.test.pool))
        if self.config.num_documents > largest:
            raise UserError(
                f"task.num_documents={self.config.num_documents} is more than {self.folder} has: "
                f"{len(sides.train.pool)} documents are for training and {len(sides.test.pool)} are held out; "
                f"choose at most {largest}"
            )

    def _shuffled_order(self, epoch: int) -> list[int]:
        order = list(range(self.train_size))
        random.Random(derive_seed("hotpotqa-epoch", self.seed, epoch)).shuffle(order)
        return order

    def _task(self, task_id: str, question: Question, side: Side, seed: int) -> Task:
        rng = random.Random(seed)
        documents = self._draw(rng, question, side)
        if self.config.compat_upstream:
            random.Random(UPSTREAM_SHUFFLE_SEED).shuffle(documents)
        else:
            rng.shuffle(documents)
        gold_keys = {document.key for document in question.gold}
        positions = [number for number, document in enumerate(documents, start=1) if document.key in gold_keys]
        return Task(
            id=task_id,
            question=question.question,
            answers=question.answers,
            context="\n\n".join(f"Document {number}:\n{d.render()}" for number, d in enumerate(documents, start=1)),
            meta={
                "source": question.source,
                "num_documents": len(documents),
                # As in the labels, from 1.
                "gold_documents": " ".join(map(str, positions)),
            },
        )

    def _draw(self, rng: random.Random, question: Question, side: Side) -> list[Document]:
        """num_documents documents, own ones first; when not all of those fit, the gold ones and what else does."""
        size = self.config.num_documents
        gold_keys = {document.key for document in question.gold}
        room = size - len(question.gold)
        if room < 0:
            raise UserError(
                f"task.num_documents={size}: question {question.id} has {len(question.gold)} gold documents: "
                f"choose at least {len(question.gold)}"
            )
        own: list[Document] = []
        for document in question.own:
            if document.key in gold_keys:
                own.append(document)
            elif room > 0:
                own.append(document)
                room -= 1
        own_keys = {document.key for document in question.own}
        wanted = size - len(own)
        # Every own document may be among those drawn: draw so many more.
        drawn = rng.sample(side.pool, min(len(side.pool), wanted + len(own_keys)))
        return own + [document for document in drawn if document.key not in own_keys][:wanted]
