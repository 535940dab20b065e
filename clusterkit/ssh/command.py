"""One command on a host: send its script and stdin, receive its output and exit code.

The script goes over the command's stdin, so that no process list shows it and no limit on arguments applies. The remote
shell first prints a random word, which separates the output of login scripts and sudo from that of the script. With it
comes the process group, which a time limit kills.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import signal
from collections.abc import Callable

import asyncssh

_PIECE = 256 * 1024
_QUIET = 2.0
"""Seconds of silence after the exit code, then the command is over, even where a daemon still holds its output."""
_PREAMBLE = 64 * 1024


class Ended(Exception):  # noqa: N818 (it reads as what it is)
    """The command's channel is closed, or was never open."""


class Command(asyncssh.SSHClientSession[bytes]):
    """A channel to a remote shell. `exit_code` is None until the end, and stays None where the connection was lost.

    Args:
        on_output: gets (is stderr, bytes) of the script's output.
    """

    def __init__(self, on_output: Callable[[bool, bytes], None]) -> None:
        self.marker = f"ck-{secrets.token_hex(8)}"
        self.group: int | None = None
        self.exit_code: int | None = None
        self.chan: asyncssh.SSHClientChannel[bytes] | None = None
        self._on_output = on_output
        self._preamble: dict[bool, bytearray | None] = {False: bytearray(), True: bytearray()}
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._over = asyncio.Event()
        self._quiet: asyncio.TimerHandle | None = None

    def feed(self, script: str, *, reads_stdin: bool) -> bytes:
        """Return the text that makes a POSIX shell on stdin run `script` and nothing after it."""
        prepare = (
            # Administrators' tools are not on every PATH. We parse messages, so they must be English.
            'PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin" LC_ALL=C; export PATH LC_ALL; '
            f"read -r _ _ _ _ _ck _ </proc/$$/stat; echo {self.marker}; echo {self.marker} $_ck >&2; unset _ck"
        )
        stdin = "" if reads_stdin else " </dev/null"
        # Because of the braces the shell reads all of it before it begins; the rest of stdin is the script's.
        return f"{{ {prepare}; eval {shlex.quote(script)}{stdin}; exit $?; }}\n".encode()

    @property
    def started(self) -> bool:
        """Whether the script itself runs."""
        return self._preamble[False] is None and self._preamble[True] is None

    @property
    def over(self) -> bool:
        """Whether the command is over."""
        return self._over.is_set()

    def preamble(self) -> str:
        """Return what was printed before the script began, stderr last."""
        parts = (self._preamble[is_stderr] or b"" for is_stderr in (False, True))
        return b"".join(bytes(part) for part in parts).decode(errors="replace")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the output holds, or for the end."""
        while not condition() and not self.over:
            self._changed.clear()
            await self._changed.wait()

    async def wait(self) -> int | None:
        """Wait for the end. Return the exit code, 128 + N after signal N, or None where the connection was lost."""
        await self._over.wait()
        return self.exit_code

    async def write(self, data: bytes) -> None:
        """Send to the command's stdin, no faster than it reads. Raises Ended where the command reads no more."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            await self._writable.wait()
            if self.chan is None or self.over or self.chan.is_closing():
                raise Ended
            self.chan.write(bytes(view[start : start + _PIECE]))

    async def write_eof(self) -> None:
        """Tell the command that its stdin is complete."""
        await self._writable.wait()
        if self.chan is not None and not self.chan.is_closing():
            self.chan.write_eof()

    def abandon(self) -> None:
        """Close the channel without waiting."""
        if self.chan is not None and not self.over:
            self.chan.abort()

    # asyncssh calls these.

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        """The channel is open."""
        self.chan = chan

    def data_received(self, data: bytes, datatype: int | None) -> None:
        """Receive output. What comes before the marker is kept separately."""
        is_stderr = datatype is not None
        before = self._preamble[is_stderr]
        if self._quiet is not None:
            self._await_quiet()
        if before is None:
            self._on_output(is_stderr, data)
            return
        before += data
        at = before.find(self.marker.encode())
        end = before.find(b"\n", at)
        if at >= 0 and end >= 0:
            words = before[at:end].split()
            if is_stderr and len(words) > 1:
                self.group = int(words[1])
            rest = bytes(before[end + 1 :])
            self._preamble[is_stderr] = None
            if rest:
                self._on_output(is_stderr, rest)
        elif at < 0:
            del before[:-_PREAMBLE]
        self._changed.set()

    def eof_received(self) -> bool:
        """Keep the input open at the end of the output."""
        return True

    def exit_status_received(self, status: int) -> None:
        """The shell has ended; a daemon that it started may still hold its output."""
        self.exit_code = status
        self._await_quiet()

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:  # noqa: ARG002
        """The shell was killed."""
        self.exit_code = 128 + _signal_number(signal)
        self._await_quiet()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The channel is closed."""
        if self._quiet is not None:
            self._quiet.cancel()
        self._finish()

    def pause_writing(self) -> None:
        """The host reads more slowly than we write."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The host reads fast enough again."""
        self._writable.set()

    def _await_quiet(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
        self._quiet = asyncio.get_running_loop().call_later(_QUIET, self._leave_daemon)

    def _leave_daemon(self) -> None:
        self._finish()
        if self.chan is not None:
            self.chan.close()

    def _finish(self) -> None:
        self._over.set()
        self._changed.set()
        self._writable.set()


def _signal_number(name: str) -> int:
    try:
        return signal.Signals[f"SIG{name}"].value
    except KeyError:
        return 0
