"""CPU time of the trainer's process for each request to a judge, beside httpx and plain sockets.

    python benchmarks/judge_client.py [--requests 832] [--prompt 3000] [--concurrency 64] [--rounds 5]

Needs no GPU and no judge: a small server in a process of its own answers every chat after 0.2 s with a verdict. All
requests are there at the same moment, as at the end of a step, and so many at a time are sent. Prints one JSON object:
milliseconds of this process's CPU time for each request and seconds for all of them, medians of rounds that alternate.
`sockets`: orjson on plain asyncio streams, the least that Python needs; `judge`: `ChatClient.chat`; `httpx`: what
openai's own client sends with. `ratio`: sockets over judge; `over_httpx`: httpx over judge. It says nothing of a
judge's own speed; memalpha_judge.py does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import orjson

sys.path.insert(0, str(Path(__file__).parents[1]))

from stand_in import length_in, serve_http

from trainer.judge.client import ChatClient

SECONDS = 0.2
ANSWER = json.dumps({"choices": [{"message": {"role": "assistant", "content": '{"VALID": true}'}}]}).encode()
CHAT = "/v1/chat/completions"
Ask = Callable[[list[dict[str, str]]], Awaitable[object]]


def serve(pipe: Any) -> None:
    """The stand-in judge; sends its port through the pipe."""

    serve_http(pipe, lambda _: (SECONDS, ANSWER))


async def clients(port: int, concurrency: int, stack: AsyncExitStack) -> dict[str, Ask]:
    url = f"http://127.0.0.1:{port}"
    judge = ChatClient(lambda: [url], "judge", concurrency)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    library = await stack.enter_async_context(httpx.AsyncClient(timeout=60, limits=limits, trust_env=False))
    slots = asyncio.Semaphore(concurrency)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def sockets(messages: list[dict[str, str]]) -> object:
        data = orjson.dumps({"model": "judge", "messages": messages})
        async with slots:
            reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            payload = await reader.readexactly(length_in(await reader.readuntil(b"\r\n\r\n")))
            idle.append((reader, writer))
        return orjson.loads(payload)

    async def through_httpx(messages: list[dict[str, str]]) -> object:
        async with slots:
            return (await library.post(url + CHAT, json={"model": "judge", "messages": messages})).json()

    return {"sockets": sockets, "judge": judge.chat, "httpx": through_httpx}


async def measure(port: int, given: argparse.Namespace) -> dict[str, Any]:
    cpu: dict[str, list[float]] = {}
    wall: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        asks = await clients(port, given.concurrency, stack)
        for turn in range(given.rounds + 1):  # the first opens the connections
            for name, ask in asks.items():
                chats = [
                    [{"role": "user", "content": f"{turn} {number} " + "x" * given.prompt}]
                    for number in range(given.requests)
                ]
                began, used = time.perf_counter(), time.process_time()
                await asyncio.gather(*map(ask, chats))
                if turn:
                    cpu.setdefault(name, []).append(1000 * (time.process_time() - used) / given.requests)
                    wall.setdefault(name, []).append(time.perf_counter() - began)
    milliseconds = {name: round(statistics.median(values), 3) for name, values in cpu.items()}
    return {
        "cpu_milliseconds_per_request": milliseconds,
        "range": {name: [round(min(values), 3), round(max(values), 3)] for name, values in cpu.items()},
        "seconds": {name: round(statistics.median(values), 2) for name, values in wall.items()},
        "seconds_of_the_server_alone": round(-(-given.requests // given.concurrency) * SECONDS, 2),
        "ratio": round(milliseconds["sockets"] / milliseconds["judge"], 3),
        "over_httpx": round(milliseconds["httpx"] / milliseconds["judge"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=832)
    parser.add_argument("--prompt", type=int, default=3000, help="characters")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True).start()
    report = {"requests": given.requests, "prompt": given.prompt, "concurrency": given.concurrency}
    print(json.dumps({**report, **asyncio.run(measure(ours.recv(), given))}, indent=1))


if __name__ == "__main__":
    main()
