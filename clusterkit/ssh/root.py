"""Become root on a host: directly, or through sudo with the password on stdin."""

from __future__ import annotations

import asyncio
import secrets
from enum import Enum

from clusterkit.ssh.api import ErrorKind, HostError
from clusterkit.ssh.command import Command, Ended
from clusterkit.ssh.secrets import SUDO_PASSWORD

PROBE = """
if [ "$(id -u)" = 0 ]; then echo root
elif ! command -v sudo >/dev/null 2>&1; then echo none
elif sudo -n -k -H sh -c : 2>/dev/null; then echo sudo
else echo password
fi
"""
"""Prints a `Root`. -k ignores a password that sudo remembers, since it may forget it in the middle."""

_ANSWER_SECONDS = 30.0


class Root(Enum):
    """How we become root on a host."""

    DIRECT = "root"
    SUDO = "sudo"
    PASSWORD = "password"
    NONE = "none"


class SudoDialogue:
    """One `sudo` that asks for a password.

    The script is sent only after its shell has started: with a wrong password, sudo would read it as further passwords.
    """

    def __init__(self, host: str, username: str, password: str) -> None:
        self._host, self._username, self._password = host, username, password
        self._prompt, self._ready = f"ask-{secrets.token_hex(8)}", f"ready-{secrets.token_hex(8)}"

    @property
    def shell(self) -> str:
        """The command in place of `sh`."""
        return f"sudo -H -S -p {self._prompt} sh -c 'echo {self._ready} >&2; exec sh'"

    async def hold(self, command: Command) -> None:
        """Answer the question for the password, and wait for the shell. Raises HostError: SUDO."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await command.until(lambda: self._asked(command) > 0 or self._is_ready(command))
                if self._is_ready(command):
                    return
                await command.write(self._password.encode() + b"\n")
                await command.until(lambda: self._asked(command) > 1 or self._is_ready(command))
        except TimeoutError:
            raise self._refused(command, "did not take the password in time") from None
        except Ended:
            pass
        if self._asked(command) > 1:
            raise self._refused(command, "does not accept the password")
        if not self._is_ready(command) and command.over and command.exit_code is not None:
            raise self._refused(command, "refused")

    def _asked(self, command: Command) -> int:
        return command.preamble().count(self._prompt)

    def _is_ready(self, command: Command) -> bool:
        return self._ready in command.preamble()

    def _refused(self, command: Command, what: str) -> HostError:
        sudo_output = command.preamble().replace(self._prompt, "").split()
        reason = f": {' '.join(sudo_output)}" if sudo_output else ""
        return HostError(
            self._host,
            ErrorKind.SUDO,
            f"sudo {what} of {self._username}{reason}" if "password" in what else f"sudo {what}{reason}",
            f"Try it there: sudo -k -v. Give the right password with --ask-sudo-password or {SUDO_PASSWORD}, "
            "or let the user use sudo without one.",
        )


def no_sudo(host: str, username: str) -> HostError:
    """Return the error where `sudo` is not installed."""
    return HostError(
        host,
        ErrorKind.SUDO,
        f"{username} is not root there, and there is no sudo",
        "Log in as root (--username root), or install sudo and allow it to the user.",
    )


def no_password(host: str, username: str, reason: str = "") -> HostError:
    """Return the error where `sudo` wants a password and we have none."""
    return HostError(
        host,
        ErrorKind.SUDO,
        f"sudo wants a password of {username}" + (f" ({reason})" if reason else ""),
        f"Give it with --ask-sudo-password or {SUDO_PASSWORD}, or let the user use sudo without one.",
    )
