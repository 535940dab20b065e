"""A Session that runs its scripts with this machine's own sh: for what needs no SSH to be true."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from clusterkit.hosts.model import Host
from clusterkit.ssh.api import ErrorKind, HostError, Result
from clusterkit.ssh.shell import STRICT


class LocalSession:
    """Runs every script for real. `shell` and `environment` choose another shell or PATH; `root` needs root here."""

    def __init__(
        self, name: str = "here", *, shell: tuple[str, ...] = ("sh",), environment: Mapping[str, str] | None = None
    ) -> None:
        self.host = Host(name=name)
        self._shell = shell
        self._environment = {**os.environ, **(environment or {})}
        self.scripts: list[str] = []

    async def run(
        self,
        script: str,
        *,
        root: bool = False,
        stdin: bytes = b"",
        timeout: float = 60.0,
        on_output: Callable[[str], None] | None = None,
    ) -> Result:
        if root and os.geteuid() != 0:
            raise HostError(self.host.name, ErrorKind.SUDO, "this user is not root", "run the tests as root")
        self.scripts.append(script)
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *self._shell,
            "-c",
            STRICT + script if root else script,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
            limit=2**24,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(timeout):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.stdin.write(stdin)
                    await process.stdin.drain()
                process.stdin.close()
                stdout, stderr = await asyncio.gather(
                    _lines(process.stdout, on_output), _lines(process.stderr, on_output)
                )
                exit_code = await process.wait()
        except TimeoutError:
            raise HostError(self.host.name, ErrorKind.TIMEOUT, f"a command ran longer than {timeout:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return Result(exit_code, stdout, stderr, time.monotonic() - began)

    async def put(
        self,
        source: bytes | Path,
        target: str,
        *,
        mode: int = 0o644,
        root: bool = False,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        data = source if isinstance(source, bytes) else source.read_bytes()
        partial = Path(f"{target}.partial")
        partial.write_bytes(data)
        partial.chmod(mode)
        partial.replace(target)
        if on_bytes is not None:
            on_bytes(len(data))

    async def close(self) -> None:
        return


async def _lines(stream: asyncio.StreamReader, on_output: Callable[[str], None] | None) -> str:
    lines = []
    while line := await stream.readline():
        text = line.decode(errors="replace")
        lines.append(text)
        if on_output is not None:
            on_output(text.rstrip("\n"))
    return "".join(lines)
