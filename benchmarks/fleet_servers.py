"""Stand-in engine servers for benchmarks/fleet.py: SGLang's routes over real sockets, answered from a timer.

    python benchmarks/fleet_servers.py RATES.json --folder RUN/servers --name server-0 [--name …] --gpus 0, --address A

Every server has a port and a registration of its own, as one of a run has. How long it takes follows `Machine`; ids and
log-probs are drawn, responses have lengths around the mean of the rates. A line `lose NAME N` on standard input has a
server end without a word once it has taken N more requests, `return NAME 0` begin again as one that was started anew.
At the end of the input it prints, for every server, a JSON object: requests, seconds at work, seconds by which its
answers were late on average, and its part of this process's CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet_machine import Machine, Rates, load_factor
from stand_in import length_in

from trainer.connections import LONG_IDLE_S
from trainer.serving import registry
from trainer.serving.registry import Registration

BLOCK = 2048
"""Bytes of a prompt, as it is sent, that are found in the prefix cache together."""
VARIETY = 4096
"""Different places of the drawn response at which one begins, so that no two memories are alike."""


class Drawn:
    """A long response, drawn once: cut to length it is every response."""

    def __init__(self, ids: tuple[int, ...], most: int) -> None:
        draw = random.Random(0)
        self.ids = [draw.choice(ids) for _ in range(most + VARIETY)]
        pairs = [f"[{-2.5 * draw.random()}, {one}, null]".encode() for one in self.ids]
        self._starts = [0]
        for pair in pairs:
            self._starts.append(self._starts[-1] + len(pair) + 1)
        self._pairs = b",".join(pairs)

    def pairs(self, first: int, count: int) -> bytes:
        """JSON of `count` log-probs with their ids, without the brackets around them."""
        return self._pairs[self._starts[first] : max(self._starts[first], self._starts[first + count] - 1)]


class StandIn:
    """One server. Its times are those of `time.perf_counter`."""

    def __init__(
        self, name: str, rates: Rates, drawn: Drawn, folder: Path, address: str, gpus: tuple[int, ...]
    ) -> None:
        self.name, self.rates, self.drawn, self.folder = name, rates, drawn, folder
        self.address, self.gpus = address, gpus
        self.load_seconds = rates.load * load_factor(name)
        self.requests, self.late = 0, 0.0
        self.last: int | None = None
        self.talks: set[Talk] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, and register."""
        self.version, self.machine = "0", Machine(self.rates, time.perf_counter())
        self._cache: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Talk(self), self.address, 0, backlog=4096)
        url = f"http://{self.address}:{self._server.sockets[0].getsockname()[1]}"
        registry.write(
            self.folder,
            Registration(
                self.name,
                "sglang",
                "",
                self.address,
                os.getpid(),
                time.time(),
                "ready",
                url,
                self.gpus,
                idle=LONG_IDLE_S,
            ),
        )

    def lose(self) -> None:
        """End as a process that is killed: the port and all connections are gone, the registration stays."""
        assert self._server is not None
        self._server.close()
        for talk in list(self.talks):
            talk.transport.abort()
        if self._timer is not None:
            self._timer.cancel()

    def generate(self, body: bytes, talk: Talk) -> None:
        """Take a sampling request."""
        ids_end = body.index(b"]", 13)
        prompt = body.count(b",", 0, ids_end) + 1
        request = json.loads(b"{" + body[ids_end + 2 :])
        sampling = request["sampling_params"]
        limit = sampling["max_new_tokens"]
        draw = random.Random(sampling.get("sampling_seed", 0) * 1_000_003 + prompt)
        # Exponential, so that what is left of a response that was cut off is drawn like a whole one.
        tokens = min(limit, max(len(self.rates.end), math.ceil(draw.expovariate(1 / (self.rates.mean * limit)))))
        now = time.perf_counter()
        blocks = self._blocks(body, ids_end)
        found = 0
        while found < len(blocks) and self._cache.get(blocks[found], math.inf) <= now:
            found += 1
        cached = prompt * found * BLOCK // ids_end

        def answer(sampled: int, cut: bool, seconds: float, late: float) -> None:
            self.late += late
            reason = "abort" if cut else "length" if sampled >= limit else "stop"
            first = draw.randrange(VARIETY)
            meta = {
                "finish_reason": {"type": reason}, "prompt_tokens": prompt, "cached_tokens": cached,
                "weight_version": self.version, "e2e_latency": seconds,
            }  # fmt: skip
            talk.send(self._answer(first, sampled, reason == "stop", meta))

        self.requests += 1
        read = self.machine.add(now, prompt, prompt - cached, tokens, answer)
        for block in blocks[found:]:
            self._cache.setdefault(block, read)
        self._wake()
        if self.requests == self.last:
            self.lose()

    def _blocks(self, body: bytes, end: int) -> list[int]:
        """What stands for each beginning of the prompt, a block longer than the one before."""
        found, last = [], 0
        for start in range(0, end - BLOCK, BLOCK):
            last = hash((last, body[start : start + BLOCK]))
            found.append(last)
        return found

    def _answer(self, first: int, count: int, ends: bool, meta: dict[str, Any]) -> bytes:
        end = self.rates.end if ends else ()
        count -= len(end)
        tail = [f"[-0.5, {one}, null]".encode() for one in end]
        pairs = b",".join(filter(None, [self.drawn.pairs(first, count), *tail]))
        ids = json.dumps([*self.drawn.ids[first : first + count], *end]).encode()
        return b'{"output_ids": %b, "meta_info": {"output_token_logprobs": [%b], %b}' % (
            ids, pairs, json.dumps(meta)[1:].encode(),
        )  # fmt: skip

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.machine.due - time.perf_counter()
        self._timer = None if due == math.inf else asyncio.get_running_loop().call_later(max(0.0, due), self._run)

    def _run(self) -> None:
        self.machine.run(time.perf_counter())
        self._wake()

    def other(self, path: bytes, body: bytes) -> tuple[float, dict[str, Any]]:
        """Any other request: after how many seconds which answer is sent."""
        if path.startswith(b"/abort_request"):
            self.machine.cut_off(time.perf_counter())
            self._wake()
        elif path.startswith(b"/flush_cache"):
            self._cache.clear()
        elif path.startswith(b"/update_weights_from_disk"):
            self.version = json.loads(body)["weight_version"]
            return self.load_seconds, {"success": True}
        return 0.0, {"version": "0.5.17", "weight_version": self.version}


