"""EvalConfig: everything that defines an evaluation. Both sides read it: pydantic and standard library only."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from trainer.config_0_1 import without_others
from trainer.config_agents import AnyAgentConfig, MemagentConfig
from trainer.config_choice import Section
from trainer.config_parts import JudgeConfig
from trainer.config_servers import HangSeconds
from trainer.config_tasks import AnyTaskConfig, RecallConfig

Method = Literal["memagent", "blank_memory", "long_context", "rag", "gold", "no_context"]
METHODS: tuple[Method, ...] = get_args(Method)
FOUND: tuple[Method, ...] = ("long_context", "rag", "gold")
"""Methods that choose text of the document beforehand; `EvalConfig.reader` says who reads it."""
Split = Literal["usual", "test", "dev", "dev+test"]
MOST_GENERATED = 32768
"""Response limit where none is set and the context window has room: AReaL's."""


class ServerConfig(Section):
    """Where the answers come from."""

    engine: Literal["auto", "embedded", "sglang", "vllm", "openai"] = "auto"
    """embedded: transformers in this process. sglang, vllm: servers that are started for this evaluation, or one that
    runs at `url`. openai: a server that runs at `url`. auto: openai with a `url`; else SGLang, then vLLM, where there
    are GPUs and they are installed; else embedded."""
    url: str = ""
    """Address of a running server. openai: with /v1/completions; a key is read from OPENAI_API_KEY only. sglang, vllm:
    a server that takes token ids, started like those of an evaluation or a training."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs for servers; 0: all (without any, vLLM runs on the CPU)."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """GPUs of one server; there are gpus / tensor_parallel servers."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Share of a GPU's memory for weights and KV cache."""
    context_length: Annotated[int, Field(ge=0)] = 0
    """Longest prompt plus response, in tokens; 0: what the checkpoint's config says."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """embedded: parameter dtype on a GPU; on a CPU always float32."""
    concurrency: Annotated[int, Field(ge=0)] = 0
    """Most requests in flight; 0: 256 per server, 32 for the embedded engine."""
    prefill_delay_ms: Annotated[float, Field(ge=0)] = 0.0
    """SGLang: for so long prompts wait for others, so that passes over them hold sampling up less often; 0: not at all.
    `clusterkit eval` takes that of the run which wrote the checkpoint (servers.prefill_delay_ms)."""
    flags: list[str] = []  # noqa: RUF012 (pydantic copies it)
    """Further options of the server's own command line."""
    python: str = ""
    """Interpreter that has the server; empty: $CLUSTERKIT_VLLM_PYTHON for vLLM, else this one."""
    start_seconds: Annotated[float, Field(gt=0)] = 900.0
    """Seconds until a server must answer."""
    wait_s: Annotated[float, Field(ge=0)] = 60.0
    """openai: seconds to wait for a server that stopped answering; then the evaluation ends, and can be resumed."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts of a server that dies or hangs during an evaluation."""
    hang_seconds: HangSeconds = 600.0
    """Seconds for which a server of this evaluation may answer nothing before it is asked whether it works; one that
    answers neither for as long again hangs. At least 10, or 0: it is waited for without end."""


