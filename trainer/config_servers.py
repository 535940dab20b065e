"""Section servers of a RunConfig: what samples for the trainer. See trainer/config.py and trainer/config_choice.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from trainer.config_choice import OWN, Choice
from trainer.config_parts import Section


class EmbeddedConfig(Section):
    """The trainer's own process samples."""

    engine: Literal["embedded"] = "embedded"


class ServersConfig(Section):
    """Inference servers that sample for the trainer; without them its own process does (the embedded engine)."""

    engine: Literal["auto", "embedded", "sglang", "vllm"] = "auto"
    """auto: the one that allocation_mode names, embedded without one. embedded: the trainer's own process, which takes
    no other setting of this section."""
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
    flags: list[str] = []  # noqa: RUF012 (pydantic copies it)
    """Further options for the server's command line, as it spells them."""


SERVERS = Choice(
    "servers",
    "auto",
    {"auto": ServersConfig, "sglang": ServersConfig, "vllm": ServersConfig, "embedded": EmbeddedConfig},
    ServersConfig,
    key="engine",
)
AnyServersConfig = Annotated[
    Annotated[EmbeddedConfig, Tag("embedded")] | Annotated[ServersConfig, Tag(OWN)], Discriminator(SERVERS.tag)
]
"""What the servers' section may be."""
