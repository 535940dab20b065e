"""Download one file over HTTP to disk, with progress and a check of its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from trainer.errors import RunError

CONNECT_SECONDS = 20.0
READ_SECONDS = 60.0
"""Longest wait for data from the server."""
PROGRESS_BYTES = 10_000_000
"""Bytes between two messages about progress."""

Say = Callable[[str], None]


def download(url: str, file: Path, say: Say, expected_sha256: str = "") -> None:
    """Save `url` as `file`.

    Raises:
        RunError: the server cannot be reached, refuses, breaks off, or sends other bytes than expected.
    """
    import httpx  # noqa: PLC0415 (slow to import, and most commands download nothing)

    shown = httpx.URL(url).copy_with(userinfo=b"", query=None)
    advice = "Check the network (HTTPS_PROXY is honoured), or download it elsewhere and add --from FILE"
    digest = hashlib.sha256()
    received = 0
    try:
        with (
            httpx.stream(
                "GET", url, follow_redirects=True, timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
            ) as response,
            file.open("wb") as out,
        ):
            response.raise_for_status()
            total = int(response.headers.get("content-length", 0))
            say(f"downloading {shown}" + (f" ({total / 1e6:.0f} MB)" if total else ""))
            for block in response.iter_bytes(1 << 20):
                out.write(block)
                digest.update(block)
                if (received + len(block)) // PROGRESS_BYTES > received // PROGRESS_BYTES:
                    say(f"  {(received + len(block)) / 1e6:.0f} MB" + (f" of {total / 1e6:.0f} MB" if total else ""))
                received += len(block)
    except httpx.HTTPStatusError as error:
        raise RunError(f"{shown}: the server answered {error.response.status_code}. {advice}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        progress = f" after {received / 1e6:.1f} MB" if received else ""
        raise RunError(f"{shown}: {error or type(error).__name__}{progress}. {advice}") from error
    if expected_sha256 and digest.hexdigest() != expected_sha256:
        raise RunError(f"{shown}: the file differs from the published one (SHA-256 {digest.hexdigest()}). {advice}")