class EvalConfig(Section):
    """One evaluation: what `clusterkit eval` writes and `python -m evaluation` executes."""

    model_path: str
    """Folder of a Hugging Face checkpoint, or the name of an asset."""
    output_path: str
    """Folder for answers, verdicts and tables; several evaluations may share it, one at a time."""
    data_names: list[str]
    """Suites by name, NAME@SIZE, or files: see `evaluation.suites`."""
    data_path: str = ""
    """Folder to look for data in first."""
    cache_dir: str = ""
    """Asset cache; empty: $CLUSTERKIT_CACHE or ~/.cache/clusterkit."""
    num_questions: Annotated[int, Field(ge=0)] = 0
    """Questions of each suite, the first ones; 0: all."""
    prompt_type: str = "auto"
    """Name of a prompt template of problems; auto: the tokenizer's chat template."""
    max_gen_tokens: Annotated[int, Field(ge=0)] = 0
    """Longest response to a problem, in tokens; 0: 32768, or what the context window leaves."""
    greedy: bool = True
    """One greedy answer to every question."""
    n_sampling: Annotated[int, Field(ge=-1)] = -1
    """Sampled answers to every question; -1: 32 to problems, none on memory suites."""
    temperature: Annotated[float, Field(gt=0)] = 0.6
    """For sampled answers."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """For sampled answers."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """For sampled answers; -1: off."""
    seed: int = 0
    """For sampled answers."""
    split: Split = "usual"
    """ruler_hqa, ruler_qa: whose questions are asked, each among documents of its own split. usual: at most 128, of
    test where `data prepare reading` made the folder, else of test and dev. Others: all of the split, or of both."""
    methods: list[Method] = ["memagent"]  # noqa: RUF012
    """How documents are read: memagent; blank_memory (its last turn with an empty memory); long_context (all at once,
    without the middle where it does not fit); rag (the paragraphs that BM25 finds); gold (those that hold the answer);
    no_context (the question alone in a prompt of its own: what the model knows)."""
    rag_top_k: Annotated[int, Field(ge=1)] = 8
    """rag: paragraphs that are read."""
    reader: Literal["prompt", "agent"] = "prompt"
    """Who reads what long_context, rag and gold choose. prompt: one prompt asks for the answer. agent: the memory agent
    in its own wording, with the chosen text as its document (of long_context as one section, as long as the context
    window allows), so that a model that was trained as one is asked in the form that it learned."""
    agent: AnyAgentConfig = MemagentConfig()
    """memagent: wording and limits; max_final_tokens is also the other methods' response limit."""
    free_limits: list[str] = []  # noqa: RUF012 (pydantic copies it)
    """Lengths of the agent, in tokens, that nobody has set: they are made to fit into the context window."""
    task: AnyTaskConfig = RecallConfig()
    """Settings of generated documents, and of the run's held-out tasks."""
    judge: JudgeConfig = JudgeConfig()
    """memalpha: the reader that answers from a structured memory, and judges answers about dialogues."""
    server: ServerConfig = ServerConfig()
    percent_lenient: bool = False
    """Also count a hundred times or a hundredth of the truth as right, as AReaL v0.2 does."""
    last_number: bool = False
    """Where no answer is marked, take the last number of the response, as AReaL v0.2 does."""
    grading_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Most CPU seconds of one comparison; a slower one counts as wrong."""
    grading_workers: Annotated[int, Field(ge=0)] = 0
    """Grading processes; 0: half of the cores, at least one."""
    compare: list[str] = []  # noqa: RUF012
    """Folders of earlier results to compare with, question by question."""

    def reads_by_agent(self, method: Method) -> bool:
        """Whether the memory agent is who reads, in a way of reading documents."""
        return method in ("memagent", "blank_memory") or (method in FOUND and self.reader == "agent")

    @model_validator(mode="before")
    @classmethod
    def _of_0_1(cls, values: Any) -> Any:
        return without_others(values)

    @field_validator("methods")
    @classmethod
    def _some(cls, methods: list[Method]) -> list[Method]:
        if not methods:
            raise ValueError(f"name at least one way to read documents: {', '.join(METHODS)}")
        return list(dict.fromkeys(methods))


class WatchConfig(Section):
    """Evaluations of checkpoints as they appear: what `python -m evaluation.watching` executes."""

    folder: str
    """Folder whose checkpoints are scored, at whatever depth."""
    evaluation: EvalConfig
    """What is asked of each; its model_path is filled in. server.gpus: of one host, for each evaluation; 0: none."""
    run_logs: str = ""
    """Folder of the run that writes the checkpoints: once it is complete and all are scored, so is this."""
    once: bool = False
    """End after the checkpoints that are there."""


class AskConfig(Section):
    """One question about one document: what `python -m evaluation.ask` executes."""

    document: str
    """File with the text, in UTF-8."""
    question: Annotated[str, Field(min_length=1)]
    evaluation: EvalConfig
    """The checkpoint, the agent's settings and where the answers come from; logs of servers go into its output_path."""
