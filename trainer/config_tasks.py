"""Section task of a RunConfig: what the policy learns on. See trainer/config.py and trainer/config_choice.py."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from trainer.config_choice import Choice, OwnSection, Section


class TaskConfig(Section):
    """What every task has."""

    name: str
    """recall: generated key-value facts spread over chunks. needles: the same in English, for pretrained models.
    hotpotqa: real questions among real documents. math: problems with an answer that can be checked. sft: examples with
    answers, for trainer.type=sft. facts: as recall, with several questions after everything was read, for
    agent.name=memalpha. memalpha: the same with real documents from files. Or `module:Class`, a class of your own
    (docs/custom.md)."""
    train_size: Annotated[int, Field(ge=1)] = 65536
    """Training tasks in one epoch: the number of generated ones, the most rows of hotpotqa, math, memalpha and sft."""


class SectionsConfig(TaskConfig):
    """Documents that are generated section by section."""

    min_chunks: Annotated[int, Field(ge=1)] = 2
    """Fewest chunks of a training document."""
    max_chunks: Annotated[int, Field(ge=1)] = 4
    """Most chunks of a training document."""
    facts_per_chunk: Annotated[int, Field(ge=1)] = 3
    """Facts in a chunk."""
    filler_per_chunk: Annotated[int, Field(ge=0)] = 4
    """Filler in a chunk: words in recall and facts, sentences in needles."""
    num_keys: Annotated[int, Field(ge=8, le=5000)] = 256
    """Distinct keys (names)."""

    @model_validator(mode="after")
    def _chunks_ordered(self) -> SectionsConfig:
        if self.min_chunks > self.max_chunks:
            raise ValueError(f"min_chunks {self.min_chunks} is larger than max_chunks {self.max_chunks}: lower it")
        return self

    @model_validator(mode="after")
    def _facts_fit(self) -> SectionsConfig:
        self._check_facts()
        return self

    def _check_facts(self) -> None:
        # Of a section, and of a demonstration's two facts beside it.
        if self.facts_per_chunk + 2 > self.num_keys:
            raise ValueError(
                f"facts_per_chunk {self.facts_per_chunk} needs num_keys of at least {self.facts_per_chunk + 2}, not "
                f"{self.num_keys}: raise num_keys"
            )


class WordsConfig(SectionsConfig):
    """Facts `KEY value` among filler words; the warm-up teaches these."""

    num_values: Annotated[int, Field(ge=96, le=128)] = 128
    """Distinct values; the chance of a blind guess is one in this number. With fewer than 96, some keys would have no
    held-out value."""

    def _check_facts(self) -> None:
        # Words within a section, and those of a demonstration's two facts beside it, are distinct; a few must be left.
        if self.facts_per_chunk + 5 > self.num_values:
            raise ValueError(
                f"facts_per_chunk {self.facts_per_chunk} needs num_values of at least {self.facts_per_chunk + 5}, not "
                f"{self.num_values}: raise num_values (128 at most), or lower facts_per_chunk"
            )
        super()._check_facts()

    @property
    def section_tokens(self) -> int:
        """Tokens of one chunk: facts of three tokens plus filler words."""
        return 3 * self.facts_per_chunk + self.filler_per_chunk


class QuestionsConfig(WordsConfig):
    """The same with several questions."""

    num_questions: Annotated[int, Field(ge=1)] = 4
    """Questions about one document."""


class FilesConfig(TaskConfig):
    """Tasks from files, a share of which is held out."""

    path: str | None = None
    """Folder or file of the task's data."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share that is held out."""


class DocumentsConfig(FilesConfig):
    """Questions among documents of which a context is put together."""

    path: str | None = None
    """Folder with questions.jsonl[.gz] and documents.jsonl[.gz], or a Parquet file of MemAgent's, or its folder; empty:
    hotpotqa under /storage/datasets or the asset cache."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the questions (by hash of the id) that is held out, with documents of its own."""
    num_documents: Annotated[int, Field(ge=2)] = 50
    """Documents in one context, those of the question included."""
    curriculum: list[Annotated[int, Field(ge=2)]] = []  # noqa: RUF012 (pydantic copies it)
    """Documents in the first training contexts: each number for `curriculum_tasks` tasks, then num_documents."""
    curriculum_tasks: Annotated[int, Field(ge=1)] = 640
    """Training tasks of each number in `curriculum`: rollout.batch_size times its steps."""
    real_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the training tasks that are real questions, in a folder that also has questions made by rule; empty:
    as many as the folder has. Where it has one kind alone, all are of that kind. Where `data prepare reading
    --traced-share` kept real ones out of the supervised start, the real ones are those."""
    compat_upstream: bool = False
    """Put the question's documents into the same slots in every context, as MemAgent's released script does: a
    shortcut, for comparisons."""


class ProblemsConfig(FilesConfig):
    """Problems from a JSON-lines file."""

    path: str | None = None
    """Folder or hub repository of `dataset`, or the file itself."""
    dataset: str = ""
    """JSON-lines file within `path`, one problem a line: prompt, query_id, solutions."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the file's rows that is held out; 0: train on all."""
    reward_scale: Annotated[float, Field(gt=0)] = 1.0
    """reward.name=math: scale of (verdict - reward_bias); the verdict is 1 for a right answer, -1 for a wrong one."""
    reward_bias: float = 0.0
    """reward.name=math: subtracted from the verdict before it is scaled."""


class TextsConfig(FilesConfig):
    """Texts with questions from a file of rows."""

    path: str | None = None
    """A file, or a folder with train and test files, Parquet or JSON lines."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the training file's rows that is held out; 0: train on all."""
    max_per_source: Annotated[int, Field(ge=0)] = 0
    """Most training rows of one data source; 0: all of them."""


class RecallConfig(WordsConfig):
    """Generated key-value facts, one of which is asked for."""

    name: Literal["recall"] = "recall"


class NeedlesConfig(SectionsConfig):
    """The same in English."""

    name: Literal["needles"] = "needles"


class FactsConfig(QuestionsConfig):
    """Generated key-value facts that are asked for once everything was read."""

    name: Literal["facts"] = "facts"


class HotpotqaConfig(DocumentsConfig):
    """Real questions among real documents."""

    name: Literal["hotpotqa"] = "hotpotqa"


class MathConfig(ProblemsConfig):
    """Problems whose answer can be checked."""

    name: Literal["math"] = "math"


class SftConfig(FilesConfig):
    """Examples with their answers, for trainer.type=sft."""

    name: Literal["sft"] = "sft"
    path: str | None = None
    """A JSON-lines file, or the folder of `dataset`."""
    dataset: str = ""
    """JSON-lines file within `path`, where that is a folder."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the examples (by hash of their text) that is held out."""
    as_chat: bool = True
    """Put prompt and answer into the model's chat template; false: use the text as it is."""


class MemalphaConfig(TextsConfig):
    """Real documents from files, read into a structured memory."""

    name: Literal["memalpha"] = "memalpha"


class OwnTaskConfig(OwnSection, QuestionsConfig, DocumentsConfig, ProblemsConfig, TextsConfig):
    """A task of the user's own, which may build on any of ours; its warm-up is that of recall."""

    path: str | None = None
    """Folder or file of the task's data, as it wants it."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share that is held out, where the task goes by it."""


OurTaskConfig = RecallConfig | NeedlesConfig | HotpotqaConfig | MathConfig | SftConfig | FactsConfig | MemalphaConfig
TASK = Choice.by_name("task", OwnTaskConfig, *get_args(OurTaskConfig))
AnyTaskConfig = Annotated[OurTaskConfig | OwnTaskConfig, TASK]
"""What a task's section may be."""
