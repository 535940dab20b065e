"""Passphrases and passwords: ask for each once, on the terminal only, and keep it in memory only."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import stat
import sys
import termios
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterkit.hosts.folders import config_folder
from trainer.errors import UserError

SUDO_PASSWORD = "CLUSTERKIT_SUDO_PASSWORD"


class Once:
    """Results of coroutines by key. Callers with the same key wait for the same result."""

    def __init__(self) -> None:
        self._answers: dict[str, asyncio.Future[Any]] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result for `key`. A failure is raised in all that wait, and not kept."""
        if key not in self._answers:
            self._answers[key] = asyncio.ensure_future(make())
        answer = self._answers[key]
        try:
            # Shielded: a caller that gives up must not cancel the others' result.
            return await asyncio.shield(answer)
        except BaseException:
            if answer.done() and self._answers.get(key) is answer:
                del self._answers[key]
            raise


@dataclass
class Secrets:
    """Passphrases and passwords that only the user knows."""

    ask_login_password: bool = False  # --ask-password
    ask_sudo_password: bool = False  # --ask-sudo-password
    around_prompt: Callable[[], AbstractContextManager[Any]] = nullcontext  # hides a live display during a question
    _once: Once = field(default_factory=Once, repr=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    async def passphrase(self, key_file: Path, attempt: int = 0) -> str:
        """Return the passphrase of a private key. Raises UserError where there is no terminal to ask on."""
        again = "Wrong passphrase. " if attempt else ""
        return await self.answer(
            f"{again}Passphrase of {key_file}: ",
            key=f"passphrase {key_file} {attempt}",
            otherwise=f"{key_file} has a passphrase. Load the key into an agent: ssh-add {key_file}",
        )

    async def login_password(self, username: str) -> str | None:
        """Return the password to log in with, the same for all hosts; None without --ask-password."""
        if not self.ask_login_password:
            return None
        return await self.answer(f"Password of {username} on the hosts: ", key=f"login {username}")

    async def sudo_password(self, host: str, username: str) -> str | None:
        """Return the password for sudo: from the host's file, the environment, or the user; None without any.

        Raises:
            UserError: others can read the file, or there is no terminal.
        """
        if (from_file := _sudo_file(host)) is not None:
            return from_file
        if from_environment := os.environ.get(SUDO_PASSWORD):
            return from_environment
        if not self.ask_sudo_password:
            return None
        return await self.answer(f"sudo password of {username} on the hosts: ", key=f"sudo {username}")

    async def answer(self, question: str, *, key: str, otherwise: str = "") -> str:
        """Ask on the terminal, once per key.

        Raises:
            UserError: there is no terminal; `otherwise` says what to do instead.
        """
        answer: str = await self._once.get(key, lambda: self._ask(question, otherwise))
        return answer

    async def _ask(self, question: str, otherwise: str) -> str:
        if not sys.stdin.isatty():
            raise UserError(
                f"'{question.rstrip(': ')}' cannot be asked: there is no terminal."
                + (f"\n{otherwise}" if otherwise else f"\nFor sudo, set {SUDO_PASSWORD}; to log in, use a key.")
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()

        def ask() -> None:
            answer = None
            with contextlib.suppress(EOFError, OSError):
                answer = getpass.getpass(question)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(resolve, answer)

        def resolve(answer: str | None) -> None:
            if future.done():
                return
            if answer is None:
                future.set_exception(UserError(f"'{question.rstrip(': ')}' was not answered."))
            else:
                future.set_result(answer)

        async with self._turn:
            with self.around_prompt(), _terminal_restored():
                # A daemon thread: a question without an answer must not keep the process alive.
                threading.Thread(target=ask, daemon=True).start()
                return await future


@contextlib.contextmanager
def _terminal_restored() -> Iterator[None]:
    """Switch echo on again where Ctrl-C ends a question while getpass has it off."""
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _sudo_file(host: str) -> str | None:
    path = config_folder() / "sudo" / host.replace("/", "_")
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    if stat.S_IMODE(mode) & 0o077:
        raise UserError(f"{path} holds a password and can be read by others.\nchmod 600 {path}")
    return path.read_text(encoding="utf-8").rstrip("\r\n")
