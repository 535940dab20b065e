"""A connected host: run scripts, write files, stream, forward ports."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath

import asyncssh

from clusterkit.hosts.model import Host
from clusterkit.ssh.api import ErrorKind, HostError, Result
from clusterkit.ssh.bastions import Link
from clusterkit.ssh.command import Command, Ended
from clusterkit.ssh.endpoint import Endpoint
from clusterkit.ssh.options import SshOptions
from clusterkit.ssh.output import Output
from clusterkit.ssh.root import PROBE, Root, SudoDialogue, no_password, no_sudo
from clusterkit.ssh.shell import STRICT
from clusterkit.ssh.stream import CommandStream

_COMMANDS = 8
"""Commands at once over one connection; sshd allows 10 by default, and ending one takes another."""
_OPEN_SECONDS = 20.0
_OPEN_PAUSE = 0.05
_END_SECONDS = 10.0
_PROBE_SECONDS = 30.0
_STALL_SECONDS = 60.0
_PIECE = 1024 * 1024
_SLOWEST_DISK = 20e6

_AGAIN = "The host may be down or its network gone. Look at it, then run the same command again: it goes on from there."


class SshSession:
    """`clusterkit.ssh.api.Session` over asyncssh."""

    def __init__(self, host: Host, endpoint: Endpoint, options: SshOptions, link: Link) -> None:
        self.host = host
        self._endpoint, self._options, self._link = endpoint, options, link
        self._slots = asyncio.Semaphore(_COMMANDS)
        self._root: Root | None = Root.DIRECT if endpoint.username == "root" else None
        self._becoming_root = asyncio.Lock()
        self._sudo_trouble: HostError | None = None
        self._forwards: dict[tuple[str, int], int] = {}

    async def run(
        self,
        script: str,
        *,
        root: bool = False,
        stdin: bytes = b"",
        timeout: float = 60.0,
        on_output: Callable[[str], None] | None = None,
    ) -> Result:
        """See `Session.run`. The wait for a free channel of the connection is not counted against `timeout`."""
        async with self._slots:
            await self._prepare(root)
            return await self._run(script, root, stdin, timeout, Output(on_output))

    async def _run(self, script: str, root: bool, stdin: bytes, timeout: float, output: Output) -> Result:
        before, command = _now(), Command(output)
        async with self._ended_with(command, root, timeout, output):
            await self._launch(command, script, root=root, reads_stdin=bool(stdin))
            if stdin:
                await command.until(lambda: command.started)
                with suppress(Ended):  # not every command reads all of its input
                    await command.write(stdin)
            await command.write_eof()
            await command.wait()
        output.finish()
        return Result(self._exit_code(command), output.stdout, output.stderr, _now() - before)

    async def put(
        self,
        source: bytes | Path,
        target: str,
        *,
        mode: int = 0o644,
        root: bool = False,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """See `Session.put`. A file is read piece by piece; it fails when nothing moves for a minute."""
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        output, sent = Output(), 0
        async with self._slots:
            await self._prepare(root)
            command = Command(output)
            script = _put_script(target, size, mode)
            too_late = f"sending {target} stood still for {_STALL_SECONDS:g} s"
            async with self._ended_with(command, root, _STALL_SECONDS, output, too_late) as limit:
                await self._launch(command, script, root=root, reads_stdin=True)
                await command.until(lambda: command.started)
                with suppress(Ended):
                    async for piece in _pieces(source):
                        limit.reschedule(_now() + _STALL_SECONDS)
                        await command.write(piece)
                        sent += len(piece)
                        if on_bytes is not None:
                            on_bytes(sent)
                await command.write_eof()
                # What the host has cached it may have to write out now.
                limit.reschedule(_now() + _STALL_SECONDS + size / _SLOWEST_DISK)
                await command.wait()
        if self._exit_code(command):
            raise HostError(
                self.host.name,
                ErrorKind.WRITE,
                f"{target} could not be written: {output.last_lines() or 'no reason given'}",
                f"Is there space on the disk, and may {'root' if root else self._endpoint.username} write there?",
            )

    @asynccontextmanager
    async def stream(self, script: str, *, root: bool = False, timeout: float = 3600.0) -> AsyncIterator[CommandStream]:
        """See `Session.stream`."""
        async with self._slots:
            await self._prepare(root)
            stream = CommandStream(self.host.name, self._exit_code)
            async with self._ended_with(stream.command, root, timeout, stream.errors):
                await self._launch(stream.command, script, root=root, reads_stdin=True)
                await stream.command.until(lambda: stream.command.started)
                try:
                    yield stream
                finally:
                    if not stream.command.over:
                        await self._end(stream.command, root)

    async def forward(self, remote_host: str, remote_port: int, local_port: int = 0) -> int:
        """See `Session.forward`. Who asks for the same port again and again opens no more listeners."""
        if not local_port and (remote_host, remote_port) in self._forwards:
            return self._forwards[remote_host, remote_port]
        try:
            listener = await self._link.connection.forward_local_port("127.0.0.1", local_port, remote_host, remote_port)
        except (OSError, asyncssh.Error) as error:
            where = f"{remote_host}:{remote_port}"
            message = f"port {local_port or 'any'} of this machine cannot be forwarded to {where}: {error}"
            raise HostError(self.host.name, ErrorKind.LOST, message) from None
        port = int(listener.get_port())
        if not local_port:
            self._forwards[remote_host, remote_port] = port
        return port

    async def close(self) -> None:
        """Close the connection, and the bastion with its last session."""
        await self._link.close()

    @asynccontextmanager
    async def _ended_with(
        self, command: Command, root: bool, timeout: float, output: Output, too_late: str = ""
    ) -> AsyncIterator[asyncio.Timeout]:
        """End the remote command when its time is over or when nobody waits for it any more."""
        too_late = too_late or f"a command ran past its limit of {timeout:g} s"
        try:
            async with asyncio.timeout(timeout) as limit:
                yield limit
        except TimeoutError:
            await self._end(command, root)
            last = output.last_lines()
            raise HostError(
                self.host.name,
                ErrorKind.TIMEOUT,
                f"{too_late} and was ended" + (f"; its last lines:\n{last}" if last else ""),
                "The host may be overloaded, or something that the command waits for may hang.",
            ) from None
        except BaseException:
            await asyncio.shield(self._end(command, root))
            raise

    async def _prepare(self, root: bool) -> None:
        """Learn how to be root before the clock runs: a person may have to type a password."""
        if root and await self._root_way() is Root.PASSWORD and self._sudo_trouble is None:
            await self._sudo_password()

    async def _launch(self, command: Command, script: str, *, root: bool, reads_stdin: bool) -> None:
        """Open a channel, become root where asked, and send the script."""
        how = await self._root_way() if root else Root.DIRECT
        dialogue = None
        if how is Root.PASSWORD:
            if self._sudo_trouble is not None:
                raise self._sudo_trouble
            dialogue = SudoDialogue(self.host.name, self._endpoint.username, await self._sudo_password())
        shell = dialogue.shell if dialogue else {Root.SUDO: "sudo -H -n sh"}.get(how, "sh")
        await self._open(command, shell)
        if dialogue is not None:
            try:
                await dialogue.hold(command)
            except HostError as error:
                # A second wrong answer could lock the account.
                self._sudo_trouble = error
                raise
        with suppress(Ended):
            await command.write(command.feed(STRICT + script if root else script, reads_stdin=reads_stdin))

    async def _open(self, command: Command, shell: str) -> None:
        connection = self._link.connection
        give_up = _now() + _OPEN_SECONDS
        while True:
            try:
                await connection.create_session(lambda: command, shell, encoding=None, request_pty=False)
            except asyncssh.ChannelOpenError as error:
                # sshd counts a channel for a moment after its end, and some allow fewer than we open (MaxSessions).
                if connection.is_closed() or _now() > give_up:
                    raise self._lost(f"no command can be started: {error.reason}") from None
                await asyncio.sleep(_OPEN_PAUSE)
            except (asyncssh.Error, OSError) as error:
                raise self._lost(f"no command can be started: {error}") from None
            else:
                return

    async def _root_way(self) -> Root:
        async with self._becoming_root:
            if self._root is None:
                # Within the slot of the command that wants to be root.
                printed = (await self._run(PROBE, False, b"", _PROBE_SECONDS, Output())).stdout.strip()
                self._root = Root(printed) if printed in {way.value for way in Root} else Root.NONE
            if self._root is Root.NONE:
                raise no_sudo(self.host.name, self._endpoint.username)
            return self._root

    async def _sudo_password(self) -> str:
        password = await self._options.secrets.sudo_password(self.host.name, self._endpoint.username)
        if password is None:
            raise no_password(self.host.name, self._endpoint.username)
        return password

    async def _end(self, command: Command, root: bool) -> None:
        """End the command's process group on the host, as far as the host still answers."""
        if command.group and not command.over and not self._link.connection.is_closed():
            killer = Command(Output())
            with suppress(HostError, TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self._launch(killer, _kill_script(command.group), root=root, reads_stdin=False)
                    await killer.write_eof()
                    await killer.wait()
            killer.abandon()
        command.abandon()

    def _exit_code(self, command: Command) -> int:
        if command.exit_code is None:
            raise self._lost("the connection was lost in the middle of a command")
        if not command.started:
            printed = command.preamble().strip()
            if "sudo" in printed:
                raise no_password(self.host.name, self._endpoint.username, printed)
            raise HostError(
                self.host.name,
                ErrorKind.LOGIN,
                f"{self._endpoint.username} may log in but not run commands: {printed or f'exit {command.exit_code}'}",
                "Give the user a shell (sudo chsh -s /bin/sh USER) or log in as another one (--username).",
            )
        return command.exit_code

    def _lost(self, message: str) -> HostError:
        return HostError(self.host.name, ErrorKind.LOST, message, _AGAIN)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _kill_script(group: int) -> str:
    """End a process group: politely, and after two seconds by force."""
    return f"""
kill -s TERM -- -{group} 2>/dev/null || exit 0 # it has ended by itself
tries=0
while [ "$tries" -lt 20 ] && kill -s 0 -- -{group} 2>/dev/null; do sleep 0.1; tries=$((tries + 1)); done
kill -s KILL -- -{group} 2>/dev/null || :
"""


def _put_script(target: str, size: int, mode: int) -> str:
    path = PurePosixPath(target if not target.startswith("-") else f"./{target}")
    temporary = path.with_name(f".{path.name}.ck-{secrets.token_hex(4)}")
    return f"""
set -eu
target={shlex.quote(str(path))}
temporary={shlex.quote(str(temporary))}
if [ -d "$target" ]; then echo "$target is a folder" >&2; exit 1; fi
umask 077
trap 'rm -f "$temporary"' EXIT
trap 'exit 1' HUP INT TERM
cat >"$temporary"
size=$(wc -c <"$temporary")
if [ "$size" -ne {size} ]; then echo "$size bytes arrived instead of {size}" >&2; exit 1; fi
chmod {mode:o} "$temporary"
sync "$temporary"
mv -f "$temporary" "$target"
"""


async def _pieces(source: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(source, bytes):
        for start in range(0, len(source), _PIECE):
            yield source[start : start + _PIECE]
        return
    with source.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece
