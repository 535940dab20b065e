"""What the rest of clusterkit asks of a connection, and how a connection fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from clusterkit.hosts.model import Host


class ErrorKind(StrEnum):
    """Why a host could not be worked with."""

    UNREACHABLE = "unreachable"  # no route, refused, name unknown
    SILENT = "silent"  # TCP connects, SSH never answers
    HOST_KEY = "host key"  # changed, unknown under strict, not the one in the inventory
    LOGIN = "login"  # no key or password was accepted
    SUDO = "sudo"  # no sudo, wrong password
    TIMEOUT = "timeout"  # a command ran past its limit
    LOST = "connection lost"  # in the middle of something
    WRITE = "cannot write"  # a file could not be put on the host


class HostError(Exception):
    """A host could not be worked with. `message`: what happened; `fix`: what to do next."""

    def __init__(self, host: str, kind: ErrorKind, message: str, fix: str = "") -> None:
        super().__init__(f"{host}: {message}" + (f"\n{fix}" if fix else ""))
        self.host, self.kind, self.message, self.fix = host, kind, message, fix


@dataclass(frozen=True, slots=True)
class Result:
    """A finished remote command. seconds: wall time, the round trip included."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0

    @property
    def reason(self) -> str:
        """The last line of stderr, 500 characters of it at most, or the exit code: why a command failed."""
        lines = self.stderr.strip().splitlines()
        return lines[-1].strip()[-500:] if lines else f"exit code {self.exit_code}"


class Session(Protocol):
    """A connected host. Several commands may run at once over the one connection."""

    host: Host

    async def run(
        self,
        script: str,
        *,
        root: bool = False,
        stdin: bytes = b"",
        timeout: float = 60.0,
        on_output: Callable[[str], None] | None = None,
    ) -> Result:
        """Run a POSIX sh script (`sh -c`), as root where asked (directly, or through sudo with the password on stdin).

        What runs as root runs under `set -eu`.

        The remote command is ended when `timeout` seconds are over. on_output: gets stdout and stderr line by line.
        The script and stdin never show in an argument list of this machine.

        Raises:
            HostError: SUDO, TIMEOUT, LOST. A script that fails is no error: look at `Result.exit_code`.

        """
        ...

    async def put(
        self,
        source: bytes | Path,
        target: str,
        *,
        mode: int = 0o644,
        root: bool = False,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Write a file: to a temporary name beside the target, then renamed. on_bytes: gets the bytes sent so far.

        Raises:
            HostError: as `run`; also when the file cannot be written, with the remote reason.

        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...
