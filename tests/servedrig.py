"""Stand-ins with the routes of SGLang, for faults that a real server cannot be told to have, and an engine over them.

That the routes and fields are SGLang's is shown by tests/gpu/test_sglang.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from httpstub import Answer, HttpStub
from safetensors.torch import save_file

from trainer.engines.dialects import make_dialect
from trainer.engines.http import Limits, Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.types import SamplingParams

MODEL = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 9, "tie_word_embeddings": False}
PARAMS = SamplingParams(max_new_tokens=6, seed=7)
FAST = Limits(connect=1.0, request=10.0, control=2.0, health=0.5, attempts=3, backoff=0.01)


class FaultyServer:
    """Samples 100, 101, … one token at a time. `hold`: stop before that token until let go or aborted."""

    def __init__(self, version: int | str = 0) -> None:
        self.version = version
        self.hold: int | None = None
        self.sglang = "0.5.17"
        self.update_answer: Answer | None = None
        self.fields_missing: tuple[str, ...] = ()
        self.adapters: list[str] = []
        self.free = asyncio.Event()
        self.aborted = asyncio.Event()

    async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        route = path.partition("?")[0]
        if route == "/generate":
            return await self.generate(body)
        if route == "/abort_request":
            self.aborted.set()
        if route == "/update_weights_from_disk":
            if self.update_answer is not None:
                return self.update_answer
            self.version, self.hold = body["weight_version"], None
            return 200, {"success": True}
        if route == "/load_lora_adapter":
            if self.update_answer is not None:
                return self.update_answer
            self.adapters.append(body["lora_name"])
        if route == "/unload_lora_adapter":
            self.adapters.remove(body["lora_name"])
        if route == "/v1/models":
            return 200, {"data": [{"id": "base"}, *({"id": name, "parent": "base"} for name in self.adapters)]}
        if route == "/server_info":
            return 200, {"version": self.sglang}
        if route == "/model_info":
            return 200, {"weight_version": str(self.version)}
        return 200, {}

    async def generate(self, body: dict[str, Any]) -> Answer:
        wanted = body["sampling_params"]["max_new_tokens"]
        count, finish = wanted, {"type": "length"}
        if self.hold is not None and self.hold < wanted:
            waits = [asyncio.create_task(event.wait()) for event in (self.free, self.aborted)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.aborted.is_set():
                count, finish = self.hold, {"type": "abort"}
        first = len(body["input_ids"])
        meta = {
            "output_token_logprobs": [[-0.5, 100 + first + n, None] for n in range(count)],
            "finish_reason": finish,
            "weight_version": str(self.version),
            "prompt_tokens": first,
            "cached_tokens": first // 2,
        }
        return 200, {"meta_info": {name: value for name, value in meta.items() if name not in self.fields_missing}}


def write_model(folder: Path, rows: int = 4, names: tuple[str, ...] = ("embed", "head")) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(rows, 2) for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


class Rig:
    """Servers, their engine, and the folders that it publishes."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.model = write_model(tmp_path / "model")
        self.pool = ServerPool("/health", FAST)
        self.engine = ServedEngine(self.pool, make_dialect("sglang"), self.model, {2})
        self.faults: list[FaultyServer] = []
        self.stubs: list[HttpStub] = []
        self.write: Callable[[Path], Path] = write_model

    async def update(self, version: int) -> None:
        """Publish weights to a folder, and from there to the servers."""
        await self.engine.update_from_folder(self.write(self.tmp_path / f"v{version}"), version)

    async def add(self, fault: FaultyServer | None = None) -> Server:
        self.faults.append(fault or FaultyServer())
        self.stubs.append(await HttpStub(self.faults[-1]).__aenter__())
        server = Server(f"s{len(self.stubs) - 1}", self.stubs[-1].url)
        await self.engine.join(server)
        return server

    async def started(self, number: int, requests: int) -> None:
        """Wait until a server has got so many requests (the probe of joining is one)."""
        while self.stubs[number].count("/generate") < requests + 1:
            await asyncio.sleep(0.01)


class Stubbed(Protocol):
    """What a test has open."""

    pool: ServerPool
    stubs: list[HttpStub]


R = TypeVar("R", bound=Stubbed)


def run_scenario(make: Callable[[], R], body: Callable[[R], Awaitable[None]]) -> None:
    """Run a test in an event loop of its own, and close what it has opened."""

    async def main() -> None:
        rig = make()
        try:
            async with asyncio.timeout(60):
                await body(rig)
        finally:
            await rig.pool.close()
            for stub in rig.stubs:
                stub.die()

    asyncio.run(main())
