"""What differs between kinds of inference servers: routes, fields, and how each pauses and takes new weights.

`ServedEngine` holds everything that is the same for all kinds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trainer.engines.adapters import AdapterRoutes, adapter_name
from trainer.engines.base import EngineError
from trainer.engines.http import Json, Server, ServerPool
from trainer.engines.options import ServerOptions, Setting
from trainer.types import FinishReason, SamplingParams

log = logging.getLogger(__name__)

Kind = Literal["sglang", "vllm"]


class UntouchedError(EngineError):
    """A server could not take new weights and still holds its old ones, whole: it may go on with them."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one request returned: ids with log-probs (natural, under the distribution that was sampled from).

    finish: None when it was cut off. version: of the weights that sampled it; None where nothing was sampled, -1 where
    the server named no single one of ours. cached_tokens: those of the prompt_tokens found in the prefix cache.
    """

    ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None
    version: int | None
    prompt_tokens: int
    cached_tokens: int


class Dialect(Protocol):
    """How to talk to one kind of server; its classes inherit it. Calls raise EngineError, which names the server."""

    title: str
    generate_path: str
    health_path: str
    weights_path: str
    """Route that tells the version of the weights."""
    module: str
    extra: str
    """The Python package that a server needs, and how a user installs it."""
    tried_versions: tuple[str, ...]
    idle_variable: str
    """Environment variable that tells a server after how many seconds to close an idle connection."""
    grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL when a server is ended."""
    shares_batches: bool
    """Whether the server itself reads once what prompts begin with that come at the same moment."""
    adapter_routes: AdapterRoutes
    adapters: bool = False
    """Whether a server keeps the weights that it was started with, version 0, and later versions are adapters."""

    def argv(self, options: ServerOptions, port: int) -> tuple[str, ...]:
        """Command line of a server, without the interpreter."""

    def environment(self, options: ServerOptions) -> dict[str, str]:
        """What the server's environment has beside this process's."""

    def adapted(self, options: ServerOptions) -> Setting:  # noqa: ARG002
        """What a server gets because of its GPUs and its packages, unless the user has said otherwise."""
        return Setting()

    def request(self, ids: list[int], params: SamplingParams, left: int, stop_ids: list[int], server: Server) -> Json:
        """Body of a sampling request: go on after `ids` for at most `left` tokens."""

    def read(self, answer: Json, name: str) -> Stretch:
        """Take a sampling answer apart. Raises EngineError when it lacks what training needs."""

    async def probe(self, pool: ServerPool, server: Server) -> str:
        """Find out the server's version, what it returns, and that it holds the weights it should (if known)."""

    async def check_working(self, pool: ServerPool, server: Server, seconds: float) -> None:
        """Return once its engine has done something, however long its queue is. RefusedError: it cannot be asked."""

    async def held_version(self, pool: ServerPool, server: Server) -> int:
        """The version that the server says its weights are; 0 for those that it was started with.

        Of several adapters it is the newest.
        """
        if self.adapters:
            return max(await self.adapter_routes.versions(pool, server), default=0)
        reported = str((await self._weights(pool, server)).get("weight_version"))
        return int(reported) if reported.isdigit() else 0

    async def check_version(self, pool: ServerPool, server: Server, version: int) -> None:
        """Raise EngineError unless the server says that its weights are `version`."""
        if self.adapters:
            reported: Any = str(await self.held_version(pool, server))
        else:
            reported = (await self._weights(pool, server)).get("weight_version")
        if reported != str(version):
            raise EngineError(f"{server.name} reports weight version {reported}, expected {version}")

    async def _weights(self, pool: ServerPool, server: Server) -> Json:
        return await pool.call(server, "GET", self.weights_path, None, pool.limits.control)

    def warn_if_untried(self, server: Server, version: str) -> None:
        """Log where a server's version is none that this code was tried with."""
        if version.partition("+")[0] not in self.tried_versions:
            log.warning(
                "%s runs %s %s; this code was tried with %s only: what it needs is checked, the rest is unknown",
                server.name, self.title, version, ", ".join(self.tried_versions),
            )  # fmt: skip

    def require(self, server: Server, version: str, answer: Json, part: str, names: Sequence[str]) -> None:
        """Raise EngineError unless a part of a sampling answer has all fields of these names."""
        for name in names:
            if not answer.get(name):
                raise EngineError(
                    f"{server.name} ({self.title} {version}) does not return {part}.{name}, which training needs: "
                    f"install {self.title} {self.tried_versions[-1]}"
                )

    async def cut_off(self, pool: ServerPool, server: Server) -> None:
        """End what is being sampled; the requests are answered with what they have so far."""

    async def pause(self, pool: ServerPool, server: Server) -> None:
        """Stop an idle server from sampling and empty its prefix cache."""

    async def go_on(self, pool: ServerPool, server: Server) -> None:
        """Go on after `pause`."""

    async def load_folder(self, pool: ServerPool, server: Server, folder: Path, version: int) -> None:
        """Have a paused server load weights and call them `version`. UntouchedError: it kept the old ones."""

    def adapter(self, server: Server) -> str:
        """The adapter that requests to a server are for; empty for the weights that it was started with."""
        return adapter_name(server.version) if self.adapters and server.version > 0 else ""

    def weights_named(self, version: int) -> int:
        """What a server calls the weights that requests for a version are answered with, apart from its adapter."""
        return 0 if self.adapters else version


def unreadable(answer: Json, name: str, error: Exception) -> EngineError:
    """The error for an answer that lacks what training needs."""
    return EngineError(
        f"{name} sent an answer that cannot be read ({type(error).__name__} {error}): {str(answer)[:300]}"
    )
