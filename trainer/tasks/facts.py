"""Facts to be remembered: documents as in recall, and several questions after everything was read.

While the agent reads it does not know what will be asked, so the questions measure the share of the facts that is in
the final memory. Keys of questions occur once in a document; other keys may repeat once a document has more facts than
there are keys.
"""

from __future__ import annotations

import random

from trainer.config_tasks import QuestionsConfig
from trainer.tasks.recall import Fact, Recall, sentence_of
from trainer.types import Evidence, Question, Task

SOURCE = "facts"


class Facts(Recall[QuestionsConfig]):
    """TaskSource of generated documents with several questions each; see Recall for splits and vocabulary."""

    def _make(self, task_id: str, split: str, rng: random.Random, chunks: int) -> Task:
        config = self.config
        count = chunks or rng.randint(config.min_chunks, config.max_chunks)
        places = [(chunk, place) for chunk in range(count) for place in range(config.facts_per_chunk)]
        asked_count = min(config.num_questions, len(places), len(self.keys) // 2)
        asked_places = set(rng.sample(places, asked_count))
        drawn = rng.sample(self.keys, len(self.keys))
        question_keys, other_keys = drawn[:asked_count], drawn[asked_count:]
        questions: list[Fact] = []
        others: list[str] = []
        sections = []
        for chunk in range(count):
            used: set[str] = set()
            facts = []
            for place in range(config.facts_per_chunk):
                if (chunk, place) in asked_places:
                    fact = self.fact(rng, split, question_keys.pop(), used)
                    questions.append(fact)
                else:
                    if not others:
                        others = rng.sample(other_keys, len(other_keys))
                    fact = self.fact(rng, "train", others.pop(), used)
                facts.append(fact)
            sections.append(self.section(rng, facts))
        asked_for = tuple(Question(key, (value,)) for key, value in questions)
        return Task(
            id=task_id,
            question=asked_for[0].question,
            answers=asked_for[0].answers,
            chunks=tuple(sections),
            meta={"source": SOURCE, "chunks": count},
            questions=asked_for,
            evidence=tuple(Evidence("", sentence_of(fact)) for fact in questions),
        )
