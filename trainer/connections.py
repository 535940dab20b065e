"""HTTP connections to servers that are asked many times at once: engines and judges."""

from __future__ import annotations

from typing import Any

import aiohttp

JSON = {"Content-Type": "application/json"}


def open_session(**options: Any) -> aiohttp.ClientSession:
    """Connections that belong to the running event loop, as many as are asked for; no cookies, no proxies.

    aiohttp and not httpx, which takes milliseconds of this process for a request (benchmarks/judge_client.py).
    """
    # Servers close idle connections after 5 s; one that is closed at the moment of sending is a lost request.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, **options)
