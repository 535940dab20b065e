"""SGLang servers behind the engine protocol.

Weights change like this: no request is sent any more, those on the way are cut off and keep what they have sampled, the
servers load the new weights, each is asked which version it holds, and the requests that were cut off go on from their
own tokens under the new weights. So every stretch of a response was sampled by one known version, and the prefix cache,
which is kept apart by version (`extra_key`), never serves what older weights computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.engines.http import EngineError, Json, RefusedError, Server, ServerPool
from trainer.engines.sglang_server import GENERATE_PATH, check_version, probe
from trainer.types import Completion, FinishReason, SamplingParams
from trainer.weights.folder import folder_problem

log = logging.getLogger(__name__)

# Seconds: between two requests to cut everything off, and until a server must have let go of its requests.
ABORT_EVERY = 0.05
ABORT_DEADLINE = 60.0
UPDATE_DEADLINE = 900.0
# How often a response may be cut off without an update being the reason.
STRAY_ABORTS = 3
# SGLang's answer when it has found nothing to load and so has changed nothing.
UNTOUCHED = "Failed to get weights iterator"


@dataclass(slots=True)
class SGLangStats:
    """Running totals. Tokens: `cached_tokens` of the prompt tokens were in a server's prefix cache.

    interrupted: responses cut off for an update, which went on afterwards. The seconds are the last update's: until
    nothing was running any more, for loading the weights on all servers, and until requests flowed again.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    interrupted: int = 0
    pause_seconds: float = 0.0
    transfer_seconds: float = 0.0
    resume_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one request returned: ids with log-probs, sampled by one version. finish: None when it was cut off."""

    ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None
    version: int
    prompt_tokens: int
    cached_tokens: int


class SGLangEngine:
    """Engine protocol over any number of SGLang servers.

    Args:
        pool: the servers; give each to `join`.
        model: the folder that the servers were started with; published folders must hold the same tensors.
        stop_ids: token ids that end a response, beside the model's own.
        publish: makes the folder of a version's weights, complete when it returns (the trainer's export).
        version: of the weights that the servers hold at first.

    """

    def __init__(
        self,
        pool: ServerPool,
        model: Path,
        stop_ids: set[int],
        publish: Callable[[int], Awaitable[Path]],
        version: int = 0,
    ) -> None:
        self.pool = pool
        self.model = model
        self.stop_ids = sorted(stop_ids)
        self.stats = SGLangStats()
        self._publish = publish
        self._folder = model  # of the version in use, for servers that join
        self._version = version
        self._paused = False
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def version(self) -> int:
        """Weight version that new responses are sampled with."""
        return self._version

    async def join(self, server: Server) -> str:
        """Use this server from now on; it is given the present weights when it holds others. Returns SGLang's version.

        Raises:
            EngineError: it cannot take the weights, or does not return what training needs.

        """
        found = await probe(self.pool, server)
        if server.version != self._version:
            await self._load(server, self._folder, self._version)
        self.pool.add(server)
        return found

    async def leave(self, server: Server) -> None:
        """Use this server no longer; returns when it has answered what it was asked."""
        await self.pool.remove(server)

    async def health(self) -> bool:
        """Whether a request sent now would be answered: some server is in use, and says that it is well."""
        for server in self.pool.usable():
            if await self.pool.healthy(server):
                return True
        return False

    async def pause(self) -> None:
        """Send no request until `resume`; those on the way run on."""
        self._paused = True

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            # A future of an event loop that was closed meanwhile waits for nobody.
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        """Sample one response; `key` (of a group) decides which server, so that a group shares one prefix cache.

        Raises:
            ValueError: the prompt is empty.
            EngineError: no server could answer, or the server refused (a prompt beyond its context length, say).

        """
        if not prompt_ids:
            raise ValueError("the prompt has no tokens")
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[tuple[int, int]] = []
        strays = 0
        while True:
            stretch = await self._sample(prompt_ids, ids, params, key)
            ids += stretch.ids
            logprobs += stretch.logprobs
            if stretch.ids:
                if spans and spans[-1][0] == stretch.version:
                    spans[-1] = (stretch.version, spans[-1][1] + len(stretch.ids))
                else:
                    spans.append((stretch.version, len(stretch.ids)))
            finish = stretch.finish or self._finished(ids, params)
            if finish:
                break
            if not self._paused and stretch.version == self._version:
                strays += 1
                if strays > STRAY_ABORTS:
                    raise EngineError(f"a server cut one response off {strays} times: see the servers' logs")
            self.stats.interrupted += 1
        self.stats.requests += 1
        self.stats.sampled_tokens += len(ids)
        oldest = min((version for version, _ in spans), default=self._version)
        return Completion(ids, logprobs, finish, oldest, tuple(spans) if len(spans) > 1 else ())

    async def update_weights(self, version: int) -> None:
        """Publish `version` and have every server load it. What was running goes on afterwards from its own tokens.

        A server that cannot be shown to hold the new weights is used no more; one that changed nothing may stay only
        if no other took the update.

        Raises:
            EngineError: the published folder is not usable, or no server took the weights. The servers that are still
                in use hold the old weights then.

        """
        folder = await self._publish(version)
        if problem := await asyncio.to_thread(folder_problem, folder, self.model):
            raise EngineError(f"weight version {version} cannot be loaded: {problem}. The servers keep {self._version}")
        was_paused = self._paused
        await self.pause()
        try:
            began = time.perf_counter()
            await asyncio.gather(*(self._drain(server) for server in self.pool.usable()))
            self.stats.pause_seconds = time.perf_counter() - began
            began = time.perf_counter()
            results: dict[Server, BaseException | None] = {}
            while fresh := [s for s in self.pool.usable() if s not in results]:  # one may join on the way
                loads = (self._load(server, folder, version) for server in fresh)
                results.update(zip(fresh, await asyncio.gather(*loads, return_exceptions=True), strict=True))
            self.stats.transfer_seconds = time.perf_counter() - began
            self._settle(results, folder, version)
            began = time.perf_counter()
        finally:
            if not was_paused:
                await self.resume()
        self.stats.resume_seconds = time.perf_counter() - began

    def _settle(self, results: dict[Server, BaseException | None], folder: Path, version: int) -> None:
        """Keep the servers that agree on their weights, and go by what they hold."""
        if not results:
            self.pool.choose("")  # raises: says what became of the servers
        errors = {server: error for server, error in results.items() if error is not None}
        for error in errors.values():
            if not isinstance(error, EngineError):
                raise error
        if len(errors) == len(results):
            raise EngineError(f"no server took weight version {version}: {'; '.join(map(str, errors.values()))}")
        self._version, self._folder = version, folder
        for server, error in errors.items():
            server.discard(f"it stayed behind at weight version {server.version}: {error}")

    async def _unpaused(self) -> None:
        while self._paused:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    async def _sample(self, prompt_ids: list[int], so_far: list[int], params: SamplingParams, key: str) -> Stretch:
        sampling: Json = {
            "temperature": params.temperature,
            "max_new_tokens": params.max_new_tokens - len(so_far),
            "stop_token_ids": self.stop_ids,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "sampling_seed": params.seed & (2**63 - 1),  # followed by servers with deterministic=True
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if params.banned_token_ids:
            sampling["logit_bias"] = {str(token): -1e9 for token in params.banned_token_ids}

        def body(server: Server) -> Json:
            return {
                "input_ids": prompt_ids + so_far,
                "sampling_params": sampling,
                "return_logprob": True,
                "logprob_start_len": -1,
                "extra_key": f"v{server.version}",
            }

        server, answer = await self.pool.dispatch(GENERATE_PATH, body, key, self._unpaused)
        stretch = read_stretch(answer, server.name)
        if stretch.version != server.version:
            # Somebody else changed its weights, or it was started anew: nothing it says can be placed.
            server.discard(f"it answered with weight version {stretch.version}, expected {server.version}")
            return await self._sample(prompt_ids, so_far, params, key)
        self.stats.prompt_tokens += stretch.prompt_tokens
        self.stats.cached_tokens += stretch.cached_tokens
        return stretch

    def _finished(self, ids: list[int], params: SamplingParams) -> FinishReason | None:
        """Whether what was cut off had just come to its end anyway."""
        if ids and ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(ids) >= params.max_new_tokens else None

    async def _drain(self, server: Server) -> None:
        """Cut off what the server is sampling, until it runs nothing of ours. A server that cannot is used no more."""
        deadline = time.monotonic() + ABORT_DEADLINE
        while server.in_flight and not server.problem:
            try:
                # Again and again: a request may have been under way to the server at the time of the first call.
                await self.pool.call(server, "POST", "/abort_request", {"abort_all": True}, self.pool.limits.control)
            except EngineError as error:
                if not await self.pool.healthy(server):
                    server.discard(f"it could not be interrupted: {error}")
                    return
            if time.monotonic() > deadline:
                server.discard(
                    f"{server.in_flight} requests were still running {ABORT_DEADLINE:.0f} s after being cut off"
                )
                return
            await asyncio.sleep(ABORT_EVERY)

    async def _load(self, server: Server, folder: Path, version: int) -> None:
        """Give an idle server new weights. Raises EngineError; where its weights are in doubt it has been discarded."""
        control = self.pool.limits.control
        try:
            await self.pool.call(server, "POST", "/pause_generation", {"mode": "retract"}, control)
            await self.pool.call(server, "GET", "/flush_cache?timeout=10", None, control)
        except EngineError:
            await self._continue(server)
            raise
        update: Json = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        try:
            await self.pool.call(server, "POST", "/update_weights_from_disk", update, UPDATE_DEADLINE)
            await check_version(self.pool, server, version)
        except RefusedError as error:
            if UNTOUCHED in str(error):
                await self._continue(server)
            else:  # SGLang says that it rolled back, but it loads the new folder again to do so
                server.discard(f"its weights are in doubt after a failed update: {error}")
            raise
        except EngineError as error:
            server.discard(f"its weights are in doubt after a failed update: {error}")
            raise
        server.version = version
        await self._continue(server)

    async def _continue(self, server: Server) -> None:
        try:
            await self.pool.call(server, "POST", "/continue_generation", {}, self.pool.limits.control)
        except EngineError as error:
            server.discard(f"it did not go on after a pause: {error}")
            raise


def read_stretch(answer: Json, name: str) -> Stretch:
    """An answer of /generate. Raises EngineError when it lacks what training needs, naming the server."""
    try:
        meta: dict[str, Any] = answer["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        kind = (meta["finish_reason"] or {}).get("type")
        return Stretch(
            ids=[int(pair[1]) for pair in pairs],
            logprobs=[float(pair[0]) for pair in pairs],
            finish=kind if kind in ("stop", "length") else None,
            version=int(meta["weight_version"]),
            prompt_tokens=int(meta.get("prompt_tokens") or 0),
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"{name} sent an answer that cannot be read ({type(error).__name__} {error}): {str(answer)[:300]}"
        ) from error
