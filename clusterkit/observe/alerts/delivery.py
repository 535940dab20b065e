"""Deliver alerts: by an HTTP POST, or to a command with the JSON on its standard input.

A webhook's address is a secret: it comes from a file or the environment and is in no message.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from trainer.errors import UserError

WEBHOOK_VARIABLE = "CLUSTERKIT_WEBHOOK"
TIMEOUT_SECONDS = 15.0
COMMAND_SECONDS = 60.0
WAITS = (1.0, 4.0, 16.0)
"""Seconds between attempts; the next look at the run tries again."""
LONGEST_WAIT = 60.0
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class UndeliveredError(Exception):
    """An alert could not be delivered. `wait`: seconds that the receiver asks for; `final`: do not try again."""

    def __init__(self, message: str, wait: float | None = None, final: bool = False) -> None:
        super().__init__(message)
        self.wait, self.final = wait, final


class Receiver(Protocol):
    """A receiver of alerts."""

    @property
    def name(self) -> str:
        """Its name on disk and in messages, without a secret."""
        ...

    def send(self, body: dict[str, Any]) -> None:
        """Deliver one alert. Raises UndeliveredError."""
        ...


@dataclass(frozen=True, repr=False)
class Webhook:
    """An address that accepts JSON by POST."""

    url: str

    @property
    def name(self) -> str:
        """Its host, and a digest that is too short to find the address."""
        return f"webhook {urlsplit(self.url).hostname} {_digest(self.url)}"

    def send(self, body: dict[str, Any]) -> None:
        """POST it once. Raises UndeliveredError."""
        host = urlsplit(self.url).hostname
        try:
            answer = httpx.post(self.url, json=body, timeout=TIMEOUT_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, OSError, ValueError) as error:
            # The error's text may have the address.
            raise UndeliveredError(f"the webhook at {host} cannot be reached: {type(error).__name__}") from None
        if answer.is_success:
            return
        final = answer.status_code not in TRANSIENT
        advice = ": is its address right?" if final else ""
        raise UndeliveredError(
            f"the webhook at {host} answered {answer.status_code}{advice}", _retry_after(answer.headers), final
        )


@dataclass(frozen=True)
class Command:
    """A command that gets the JSON on its standard input, run without a shell."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its program and a digest: arguments may have secrets."""
        return f"command {self.words[0]} {_digest(shlex.join(self.words))}"

    def send(self, body: dict[str, Any]) -> None:
        """Run it once. Raises UndeliveredError."""
        try:
            done = subprocess.run(
                self.words,
                input=json.dumps(body, ensure_ascii=False).encode(),
                capture_output=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
        except (OSError, ValueError) as error:  # a null byte among the words is a ValueError
            reason = getattr(error, "strerror", None) or error
            raise UndeliveredError(f"{self.words[0]} cannot be run: {reason}", final=True) from None
        except subprocess.TimeoutExpired:
            raise UndeliveredError(f"{self.words[0]} did not end within {COMMAND_SECONDS:.0f} s") from None
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise UndeliveredError(
                f"{self.words[0]} ended with code {done.returncode}{': ' if last else ''}{''.join(last)}"
            )


def deliver(
    receiver: Receiver,
    body: dict[str, Any],
    waits: tuple[float, ...] = WAITS,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Send an alert, with retries after `waits` seconds. Raises UndeliveredError if the last attempt fails."""
    for wait in (*waits, None):
        try:
            receiver.send(body)
            return
        except UndeliveredError as error:
            if wait is None or error.final:
                raise
            sleep(min(max(wait, error.wait or 0.0), LONGEST_WAIT))


def webhook_from(source: str | None) -> Webhook:
    """Return the webhook whose address is in `file:PATH` or `env:NAME` (None: $CLUSTERKIT_WEBHOOK).

    Raises:
        UserError: the source is an address itself, or has no valid address.
    """
    kind, _, rest = (source or f"env:{WEBHOOK_VARIABLE}").partition(":")
    if kind in ("http", "https"):
        raise UserError(
            "--webhook takes no address: it is a secret, and other users see what is typed. Put it into a file that "
            f"only you can read and say --webhook file:PATH, or into the environment as {WEBHOOK_VARIABLE}"
        )
    if kind == "env":
        url, where = os.environ.get(rest, ""), f"${rest}"
        if not url:
            raise UserError(f"{where} is not set: export it with the webhook's address, or say --webhook file:PATH")
    elif kind == "file":
        url, where = _read_secret(Path(rest).expanduser()), rest
    else:
        raise UserError(f"--webhook {source}: say file:PATH, or env:NAME for a variable of the environment")
    url = url.strip()
    if (lines := len(url.splitlines())) > 1:
        raise UserError(f"{where} holds {lines} lines: it must hold the webhook's address alone, in one line")
    if not _is_address(url):
        raise UserError(f"{where} does not hold an address that begins with https:// or http://")
    return Webhook(url)


def _is_address(url: str) -> bool:
    """Whether the text has the form of an address for a POST."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        return False
    return parts.scheme in ("http", "https") and bool(parts.host) and not any(sign.isspace() for sign in url)


def command_from(text: str) -> Command:
    """Split a command line like a shell. Raises UserError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--command {text}: {error}") from None
    if not words:
        raise UserError("--command is empty: name a program that takes JSON on its standard input")
    return Command(tuple(words))


def _read_secret(path: Path) -> str:
    try:
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            raise UserError(f"{path} can be read by others: chmod 600 {path}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _retry_after(headers: Any) -> float | None:
    try:
        return float(headers.get("Retry-After", ""))
    except ValueError:
        return None
