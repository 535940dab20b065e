"""A small real HTTP server over asyncio whose answers a test chooses: it stands for servers that misbehave.

It is no model of an inference server. What a well-behaved one does is tested against a real one (tests/gpu).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self


class Hang:
    """Answer of a server that never answers."""


class Drop:
    """Answer of a server that closes the connection in the middle of its answer."""


Answer = tuple[int, Any] | Hang | Drop
Handler = Callable[[str, str, dict[str, Any]], Awaitable[Answer]]


class HttpStub:
    """Serves on a loopback port until it is closed.

    seen: (method, path, body) of every request. connections: how many were made.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.seen: list[tuple[str, str, dict[str, Any]]] = []
        self.url = ""
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> HttpStub:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()

    def die(self) -> None:
        """Close the port and every connection, as the end of the process does."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    @property
    def open(self) -> int:
        """Connections that there are now."""
        return len(self._writers)

    def count(self, path: str) -> int:
        """How many requests came for a path."""
        return sum(1 for _, seen, _ in self.seen if seen.partition("?")[0] == path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                length, last = 0, False
                while (header := (await reader.readline()).strip()) != b"":
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                    last = last or (name.lower(), value.strip()) == ("connection", "close")
                body = json.loads(await reader.readexactly(length)) if length else {}
                self.seen.append((method, path, body))
                if not await self._answer(writer, await self.handler(method, path, body), last) or last:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, answer: Answer, last: bool) -> bool:
        if isinstance(answer, Hang):
            await asyncio.Event().wait()
        if isinstance(answer, Drop):
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"half":')
            await writer.drain()
            return False
        assert isinstance(answer, tuple)
        status, content = answer
        payload = json.dumps(content).encode()
        close = "Connection: close\r\n" * last
        writer.write(f"HTTP/1.1 {status} X\r\n{close}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        return True


class StubThread:
    """An `HttpStub` on a thread of its own, for code that waits; `url` is known within the block."""

    def __init__(self) -> None:
        self.url = ""
        self._ready, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def answer(self, stub: HttpStub, path: str, body: dict[str, Any]) -> Answer:
        """Answer a request."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(30)

    async def _serve(self) -> None:
        stub = HttpStub(lambda _, path, body: self.answer(stub, path, body))
        async with stub:
            self.url = stub.url
            self._ready.set()
            while not self._done.is_set():
                await asyncio.sleep(0.02)
