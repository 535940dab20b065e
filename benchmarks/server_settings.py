"""Settings of inference servers that rollout_settings.py compares, and the ways in which it asks them."""

from __future__ import annotations

from dataclasses import dataclass, field

TF32 = "--enable-tf32-matmul"
GRAPHS = "--cuda-graph-max-bs-decode 512 --max-running-requests 512"


@dataclass(frozen=True)
class Way:
    """How a server is asked."""

    order: str
    share: bool = True
    ahead: bool = False

    @property
    def name(self) -> str:
        return f"{self.order} {'ahead' if self.ahead else 'share' if self.share else 'alone'}"


SHARE, AHEAD = Way("section_first"), Way("section_first", ahead=True)
ALL = (Way("paper", share=False), Way("paper"), Way("section_first", share=False), SHARE, AHEAD)


@dataclass(frozen=True)
class Setting:
    """flags: on top of the base ones. less: base flags that are left out. why: what it may bring."""

    name: str
    flags: str
    why: str
    ways: tuple[Way, ...] = (SHARE,)
    env: dict[str, str] = field(default_factory=dict)
    less: str = ""
    fp32_head: bool = True


UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
BASES = {
    "sglang": "--attention-backend fa3 --cuda-graph-backend-prefill=disabled",
    "vllm": f"--dtype float32 --enforce-eager --distributed-executor-backend {UNIPROC}",  # starts fast on a CPU
}
SETTINGS: dict[str, tuple[Setting, ...]] = {
    # The likeliest first. Every decoding step casts the whole output layer to float32 and multiplies it without tensor
    # cores. In TF32 the products of two bfloat16 numbers are exact, and sums stay in float32: nothing is lost.
    "sglang": (
        Setting("base", "", "what a run has today: TF32, and graphs for as many requests as are expected", ALL),
        Setting(
            "sglang", "--dtype bfloat16 --cuda-graph-max-bs-decode 256", "control: neither, as SGLang starts by itself"
        ),
        Setting("tf32", f"{TF32} --cuda-graph-max-bs-decode 256", "TF32 alone", (SHARE, AHEAD)),
        Setting("graphs", f"{TF32} {GRAPHS}", "more than 256 sequences stay within a CUDA graph", (SHARE, AHEAD)),
        Setting("mixed", f"{TF32} {GRAPHS} --enable-mixed-chunk", "prompts beside decoding", (SHARE, AHEAD)),
        Setting(
            "mixed-2k", f"{TF32} {GRAPHS} --enable-mixed-chunk --chunked-prefill-size 2048",
            "decoding is held up less by each chunk", (SHARE, AHEAD),
        ),
        Setting(
            "delayed", f"{TF32} {GRAPHS} --enable-prefill-delayer --prefill-delayer-queue-min-ratio 0.1 "
            "--prefill-delayer-max-delay-ms 100", "fewer and larger prefills between decoding steps",
        ),
        Setting(
            "delayed-more", f"{TF32} {GRAPHS} --enable-prefill-delayer --prefill-delayer-queue-min-ratio 0.3 "
            "--prefill-delayer-max-delay-ms 200 --prefill-delayer-max-delay-passes 60", "fewer and larger still",
        ),
        Setting(
            "chunk-16k", f"{TF32} {GRAPHS} --chunked-prefill-size 16384 --max-prefill-tokens 32768",
            "fewer and larger prefills",
        ),
        Setting("lpm", f"{TF32} {GRAPHS} --schedule-policy lpm", "the longest prefix in the cache first"),
        Setting(
            "lpm-in-queue", f"{TF32} {GRAPHS} --schedule-policy lpm",
            "the server itself holds prompts back that begin alike", (Way("section_first", share=False), SHARE),
            {"IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD": "100000"},
        ),
        Setting(
            "flashinfer", f"{TF32} {GRAPHS} --attention-backend flashinfer", "other attention kernels",
            less="--attention-backend fa3",
        ),
        Setting("page-64", f"{TF32} {GRAPHS} --page-size 64", "fewer, larger pages of keys and values"),
        Setting(
            "prefill-graph", f"{TF32} {GRAPHS}", "pieces of a prefill within CUDA graphs",
            less="--cuda-graph-backend-prefill=disabled",
        ),
        Setting(
            "delayed-prefill-graph", f"{TF32} {GRAPHS} --enable-prefill-delayer --prefill-delayer-queue-min-ratio 0.1 "
            "--prefill-delayer-max-delay-ms 100", "both", less="--cuda-graph-backend-prefill=disabled",
        ),
        Setting("recv-4", f"{TF32} {GRAPHS} --scheduler-recv-interval 4", "the scheduler looks for work less often"),
        Setting("no-overlap", f"{TF32} --disable-overlap-schedule", "control: the scheduler not beside the GPU"),
        Setting("bf16-head", "", "control: what the float32 output layer costs; log-probs would be rounded",
                fp32_head=False),
    ),
    "vllm": (
        Setting("base", "", "what a run has today", ALL),
        Setting("seqs-4", "--max-num-seqs 4", "few sequences at a time"),
    ),
}  # fmt: skip
