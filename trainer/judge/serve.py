"""`python -m trainer.judge.serve`: servers of one model that answer and judge for a run, until they are told to end.

Starts one server for each group of GPUs, registers those that answer by experiment and trial (trainer.judge.registry),
starts a server again when it dies, and takes the registration away at the end. A run finds them there, also new ones
while it waits.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainer.engines.dialect import Kind
from trainer.engines.launching import check_options, launch
from trainer.engines.options import ServerOptions
from trainer.engines.process import ServerProcess, ServerStartError
from trainer.errors import UserError
from trainer.judge.registry import Registered, register, registry_file, unregister

log = logging.getLogger("trainer")

MOST_FAILURES = 5
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
LOOK_S = 0.2
PYTHON_VARIABLES = {"sglang": "CLUSTERKIT_SGLANG_PYTHON", "vllm": "CLUSTERKIT_VLLM_PYTHON"}


@dataclass(slots=True)
class JudgeHost:
    """Servers of one model and their registration.

    kind: sglang or vllm. options: one for each server. path: of the registration. say: told of every change.
    """

    kind: Kind
    options: list[ServerOptions]
    path: Path
    say: Callable[[str], None]
    urls: dict[str, str] = field(default_factory=dict)
    entry: Registered | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Keep the servers until asked to stop; the exit code: 0 then, 1 when all of them were given up.

        Raises:
            UserError: they cannot be started as it is asked for; nothing has been started then.

        """
        for one in self.options:
            check_options(self.kind, one)
        try:
            ended = await asyncio.gather(*(self._keep(one) for one in self.options))
        finally:
            if self.entry is not None:
                unregister(self.path, self.entry)
        return 0 if self.stop.is_set() or any(ended) else 1

    async def _keep(self, options: ServerOptions) -> bool:
        """One server, started again when it dies. Returns False when it was given up."""
        failures = 0
        while not self.stop.is_set():
            try:
                process = await self._start(options)
            except ServerStartError as error:
                reason = str(error)
            else:
                if process is None:
                    return True
                failures = 0
                reason = await self._watch(options.name, process)
                if not reason:
                    return True
            failures += 1
            if failures >= MOST_FAILURES:
                self.say(f"{options.name} is given up after {failures} starts: {reason}")
                return False
            wait = min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S)
            self.say(f"{options.name}: {reason}; starting it again in {wait:.0f} s")
            await self._stopped_within(wait)
        return True

    async def _start(self, options: ServerOptions) -> ServerProcess | None:
        """The process of a server that answers, or None where it is to stop before that."""
        starting = asyncio.ensure_future(launch(self.kind, options))
        stopping = asyncio.ensure_future(self.stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return None
        server, process = starting.result()
        self._register(options.name, server.url)
        self.say(f"{options.name} answers at {server.url}")
        return process

    async def _watch(self, name: str, process: ServerProcess) -> str:
        """Why a server ended of itself; empty where it was asked to."""
        while process.running:
            if await self._stopped_within(LOOK_S):
                self._register(name, "")
                await process.stop()
                return ""
        self._register(name, "")
        return process.how_it_ended()

    def _register(self, name: str, url: str) -> None:
        self.urls[name] = url
        there = [address for address in self.urls.values() if address]
        # The name under which the servers have the model is its folder; runs compare the last part.
        self.entry = register(self.path, str(self.options[0].model), there)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return False
        return True


def gpu_groups(wanted: str, per_server: int) -> list[tuple[int, ...]]:
    """GPUs of every server: `wanted` is a number of them, or their device numbers with commas; none: one on the CPU.

    Raises:
        UserError: it is neither, or they do not divide into groups.

    """
    try:
        numbers = [int(part) for part in wanted.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"--gpus {wanted}: give how many, such as 3, or which, such as 2,3,4") from None
    if len(numbers) == 1 and "," not in wanted:
        numbers = list(range(numbers[0]))
    if len(numbers) % per_server:
        raise UserError(f"--gpus {wanted}: {len(numbers)} GPUs do not divide into servers of {per_server}")
    return [tuple(numbers[i : i + per_server]) for i in range(0, len(numbers), per_server)] or [()]


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.judge.serve", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--fileroot", required=True)
    parser.add_argument("--user", required=True)
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--trial", required=True)
    parser.add_argument("--gpus", default="", help="how many, or which, with commas; empty: the CPU")
    parser.add_argument("--per-server", type=int, default=1, help="GPUs of one server")
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--address", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--context-length", type=int, default=0)
    parser.add_argument("--flags", default="", help="more options of the server's own, with blanks between them")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    path = registry_file(arguments.fileroot, arguments.user, arguments.experiment, arguments.trial)
    python = os.environ.get(PYTHON_VARIABLES[arguments.engine]) or sys.executable
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        options = [
            ServerOptions(
                arguments.model.absolute(),
                path.with_name(f"judge-{arguments.trial}-{number}.log"),
                f"judge-{number}",
                gpus,
                arguments.address,
                context_length=arguments.context_length,
                fp32_head=False,  # nothing is trained on what it says
                flags=tuple(arguments.flags.split()),
                python=python,
            )
            for number, gpus in enumerate(gpu_groups(arguments.gpus, arguments.per_server))
        ]
        return asyncio.run(_serve(arguments.engine, options, path))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or path}: {error.strerror}", file=sys.stderr)
        return 1


async def _serve(kind: Kind, options: list[ServerOptions], path: Path) -> int:
    host = JudgeHost(kind, options, path, lambda text: log.info("%s", text))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, host.stop.set)
    return await host.run()


if __name__ == "__main__":
    sys.exit(main())
