"""CPU time of the trainer's process for each request to an engine server, beside plain sockets.

    python benchmarks/engine_client.py [--requests 256] [--prompt 1500] [--new 256] [--rounds 5]

Needs no GPU and no inference server: a small server in a process of its own answers every request after 0.3 s with as
many log-probs as SGLang would. All requests start at the same moment. Prints one JSON object: milliseconds of this
process's CPU time for each request, medians of rounds that alternate. `sockets`: encoded, sent and read with orjson on
plain asyncio streams, the least that Python needs; `engine`: `ServedEngine.generate`; `ratio`: sockets over engine. It
says nothing of a server's own speed; sglang_engine.py does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).parents[1]))

from stand_in import length_in, serve_http

from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.types import SamplingParams

SECONDS = 0.3
Ask = Callable[[int], Awaitable[object]]


def serve(new: int, pipe: Any) -> None:
    """The stand-in server; sends its port through the pipe."""
    meta = {
        "finish_reason": {"type": "length", "length": new},
        "prompt_tokens": 1,
        "cached_tokens": 0,
        "weight_version": "0",
        "output_token_logprobs": [[-1.2345678806304932, 12345 + n, None] for n in range(new)],
    }
    sampled = json.dumps({"output_ids": [12345 + n for n in range(new)], "meta_info": meta}).encode()
    other = b'{"version": "0.5.17", "weight_version": "0"}'

    serve_http(pipe, lambda head: (SECONDS, sampled) if head.startswith(b"POST /generate") else (0.0, other))


async def clients(port: int, prompts: list[list[int]], new: int, stack: AsyncExitStack) -> dict[str, Ask]:
    dialect = make_dialect("sglang")
    pool = ServerPool(dialect.health_path)
    stack.push_async_callback(pool.close)
    engine = ServedEngine(pool, dialect, Path(), set())
    server = Server("one", f"http://127.0.0.1:{port}")
    await engine.join(server)
    params = SamplingParams(new)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def body(number: int) -> dict[str, Any]:
        return dialect.request(prompts[number], params, new, [], server)

    async def sockets(number: int) -> object:
        data = orjson.dumps(body(number))
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        writer.write(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        payload = await reader.readexactly(length_in(await reader.readuntil(b"\r\n\r\n")))
        idle.append((reader, writer))
        return orjson.loads(payload)

    async def through_engine(number: int) -> object:
        return await engine.generate(prompts[number], params, key=str(number))

    return {"sockets": sockets, "engine": through_engine}


async def measure(port: int, given: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(0)
    prompts = [[draw.randrange(1000, 20000) for _ in range(given.prompt)] for _ in range(given.requests)]
    async with AsyncExitStack() as stack:
        asks = await clients(port, prompts, given.new, stack)
        found: dict[str, list[float]] = {name: [] for name in asks}
        for number in range(given.rounds + 1):  # the first opens the connections
            for name, ask in asks.items():
                began = time.process_time()
                await asyncio.gather(*(ask(n) for n in range(given.requests)))
                milliseconds = 1000 * (time.process_time() - began) / given.requests
                found[name] += [milliseconds] if number else []
    median = {name: round(statistics.median(values), 3) for name, values in found.items()}
    spread = {name: [round(min(values), 3), round(max(values), 3)] for name, values in found.items()}
    ratio = round(median["sockets"] / median["engine"], 3)
    return {"cpu_milliseconds_per_request": median, "range": spread, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(given.new, theirs), daemon=True)
    process.start()
    report = {"requests": given.requests, "prompt": given.prompt, "new": given.new}
    print(json.dumps({**report, **asyncio.run(measure(ours.recv(), given))}, indent=1))


if __name__ == "__main__":
    main()
