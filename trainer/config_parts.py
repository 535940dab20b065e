"""Sections of a RunConfig that say what is learned: model, task, agent, reward, rollout. See trainer/config.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trainer.errors import UserError
from trainer.wording import NO_MEMORY, check_wording, read_wording

CLASS_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""`module:Class`, with dots within the module's name."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused and defaults are validated too."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)


def named_class(name: str, setting: str, known: tuple[str, ...]) -> str:
    """The name of one of ours, or `module:Class`. Raises ValueError for anything else."""
    if name in known or CLASS_NAME.fullmatch(name):
        return name
    raise ValueError(f"{setting}={name} is not known: choose {', '.join(known)}, or name a class of yours module:Class")


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON knows them, so that they survive every file they are written to. Raises ValueError."""
    try:
        return dict(json.loads(json.dumps(options, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"options must be numbers, texts, true, false, lists and mappings: {error}") from None


class TinyModel(Section):
    """Architecture of a Llama-type model that is trained from nothing (no weights are shipped)."""

    hidden_size: Annotated[int, Field(ge=8, multiple_of=8)] = 256
    """Width of the residual stream."""
    num_layers: Annotated[int, Field(ge=2)] = 2
    """Transformer layers; lookup by key needs at least two."""
    num_heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads (as many key/value heads)."""
    intermediate_size: Annotated[int, Field(ge=8)] = 512
    """Width of the feed-forward layers."""
    max_position_embeddings: Annotated[int, Field(ge=64)] = 1024
    """Context window, in tokens."""

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyModel:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_heads {self.num_heads}: "
                "choose for example hidden_size=256 num_heads=4"
            )
        return self


class ModelConfig(Section):
    """The policy that is trained."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer); empty: build `tiny` and warm it up."""
    tiny: TinyModel = TinyModel()
    """Architecture used when `path` is empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward passes, of the weights that sample, and of exports. bfloat16: the optimizer's
    weights and the gradients' sums stay in float32. float32 keeps rollout and training log-probs equal to about 1e-6.
    """
    context_window: Annotated[int, Field(ge=0)] = 0
    """Longest prompt plus response, in tokens; 0: what the checkpoint's config says."""
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass. full (or true): a layer's input alone is kept, least memory, about a
    third more time. selective: attention and every second matrix product are kept as well, between the two."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        # It was a switch at first, and is one in other trainers' files.
        return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


TASKS = ("recall", "needles", "hotpotqa", "math", "sft", "facts", "memalpha")
AGENTS = ("memagent", "single_turn", "memalpha")
REWARDS = ("boxed", "f1", "found", "math", "memalpha")


class TaskConfig(Section):
    """What the policy learns on."""

    name: str = "recall"
    """recall: generated key-value facts spread over chunks. needles: the same in English, for pretrained models.
    hotpotqa: real questions among real documents. math:
    problems whose answer can be checked. sft: examples with their answers, for trainer.type=sft. facts: as recall, with
    several questions that are asked once everything was read, for agent.name=memalpha. memalpha: the same with real
    documents from files. Or `module:Class` for one of your own (docs/custom.md)."""
    options: dict[str, Any] = {}
    """Settings of a task of your own, as it wants them: task.options.NAME=VALUE."""
    path: str | None = None
    """hotpotqa: folder with questions.jsonl[.gz] and documents.jsonl[.gz]; empty: looked for under /storage/datasets
    and the asset cache. math: folder or hub repository of `dataset`. sft: a JSON-lines file, or the folder of
    `dataset`. memalpha: a file, or a folder with train and test files, Parquet or JSON lines."""
    dataset: str = ""
    """math: JSON-lines file within `path`, one problem a line: prompt, query_id, solutions. sft: the same for examples,
    where `path` is a folder."""
    as_chat: bool = True
    """sft: give prompt and answer the model's chat template; false: the text as it stands."""
    reward_scale: Annotated[float, Field(gt=0)] = 1.0
    """math: the reward is (verdict - reward_bias) times this; the verdict is 1 for a right answer and -1 for a wrong
    one."""
    reward_bias: float = 0.0
    """math: subtracted from the verdict before it is scaled."""
    train_size: Annotated[int, Field(ge=1)] = 65536
    """Tasks in one epoch. recall generates that many; hotpotqa, math, memalpha and sft use at most that many of theirs,
    what is held out not counted."""
    num_documents: Annotated[int, Field(ge=2)] = 50
    """hotpotqa: documents in one context, the question's own ones included."""
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """hotpotqa: share of the questions (by hash of the id) that is held out, with its own pool of documents. sft: share
    of the examples (by hash of their text). math, memalpha: share of the training file's rows; 0: all are trained
    on."""
    compat_upstream: bool = False
    """hotpotqa: shuffle as MemAgent's released script does, the same slots in every item (a shortcut, to compare)."""
    min_chunks: Annotated[int, Field(ge=1)] = 2
    """recall: fewest chunks of a training document."""
    max_chunks: Annotated[int, Field(ge=1)] = 4
    """recall: most chunks of a training document."""
    facts_per_chunk: Annotated[int, Field(ge=1)] = 3
    """recall: facts in a chunk."""
    filler_per_chunk: Annotated[int, Field(ge=0)] = 4
    """recall: filler words in a chunk."""
    num_questions: Annotated[int, Field(ge=1)] = 4
    """facts: questions about one document."""
    max_per_source: Annotated[int, Field(ge=0)] = 0
    """memalpha: most training rows of one data source; 0: all of them."""
    num_keys: Annotated[int, Field(ge=8, le=5000)] = 256
    """recall: distinct keys (names)."""
    num_values: Annotated[int, Field(ge=96, le=128)] = 128
    """recall: distinct values; a blind guess is right once in so many. With fewer than 96 some keys would have no
    held-out value."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return named_class(name, "task.name", TASKS)

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        return plain_options(options)

    @model_validator(mode="after")
    def _chunks_ordered(self) -> TaskConfig:
        if self.min_chunks > self.max_chunks:
            raise ValueError(f"min_chunks {self.min_chunks} is larger than max_chunks {self.max_chunks}: lower it")
        # Words within a section, and those of a demonstration's two facts beside it, are distinct; a few must be left.
        if self.facts_per_chunk + 5 > self.num_values:
            raise ValueError(
                f"facts_per_chunk {self.facts_per_chunk} needs num_values of at least {self.facts_per_chunk + 5}, not "
                f"{self.num_values}: raise num_values (128 at most), or lower facts_per_chunk"
            )
        if self.facts_per_chunk + 2 > self.num_keys:
            raise ValueError(
                f"facts_per_chunk {self.facts_per_chunk} needs num_keys of at least {self.facts_per_chunk + 2}, not "
                f"{self.num_keys}: raise num_keys"
            )
        return self


class AgentConfig(Section):
    """The memory agent: one conversation a chunk, the memory is overwritten each time, then one final conversation."""

    name: str = "memagent"
    """memagent; single_turn (the question in one prompt, one response of up to max_final_tokens, no memory); memalpha
    (a structured memory, written by tool calls); or `module:Class` for one of your own (docs/custom.md)."""
    options: dict[str, Any] = {}
    """Settings of an agent of your own, as it wants them: agent.options.NAME=VALUE."""
    template: Literal["memagent", "words"] = "memagent"
    """Prompt wording. words: a few single words, for models that are trained from nothing."""
    template_file: str = ""
    """memagent: YAML file with your own wording of both prompts: update with {problem}, {memory} and {section}, final
    with {problem} and {memory}, and no_memory, the text of a memory before the first (docs/coming-from-areal.md)."""
    wording: dict[str, str] = {}
    """What template_file holds, read from it by the command and carried along."""
    prompt_order: Literal["paper", "section_first"] = "paper"
    """paper: problem, memory, section. section_first: problem, section, memory, so that a group shares its prefix."""
    chunk_tokens: Annotated[int, Field(ge=1)] = 5000
    """Tokens of the document read in one conversation."""
    max_question_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest question; a longer one is refused, never cut."""
    max_memory_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest memory, in tokens: the response limit of every update conversation."""
    max_final_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest final answer, in tokens."""
    max_chunks: Annotated[int, Field(ge=0)] = 0
    """Most chunks that are read; a longer document is handled as `overflow` says. 0: no limit."""
    overflow: Literal["center", "error"] = "center"
    """Document longer than max_chunks: keep its first and last halves (counted), or refuse the document and stop."""
    empty_memory: Literal["keep", "clear"] = "keep"
    """What an empty update means: keep the old memory, or clear it. Counted either way."""
    enable_thinking: bool = False
    """Let a chat template that knows the switch (Qwen3) turn thinking on."""
    context_tokens: Annotated[int, Field(ge=32)] = 16384
    """memalpha: most tokens of a prompt and its response; what is shown of the memory shrinks to fit (counted)."""
    core_tokens: Annotated[int, Field(ge=1)] = 512
    """memalpha: longest core memory; a longer one is cut and the call's answer says so."""
    shown_items: Annotated[int, Field(ge=0)] = 20
    """memalpha: entries of each store that a prompt shows, the newest ones."""
    tool_format: Literal["auto", "chat", "json"] = "auto"
    """memalpha: chat: tools in the model's own chat template. json: described in the prompt. auto: chat where the
    template knows tools."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return named_class(name, "agent.name", AGENTS)

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        return plain_options(options)

    @model_validator(mode="after")
    def _worded(self) -> AgentConfig:
        """Read the file where that was not done yet; afterwards its text goes with the configuration."""
        if not self.template_file and not self.wording:
            return self
        file = f"agent.template_file={self.template_file}"
        if self.name != "memagent" and ":" not in self.name:
            raise ValueError(f"{file} is for agent.name=memagent, and {self.name} has prompts of its own: leave it out")
        if self.template != "memagent":
            raise ValueError(
                f"{file} is put into a chat template, and agent.template=words is for models without: leave one out"
            )
        if self.prompt_order != "paper":
            raise ValueError(f"{file} has an order of its own: leave agent.prompt_order={self.prompt_order} out")
        if self.wording:
            self.wording = {"no_memory": NO_MEMORY, **self.wording}
            check_wording(self.wording)
            return self
        path = Path(self.template_file).expanduser().absolute()
        try:
            self.wording, self.template_file = read_wording(path), str(path)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self


class RewardConfig(Section):
    """How an answer is scored."""

    name: str = "boxed"
    """boxed: 1 where the content of the last \\boxed{} is a gold answer, else 0. f1: words that answer and gold answer
    share, 0 to 1, after SQuAD's normalisation, of the whole answer where none is marked: for models too small to keep a
    format. found: 1 where a gold answer stands anywhere in the answer, as RULER counts. math: the final answer compared
    as a value, scaled by task.reward_scale.
    memalpha: questions answered from the memory (r1), calls that worked (r2), compression (r3), entries worth keeping
    (r4). Or `module:Class` for one of your own (docs/custom.md)."""
    beta: Annotated[float, Field(ge=0)] = 0.05
    """memalpha: weight of r3."""
    gamma: Annotated[float, Field(ge=0)] = 0.1
    """memalpha: weight of r4; 0: nothing is judged."""
    options: dict[str, Any] = {}
    """Settings of a reward of your own, as it wants them: reward.options.NAME=VALUE."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return named_class(name, "reward.name", REWARDS)

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        return plain_options(options)


class RolloutConfig(Section):
    """How trajectories are sampled."""

    batch_size: Annotated[int, Field(ge=1)] = 32
    """Tasks per training step; sft: examples per training step; trainer.type=null: tasks that are rolled out and
    written together."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Trajectories per task; their mean reward is the baseline."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature. The trainer applies the same one to its log-probs. 0, greedy, is for trainer.type=null."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Must be 1 in training: a cut distribution biases every importance ratio."""
    top_k: int = -1
    """Must be -1 (off) in training, for the same reason."""
    max_batch_tokens: Annotated[int, Field(ge=64)] = 16384
    """embedded engine: most prompt tokens in one forward pass."""
    save_trajectories: bool = True
    """Write rollouts/step_N.jsonl.zst: tokens, text, rewards and weight versions of every trajectory."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Engine servers: share of a GPU's memory for weights and KV cache."""
    max_running: Annotated[int, Field(ge=0)] = 0
    """Engine servers: most requests that one server works on at a time; 0: as many as the KV cache holds."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Engine servers: by how many weight versions a trajectory may be older than the step that learns from it (eta of
    asynchronous training, AReaL's max_head_offpolicyness). 0: synchronous, nothing is sampled while training."""
    window: Annotated[int, Field(ge=0)] = 0
    """With max_staleness: of how many of the oldest groups the finished ones are taken first, so that one slow document
    does not hold a step up; 0: three tenths of batch_size. Nothing overtakes what would then become too old."""
    refill: bool | None = None
    """Groups whose rewards are all equal (where turns are rewarded apart: those of the turns) are left out and others
    sampled in their place (DAPO's dynamic sampling). Empty: with algorithm.name=dapo."""
    max_refill: Annotated[float, Field(ge=1)] = 4.0
    """With refill: most groups sampled for one step, as a multiple of batch_size; then the step takes what there is."""
    stall_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Engine servers: when no response has come for so long, the log names the trajectories that are waited for."""


class ServersConfig(Section):
    """Inference servers that sample for the trainer; without them its own process does (the embedded engine)."""

    engine: Literal["auto", "embedded", "sglang", "vllm"] = "auto"
    """auto: the one that allocation_mode names, embedded without one."""
    count: Annotated[int, Field(ge=0)] = 0
    """Servers that the run starts; 0: as allocation_mode says, 1 without one."""
    min_required: Annotated[int, Field(ge=0)] = 0
    """Servers that must answer before the first step, and below which the run waits for them to come back. 0: all that
    the run starts before the first step, one later."""
    shutdown_on_exit: bool = True
    """Whether the servers end with the trainer. false: they stay, and the next attempt at the run takes them over
    (`clusterkit serve list` shows them, `clusterkit serve stop` ends them)."""
    context_length: Annotated[int, Field(ge=0)] = 0
    """Longest prompt plus response that a server takes; 0: the model's own."""
    start_seconds: Annotated[float, Field(gt=0)] = 900.0
    """How long a server may take until it answers."""
    patience_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long requests wait for servers to come back while fewer than min_required are left. Without any server left
    after that the run ends and says what became of them; a dispatched one is then started again, with its servers. 0:
    as long as a start may take (start_seconds)."""
    restarts: Annotated[int, Field(ge=0)] = 5
    """How often a server that died is started again before it is given up; and so often its host process, if that is
    killed."""
    python: str = ""
    """Interpreter that has the server's package; empty: $CLUSTERKIT_SGLANG_PYTHON or $CLUSTERKIT_VLLM_PYTHON, else the
    trainer's own."""
    flags: list[str] = []
    """Further options for the server's command line, as it spells them."""
