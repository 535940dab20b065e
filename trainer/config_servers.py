"""The settings of inference servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from trainer.config_choice import Choice, Section

LEAST_HANG_SECONDS = 10.0


def _long_enough(seconds: float) -> float:
    # Whether it works is asked four times in that time, and SGLang takes a second and more to say so.
    if 0 < seconds < LEAST_HANG_SECONDS:
        raise ValueError(
            f"{seconds:g} is too short, a server that works may take seconds to say so: at least "
            f"{LEAST_HANG_SECONDS:g}, or 0 to wait without end"
        )
    return seconds


HangSeconds = Annotated[float, Field(ge=0), AfterValidator(_long_enough)]
"""The limit of `trainer.engines.hang_watch`."""


class EmbeddedConfig(Section):
    """The trainer's own process samples."""

    engine: Literal["embedded"] = "embedded"


class ServersConfig(Section):
    """Inference servers that sample for the trainer; without them its own process does (the embedded engine)."""

    engine: Literal["auto", "embedded", "sglang", "vllm"] = "auto"
    """auto: as allocation_mode says, embedded without one. embedded: the trainer's own process, for which this section
    has no other setting."""
    count: Annotated[int, Field(ge=0)] = 0
    """Servers that the run starts; 0: as allocation_mode says, 1 without one."""
    min_required: Annotated[int, Field(ge=0)] = 0
    """Servers that must answer before the first step; later the run waits while there are fewer. 0: before the first
    step all that the run starts, later one. SGLang's on the trainer's GPUs: all."""
    shutdown_on_exit: bool = True
    """End the servers with the trainer. false: they stay, and the next attempt at the run uses them again (`clusterkit
    serve list` shows them, `clusterkit serve stop` ends them)."""
    context_length: Annotated[int, Field(ge=0)] = 0
    """Longest prompt plus response that a server takes; 0: the model's own."""
    start_seconds: Annotated[float, Field(gt=0)] = 900.0
    """Seconds until a server must answer after its start."""
    patience_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that requests wait for servers to come back while fewer than min_required are left; 0: start_seconds. If
    no server is left then, the run ends and reports why; on a cluster it is started again, with its servers."""
    restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of a server that died before it is given up; as many of its host process, if that is killed, and (one at
    least) of servers that hang at the same request, before the run ends."""
    hang_seconds: HangSeconds = 600.0
    """Seconds for which a server may answer none of its requests before it is asked whether it works. One that answers
    neither for as long again hangs: it is killed and started again. At least 10, or 0: it is waited for without end."""
    prefill_delay_ms: Annotated[float, Field(ge=0)] = 0.0
    """With SGLang: prompts wait until a tenth as many of them are there as responses are being sampled, but at most so
    many milliseconds, and 30 steps of sampling. Each pass over prompts holds sampling up, and where turns end one by
    one most passes are small. 0: prompts do not wait."""
    python: str = ""
    """Interpreter that has the server's package; empty: $CLUSTERKIT_SGLANG_PYTHON or $CLUSTERKIT_VLLM_PYTHON, else the
    trainer's own."""
    flags: list[str] = []  # noqa: RUF012 (pydantic copies it)
    """Further options for the server's command line, as it spells them."""


SERVERS = Choice(
    "servers",
    "auto",
    {"auto": ServersConfig, "sglang": ServersConfig, "vllm": ServersConfig, "embedded": EmbeddedConfig},
    ServersConfig,
    key="engine",
)
AnyServersConfig = Annotated[EmbeddedConfig | ServersConfig, SERVERS]
"""What the servers' section may be."""
