"""Where answers come from: the embedded engine, servers started for this evaluation, or one that runs already."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig

from evaluation.config import EvalConfig, ServerConfig
from evaluation.openai_engine import OpenAIEngine
from evaluation.plan import visible_gpus
from evaluation.servers import KeptServers
from trainer.config_parts import ModelConfig
from trainer.engines.base import Engine, EngineError
from trainer.engines.dialects import make_dialect
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.http import Limits, Server, ServerPool
from trainer.engines.options import ServerOptions
from trainer.engines.served import ServedEngine
from trainer.errors import RunError, UserError
from trainer.train.model import load_lm, stop_token_ids
from trainer.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine, how many requests it takes at a time, and versions of its software."""

    engine: Engine
    concurrency: int
    versions: dict[str, str]


KEYED_TOKENS = 512
"""Answers to a question whose prompt is so long are asked of one server, which reads it once. Shorter ones go to the
least busy server: answers to one question would all go to the same."""


class Sampling:
    """Engine that applies top_p and top_k to sampled (not greedy) answers."""

    def __init__(self, inner: Engine, top_p: float, top_k: int) -> None:
        self.inner, self.top_p, self.top_k = inner, top_p, top_k

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        """See `Engine`."""
        if params.temperature:
            params = replace(params, top_p=self.top_p, top_k=self.top_k)
        return await self.inner.generate(prompt_ids, params, key=key if len(prompt_ids) >= KEYED_TOKENS else "")

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        """See `Engine`."""
        if len(prefix_ids) >= KEYED_TOKENS:
            self.inner.prefetch(prefix_ids, key=key)


def context_window(folder: Path, server: ServerConfig) -> int:
    """Longest prompt plus response, in tokens, by the checkpoint's config and the settings."""
    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "text_config", config)
    own = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
    return min(own, server.context_length) if server.context_length else own


@asynccontextmanager
async def open_engine(
    config: EvalConfig, kind: str, folder: Path, tokenizer: Any, logs: Path, cancelled: Callable[[], bool]
) -> AsyncIterator[Opened]:
    """Start an engine for the whole evaluation, and end it afterwards.

    Raises:
        UserError: the engine cannot be used here. RunError: a server did not start; the message holds the cause.
    """
    if kind == "embedded":
        yield _embedded(config, folder, tokenizer, cancelled)
    elif kind == "openai":
        engine = OpenAIEngine(config.server.url, tokenizer, config.server.wait_s)
        try:
            yield Opened(engine, config.server.concurrency or 256, {"server": await engine.probe()})
        finally:
            await engine.close()
    elif config.server.url:
        async with _running(config, kind, folder, tokenizer) as opened:
            yield opened
    else:
        async with _servers(config, kind, folder, tokenizer, logs) as opened:
            yield opened


def _embedded(config: EvalConfig, folder: Path, tokenizer: Any, cancelled: Callable[[], bool]) -> Opened:
    cuda = torch.cuda.is_available()
    lm = load_lm(folder, ModelConfig(dtype=config.server.dtype if cuda else "float32"))
    lm = lm.to("cuda" if cuda else "cpu").eval()
    engine = EmbeddedEngine(lm, stop_token_ids(lm, tokenizer), cancelled=cancelled)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Opened(engine, config.server.concurrency or 32, versions)


@asynccontextmanager
async def _running(config: EvalConfig, kind: str, folder: Path, tokenizer: Any) -> AsyncIterator[Opened]:
    """A server that runs already; asked like those that are started here, with token ids on its own routes."""
    url = config.server.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--server-url {url}: give the address of a running server, http://HOST:PORT")
    engine = _served(kind, folder, tokenizer)
    try:
        try:
            version = await engine.join(Server(url, url))
        except EngineError as error:
            raise RunError(
                f"no {engine.dialect.title} that can be asked with token ids answers at {url}: {error}. With "
                "--engine openai any server with /v1/completions will do"
            ) from error
        yield Opened(engine, config.server.concurrency or 256, {engine.dialect.title: version})
    finally:
        await engine.pool.close()


def _served(kind: str, folder: Path, tokenizer: Any, limits: Limits | None = None) -> ServedEngine:
    """An engine over a pool that is empty yet."""
    dialect = make_dialect(kind)  # type: ignore[arg-type]
    return ServedEngine(ServerPool(dialect.health_path, limits), dialect, folder, _stop_ids(folder, tokenizer))


@asynccontextmanager
async def _servers(config: EvalConfig, kind: str, folder: Path, tokenizer: Any, logs: Path) -> AsyncIterator[Opened]:
    server = config.server
    assert kind in ("sglang", "vllm")
    groups = _gpu_groups(server, kind)
    options = [
        ServerOptions(
            model=folder,
            log=logs / f"{kind}-{number}.log",
            name=f"{kind}-{number}",
            gpus=gpus,
            memory_fraction=server.memory_fraction,
            context_length=server.context_length,
            prefill_delay_ms=server.prefill_delay_ms if kind == "sglang" else 0.0,  # vLLM has no such thing
            flags=tuple(server.flags),
            start_seconds=server.start_seconds,
            python=_interpreter(server, kind),
        )
        for number, gpus in enumerate(groups)
    ]
    engine = _served(kind, folder, tokenizer, Limits.beside(server.hang_seconds))
    servers = KeptServers(kind, engine, options, server.restarts, server.hang_seconds)  # type: ignore[arg-type]
    try:
        versions = await servers.start()
        yield Opened(servers, server.concurrency or 256 * len(options), {engine.dialect.title: versions[0]})
    finally:
        await servers.close()


def _interpreter(server: ServerConfig, kind: str) -> str:
    chosen = server.python or (os.environ.get("CLUSTERKIT_VLLM_PYTHON", "") if kind == "vllm" else "")
    if not chosen:
        return sys.executable
    found = shutil.which(chosen)
    if found is None:
        raise UserError(f"{chosen} is no program: name the interpreter that has the server with --server-python")
    return found


def _gpu_groups(server: ServerConfig, kind: str) -> list[tuple[int, ...]]:
    visible = visible_gpus()
    count = server.gpus or visible
    if count > visible:
        raise UserError(f"--gpus {count}: this machine has {visible}; lower it, or leave it out")
    if not count and kind == "vllm":
        return [()]
    if not count:
        raise UserError("SGLang needs a GPU, and there is none here: use --engine embedded, or vllm on the CPU")
    size = server.tensor_parallel
    if count % size:
        raise UserError(f"{count} GPUs cannot be shared out to servers of {size}: choose --gpus as a multiple of it")
    return [tuple(range(first, first + size)) for first in range(0, count, size)]


def _stop_ids(folder: Path, tokenizer: Any) -> set[int]:
    """End tokens, as the embedded engine takes them, without loading the weights."""
    generation = None
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder)
    lm = SimpleNamespace(config=AutoConfig.from_pretrained(folder), generation_config=generation)
    return stop_token_ids(lm, tokenizer)
