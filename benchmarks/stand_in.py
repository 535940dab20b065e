"""A stand-in for an inference server, for scripts that measure what a client costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def serve_http(pipe: Any, answer: Callable[[bytes], tuple[float, bytes]]) -> None:
    """Serve on a free port, which is sent through the pipe, until the process ends.

    answer: a request's head -> seconds to wait, and the JSON to send.
    """

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(length_in(head))
                seconds, payload = answer(head)
                if seconds:
                    await asyncio.sleep(seconds)
                start = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
                writer.write(start.encode() + payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=4096, limit=1 << 22)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def length_in(head: bytes) -> int:
    """Bytes of the content that follow a head."""
    _, found, rest = head.lower().partition(b"content-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0
