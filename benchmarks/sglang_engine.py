"""Tokens/s of concurrent requests through the SGLang engine, over those of the bare server on the same requests.

    python3 benchmarks/sglang_engine.py MODEL [--shapes 64x512x256 …] [--rounds 5] [--seconds 300] [--flags "…"]

Starts one SGLang server on GPU 0 with the model folder and prints JSON objects, a line each, as they are known; what
would not end within --seconds, counted from the start of the script, is left out. For each shape (requests, prompt
tokens, new tokens), output tokens/s, the median of rounds that alternate:

* `bare`: each request on a plain socket of its own, encoded beforehand, its answer read and thrown away;
* `engine`: each request through `ServedEngine.generate`; `ratio`: engine over bare;
* `batch`: all requests in one HTTP call, which no agent can do, since its requests come one by one.

Every round has prompts of its own (random ids), the caches are emptied before each, and the end token is banned, so
that every response has the same length. `update`: seconds of an update of the weights from disk while the requests are
being sampled, by part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server, ServerPool
from trainer.engines.launching import launch
from trainer.engines.options import ServerOptions
from trainer.engines.served import ServedEngine
from trainer.types import SamplingParams

UPDATE_SECONDS = 20.0


def show(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


@dataclass(frozen=True)
class Shape:
    requests: int
    prompt: int
    new: int

    @classmethod
    def read(cls, text: str) -> Shape:
        return cls(*map(int, text.split("x")))

    def prompts(self, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(1000, 20000) for _ in range(self.prompt)] for _ in range(self.requests)]


@dataclass
class Rig:
    engine: ServedEngine
    server: Server
    ends: tuple[int, ...]

    def bodies(self, shape: Shape, seed: int) -> list[dict[str, Any]]:
        bias = {str(token): -1e9 for token in self.ends}
        sampling = {"temperature": 1.0, "max_new_tokens": shape.new, "logit_bias": bias}
        rest = {"sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}
        return [{"input_ids": prompt, **rest} for prompt in shape.prompts(seed)]

    async def bare(self, shape: Shape, seed: int) -> float:
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        sent = [json.dumps(body).encode() for body in self.bodies(shape, seed)]
        began = time.perf_counter()
        answers = await asyncio.gather(*(exchange(host, int(port), "/generate", body) for body in sent))
        seconds = time.perf_counter() - began
        assert all(len(json.loads(a)["meta_info"]["output_token_logprobs"]) == shape.new for a in answers)
        return seconds

    async def batch(self, shape: Shape, seed: int) -> float:
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        bodies = self.bodies(shape, seed)
        body = json.dumps({**bodies[0], "input_ids": [b["input_ids"] for b in bodies]}).encode()
        began = time.perf_counter()
        assert len(json.loads(await exchange(host, int(port), "/generate", body))) == shape.requests
        return time.perf_counter() - began

    async def through_engine(self, shape: Shape, seed: int) -> float:
        params = SamplingParams(shape.new, banned_token_ids=self.ends)
        asked = shape.prompts(seed)
        began = time.perf_counter()
        dones = await asyncio.gather(*(self.engine.generate(p, params, key=str(n)) for n, p in enumerate(asked)))
        seconds = time.perf_counter() - began
        assert all(len(done.token_ids) == shape.new for done in dones)
        return seconds

    async def rates(self, shape: Shape, rounds: int, deadline: float) -> dict[str, Any]:
        found: dict[str, list[float]] = {"bare": [], "engine": [], "batch": []}
        runs = {"bare": self.bare, "engine": self.through_engine, "batch": self.batch}
        longest = 0.0
        for number in range(rounds + 1):  # the first warms up
            start = time.perf_counter()
            if start + longest > deadline:
                break
            for name, run in runs.items():
                await self.engine.pool.call(self.server, "POST", "/flush_cache?timeout=30", {}, 60)
                seconds = await run(shape, number)
                found[name] += [shape.requests * shape.new / seconds] if number else []
                show({**asdict(shape), "round": number, name: round(shape.requests * shape.new / seconds)})
            longest = max(longest, time.perf_counter() - start)
        if not found["batch"]:
            return {**asdict(shape), "stopped": "no time"}
        median = {name: round(statistics.median(values)) for name, values in found.items()}
        ratio = round(median["engine"] / median["bare"], 3)
        spread = {name: [round(min(values)), round(max(values))] for name, values in found.items()}
        return {**asdict(shape), "output_tokens_per_second": median, "range": spread, "ratio": ratio}

    async def update(self, shape: Shape, version: int) -> dict[str, float]:
        """Seconds of each part of an update in the middle of the requests."""
        params = SamplingParams(shape.new, banned_token_ids=self.ends)
        jobs = asyncio.gather(*(self.engine.generate(prompt, params) for prompt in shape.prompts(100 + version)))
        while self.server.in_flight < shape.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        await self.engine.update_from_folder(self.engine.model, version)
        whole = time.perf_counter() - began
        dones = await jobs
        stats = self.engine.stats
        parts = {"pause": stats.pause_seconds, "load": stats.transfer_seconds, "whole": whole}
        return {**{k: round(v, 4) for k, v in parts.items()}, "interrupted": sum(bool(done.spans) for done in dones)}


async def exchange(host: str, port: int, path: str, body: bytes) -> bytes:
    """One POST; the answer's body."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    status, _, rest = answer.partition(b"\r\n")
    assert b" 200 " in status, answer[:500]
    return rest.partition(b"\r\n\r\n")[2]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shapes", type=Shape.read, nargs="+", default=[Shape(64, 512, 256)])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="in all; nothing is begun that takes longer")
    parser.add_argument("--log", type=Path, default=Path("sglang.log"))
    parser.add_argument("--flags", default="")
    given = parser.parse_args()
    began = time.perf_counter()
    options = ServerOptions(given.model, given.log, flags=tuple(shlex.split(given.flags)))
    server, process = await launch("sglang", options)
    start_seconds = time.perf_counter() - began
    dialect = make_dialect("sglang")
    pool = ServerPool(dialect.health_path)
    config = json.loads((given.model / "config.json").read_text())
    ends = config.get("eos_token_id")
    engine = ServedEngine(pool, dialect, given.model, set())
    rig = Rig(engine, server, tuple(ends if isinstance(ends, list) else [ends]))
    try:
        version = await engine.join(server)
        show({**hardware(), "sglang": version, "model": given.model.name, "start_seconds": round(start_seconds, 1)})
        for shape in given.shapes:
            show({"speed": await rig.rates(shape, given.rounds, began + given.seconds)})
        for number in range(1, given.rounds + 1):
            if time.perf_counter() - began < given.seconds - UPDATE_SECONDS:
                show({"update": await rig.update(given.shapes[0], number)})
    finally:
        await pool.close()
        await process.stop()


def hardware() -> dict[str, Any]:
    import torch  # noqa: PLC0415 (the server comes first: torch takes seconds)

    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    asyncio.run(main())