class Talk(asyncio.Protocol):
    """A connection to a server: one request after the other."""

    def __init__(self, server: StandIn) -> None:
        self.server = server
        self.parts = bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.talks.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self.server.talks.discard(self)

    def data_received(self, data: bytes) -> None:
        self.parts += data
        end = self.parts.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.parts[: end + 4])
        whole = end + 4 + length_in(head)
        if len(self.parts) < whole:
            return
        body = bytes(self.parts[end + 4 : whole])
        del self.parts[:whole]
        path = head.split(b" ", 2)[1]
        if path == b"/generate":
            self.server.generate(body, self)
            return
        seconds, answer = self.server.other(path, body)
        payload = json.dumps(answer).encode()
        asyncio.get_running_loop().call_later(seconds, self.send, payload)

    def send(self, payload: bytes) -> None:
        if not self.transport.is_closing():
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
            self.transport.write(head.encode() + payload)


async def serve(servers: dict[str, StandIn]) -> None:
    """Serve until the input ends."""
    for server in servers.values():
        await server.start()
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        what, name, number = line.decode().split()
        server = servers[name]
        if what == "lose":
            server.last = server.requests + int(number)
        else:
            await server.start()
    for name, server in servers.items():
        late = server.late / max(1, server.requests)
        told = {"server": name, "requests": server.requests, "busy_s": server.machine.busy, "late_s": late}
        told["cpu_s"] = time.process_time() / len(servers)
        print(json.dumps(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rates", type=Path, help="file with the fields of fleet_machine.Rates, and `most`")
    parser.add_argument("--folder", type=Path, required=True, help="of the run's registrations")
    parser.add_argument("--name", action="append", required=True)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--address", default="127.0.0.1")
    given = parser.parse_args()
    values = json.loads(given.rates.read_text(encoding="utf-8"))
    drawn = Drawn(tuple(values["ids"]), values.pop("most"))
    rates = Rates(**values)
    gpus = tuple(int(one) for one in given.gpus.split(",") if one)
    servers = {name: StandIn(name, rates, drawn, given.folder, given.address, gpus) for name in given.name}
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(servers))


if __name__ == "__main__":
    main()
