"""The interface of a connection to a host, and how a connection fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

from clusterkit.hosts.model import Host
from clusterkit.ssh.output import Output

T = TypeVar("T")


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


SILENCES = frozenset({ErrorKind.UNREACHABLE, ErrorKind.SILENT, ErrorKind.TIMEOUT, ErrorKind.LOST})
"""Those that may be over in a moment."""


class HostError(Exception):
    """A host could not be worked with. `message`: what happened; `fix`: what to do next."""

    def __init__(self, host: str, kind: ErrorKind, message: str, fix: str = "") -> None:
        super().__init__(f"{host}: {message}" + (f"\n{fix}" if fix else ""))
        self.host, self.kind, self.message, self.fix = host, kind, message, fix


@dataclass(frozen=True, slots=True)
class Result:
    """A finished remote command."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float  # wall time, with the round trip

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0

    @property
    def reason(self) -> str:
        """The last line of stderr, 500 characters of it at most, or the exit code: why a command failed."""
        lines = self.stderr.strip().splitlines()
        return lines[-1].strip()[-500:] if lines else f"exit code {self.exit_code}"


class Stream(Protocol):
    """A running script whose stdin is written and whose stdout is read; its stderr is kept in `errors`."""

    errors: Output

    async def read(self) -> bytes:
        """The next bytes of stdout as they come; empty at the end."""

    async def write(self, data: bytes) -> None:
        """Send to stdin, no faster than the script reads.

        Raises:
            HostError: the script has ended; the message holds its last lines.
        """

    async def write_eof(self) -> None:
        """End stdin."""

    async def wait(self) -> int:
        """Exit code of the script, once it has ended and its stdout has been read. Raises HostError: LOST."""


class Session(Protocol):
    """A connected host. Several commands may run at once over one connection.

    Functions that take one raise HostError, as its methods do, where the host is lost or cannot do its part.
    """

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
        """Run a POSIX sh script. Neither script nor stdin shows in an argument list of either machine.

        Args:
            script: to run; as root it runs under `set -eu`.
            timeout: seconds after which the remote command is killed.
            on_output: gets stdout and stderr line by line.

        Raises:
            HostError: SUDO, TIMEOUT, LOST. A script that fails raises nothing: see `Result.exit_code`.
        """

    async def put(
        self,
        source: bytes | Path,
        target: str,
        *,
        mode: int = 0o644,
        root: bool = False,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Write a file: to a temporary name beside the target, which is then renamed.

        Args:
            source: content, or a file of this machine.
            target: path on the host.
            on_bytes: gets the bytes sent so far.

        Raises:
            HostError: as `run`; WRITE with the host's reason where the file cannot be written.
        """

    def stream(
        self, script: str, *, root: bool = False, timeout: float = 3600.0
    ) -> AbstractAsyncContextManager[Stream]:
        """Run a script whose stdin and stdout are written and read while it runs; both are bounded in memory.

        A script that still runs when the context is left is ended, and `timeout` seconds after its start too.

        Raises:
            HostError: SUDO, TIMEOUT, LOST; also out of the stream's methods.
        """

    async def forward(self, remote_host: str, remote_port: int, local_port: int = 0) -> int:
        """Listen on 127.0.0.1 and hand connections on to a port that the host can reach, until the session is closed.

        Args:
            remote_host: name or address, as the host knows it.
            local_port: port of this machine; 0 for a free one, the same one every time.

        Returns the local port.

        Raises:
            HostError: LOST; the local port is taken.
        """

    async def close(self) -> None:
        """Close the connection."""


async def or_error(answer: Awaitable[T]) -> T | HostError:
    """Return what is awaited, or the HostError that it raises."""
    try:
        return await answer
    except HostError as error:
        return error
