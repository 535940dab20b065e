"""Keeps one server of a run on this machine: started, registered, started again when it dies, ended in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from trainer.config import RunConfig
from trainer.engines.launching import launch
from trainer.engines.options import ServerOptions
from trainer.engines.process import ServerProcess, ServerStartError
from trainer.errors import UserError
from trainer.serving import registry
from trainer.serving.registry import Registration
from trainer.serving.wanted import server_options

log = logging.getLogger(__name__)

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
STEADY_SECONDS = 300.0
"""A server that ran so long has started well: its next death counts as the first."""
LOOK_SECONDS = 0.2


class ServerHost:
    """One server and its registration.

    Args:
        config: of the run. folder: of the registrations. model: folder of the weights to start with. name: of the
            server. gpus: device numbers; none on a CPU. address: to listen on. kept: whether it outlives the trainer.

    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        model: Path,
        name: str,
        gpus: tuple[int, ...],
        address: str,
        kept: bool = False,
    ) -> None:
        self.config, self.folder, self.name = config, folder, name
        self.options: ServerOptions = server_options(config, model, folder / f"{name}.log", name, gpus, address)
        self.registration = Registration(
            name=name,
            engine=config.engine,
            model=str(model),
            node=os.uname().nodename,
            pid=os.getpid(),
            started=time.time(),
            state="starting",
            gpus=gpus,
            kept=kept,
        )
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Keep the server until SIGTERM, SIGINT or SIGHUP; the exit code: 0 when asked to end, 1 when it was given up.

        Raises:
            UserError: it cannot be started as it is asked for.

        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        failures = 0
        try:
            while True:
                self._register(state="starting", started=time.time(), url="")
                began = time.monotonic()
                reason = await self._serve()
                if not reason:
                    registry.remove(self.folder, self.name)
                    return 0
                failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1
                if failures > self.config.servers.restarts:
                    self._register(state="ended", url="", reason=reason)
                    log.error("%s is given up after %d starts: %s", self.name, failures, reason)
                    return 1
                wait = min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT)
                log.warning("%s: %s; starting it again in %.0f s", self.name, reason, wait)
                self._register(state="starting", url="", reason=reason, starts=self.registration.starts + 1)
                if await self._stopped_within(wait):
                    registry.remove(self.folder, self.name)
                    return 0
        except UserError as error:
            self._register(state="ended", url="", reason=str(error))
            raise

    async def _serve(self) -> str:
        """Start the server and watch it. Returns why it ended of itself; empty when it was asked to."""
        starting = asyncio.ensure_future(launch(self.config.engine, self.options))  # type: ignore[arg-type]
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return ""
        try:
            server, process = starting.result()
        except ServerStartError as error:
            return str(error)
        self._register(state="ready", url=server.url, reason="")
        return await self._watch(process)

    async def _watch(self, process: ServerProcess) -> str:
        while process.running:
            if await self._stopped_within(LOOK_SECONDS):
                self._register(state="leaving")
                await process.stop()
                return ""
        return process.how_it_ended()

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _register(self, **changes: object) -> None:
        self.registration = replace(self.registration, **changes)  # type: ignore[arg-type]
        registry.write(self.folder, self.registration)
