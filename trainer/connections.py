"""HTTP connections to servers that are asked many times at once: engines and judges."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import time
from contextlib import suppress
from typing import Any

import aiohttp

JSON = {"Content-Type": "application/json"}
LAST = {"Connection": "close"}
"""With a request: its connection is closed after it, and not kept."""

# A host that vanishes says nothing, and whoever waits for its answer sends nothing: the kernel asks after so many idle
# seconds, then so often, and so many times. Packets that nobody acknowledges are given up after as long.
IDLE_S, EVERY_S, TIMES = 20, 5, 4
GONE_S = IDLE_S + EVERY_S * TIMES
"""Seconds after which a connection to a host that vanished fails, at the latest."""
IDLE_OF_SERVERS_S = 5.0
"""Seconds after which SGLang and vLLM close an idle connection, unless they are told otherwise."""
LONG_IDLE_S = 3600
"""What a run's own servers are told. A step begins with thousands of requests at once, and to connect for each is half
of their cost."""
NEED_S = 600.0
"""Connections are kept that were busy at once within so long, and within as long before; idle time does not count."""
BEAT_S = 0.05
COLLECT_AFTER = (50_000, 20, 50)
"""Objects made until the youngest are looked at, and such looks until older ones are; Python's own: 700, 10, 10."""
MOST_FILES = 1 << 16


def open_session(idle: float = IDLE_OF_SERVERS_S, **options: Any) -> aiohttp.ClientSession:
    """Connections that belong to the running event loop, as many as are asked for; no cookies, no proxies.

    aiohttp and not httpx, which takes milliseconds of this process for a request (benchmarks/judge_client.py).

    idle: seconds after which the servers close an idle connection. It is closed here before: one that a server closes
    at the moment of sending is a lost request.
    """
    _allow_files()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=0.6 * idle, socket_factory=_socket)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, **options)


class KeptConnections:
    """Which connections to a server are worth keeping: as many as were busy at once lately.

    A held-out evaluation may have needed thousands, and the steps after it hundreds. A step's beginning needs as many
    as the step before, so those stay however long the ranks learn.
    """

    def __init__(self) -> None:
        self._open = self._busy = self._closing = 0
        self._peak = self._peak_before = 0
        self._since = time.monotonic()

    def begin(self) -> bool:
        """Count a request that begins; returns whether its connection is to be closed after it."""
        self._busy += 1
        self._open = max(self._open, self._busy)
        if time.monotonic() - self._since > NEED_S:
            self._since, self._peak_before, self._peak = time.monotonic(), self._peak, 0
        self._peak = max(self._peak, self._busy)
        last = self._open - self._closing > max(self._peak, self._peak_before)
        self._closing += last
        return last

    def end(self, last: bool, lost: bool) -> None:
        """Count the end of a request. last: what `begin` has returned. lost: its connection has failed."""
        self._busy -= 1
        self._closing -= last
        self._open -= last or lost


class LoopLag:
    """How long an event loop was kept from its work: by much to do at once, by other threads or other processes.

    What was not done in that time says nothing about the servers. `start` within the loop; it ends with the loop.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._next = time.monotonic()

    def start(self) -> None:
        """Count from now on."""
        self._next = time.monotonic() + BEAT_S
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def seconds(self) -> float:
        """Seconds until now in which the loop did not come round."""
        return self._total + max(0.0, time.monotonic() - self._next)

    def _beat(self) -> None:
        self._total = self.seconds()
        self.start()


def collect_seldom() -> None:
    """For a process that reads thousands of long answers: have Python's garbage collector look at little, and seldom.

    Every sampled token comes as a small list. A few answers make the collector look through all objects of the process
    again, hundreds of thousands of them the libraries' own, for a third of a second: most of what an answer cost. What
    is there now is not looked at any more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def _allow_files() -> None:
    """Every request under way is a socket, and a step has thousands: have as many as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _socket(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(address[0], address[1], address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"KEEPIDLE": IDLE_S, "KEEPINTVL": EVERY_S, "KEEPCNT": TIMES, "USER_TIMEOUT": GONE_S * 1000}
    for name, value in wanted.items():
        if option := getattr(socket, f"TCP_{name}", None):  # they are Linux's
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
