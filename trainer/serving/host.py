"""The host of an inference server on this machine: starts, registers, restarts and ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer.config import RunConfig
from trainer.engines.dialect import Kind
from trainer.engines.dialects import make_dialect
from trainer.engines.hang_watch import until_it_hangs
from trainer.engines.http import Server
from trainer.engines.launching import check_options, launch
from trainer.engines.options import MEMORY_SAVER, ServerOptions
from trainer.engines.process import ServerProcess, ServerStartError
from trainer.errors import UserError
from trainer.placement import EVERY_LAYER, gives_memory_away, served_layers, served_rank, served_versions
from trainer.serving import registry
from trainer.serving.keeper import STEADY_SECONDS
from trainer.serving.orphan_processes import end_leftovers, mark
from trainer.serving.registry import Registration
from trainer.start_mark import digest_of

log = logging.getLogger(__name__)

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
LOOK_SECONDS = 0.5


class ServerHost:
    """One server and its registration. kept: whether it outlives the trainer."""

    def __init__(self, kind: Kind, options: ServerOptions, folder: Path, restarts: int, *, kept: bool = False) -> None:
        self.kind, self.folder, self.restarts = kind, folder, restarts
        self.options = replace(options, env={**options.env, **mark(folder, options.name)})
        self.registration = Registration(
            name=options.name,
            engine=kind,
            model=str(options.model),
            node=os.uname().nodename,
            pid=os.getpid(),
            born=registry.birth_of(os.getpid()),
            started=time.time(),
            state="starting",
            gpus=options.gpus,
            kept=kept,
            adapters=options.lora_rank,
            versions=options.lora_versions,
            targets=() if EVERY_LAYER in options.lora_targets else options.lora_targets,
        )
        self.stop = asyncio.Event()
        """Set from outside: the server is to end."""

    async def run(self) -> int:
        """Keep the server until `stop` is set; returns the exit code: 0, or 1 when the server was given up.

        Raises:
            UserError: it cannot be started with these options.
        """
        failures = 0
        try:
            while True:
                base = await asyncio.to_thread(digest_of, self.options.model)  # before it reads them
                self._register(state="starting", started=time.time(), url="", base=base)
                began = time.monotonic()
                reason = await self._serve()
                if not reason:
                    registry.remove(self.folder, self.options.name)
                    return 0
                failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1
                if failures > self.restarts:
                    self.refuse(reason)
                    log.error("%s is given up after %d starts: %s", self.options.name, failures, reason)
                    return 1
                wait = min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT)
                log.warning("%s: %s; starting it again in %.0f s", self.options.name, reason, wait)
                self._register(state="starting", url="", reason=reason, starts=self.registration.starts + 1)
                if await self._stopped_within(wait):
                    registry.remove(self.folder, self.options.name)
                    return 0
        except UserError as error:
            self.refuse(str(error))
            raise

    def refuse(self, reason: str) -> None:
        """Register that there will be no server, and why."""
        self._register(state="ended", url="", reason=reason)

    async def _serve(self) -> str:
        """Start the server and watch it; returns why it ended, or nothing when it was asked to."""
        starting = asyncio.ensure_future(self._launch())
        stopping = asyncio.ensure_future(self.stop.wait())
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
        self._register(state="ready", url=server.url, reason="", idle=server.idle)
        log.info("%s answers at %s", self.options.name, server.url)
        return await self._watch(server, process)

    async def _launch(self) -> tuple[Server, ServerProcess]:
        # A host that was killed could not end all processes of its server.
        await end_leftovers(self.folder, self.options.name)
        return await launch(self.kind, self.options)

    async def _watch(self, server: Server, process: ServerProcess) -> str:
        if not self.options.hang_seconds:
            return await self._watch_process(server, process, asyncio.Future())
        hang = asyncio.ensure_future(until_it_hangs(make_dialect(self.kind), server, self.options.hang_seconds))
        try:
            return await self._watch_process(server, process, hang)
        finally:
            hang.cancel()

    async def _watch_process(self, server: Server, process: ServerProcess, hang: asyncio.Future[str]) -> str:
        while process.running:
            if await self._stopped_within(LOOK_SECONDS):
                self._register(state="leaving")
                server.discard("it was told to end")
                await process.stop()
                return ""
            asked = await asyncio.to_thread(registry.restart_reason, self.folder, self.registration)
            if reason := hang.result() if hang.done() and not hang.exception() else asked:
                self._register(state="starting", url="", reason=reason)
                server.discard(reason)
                await process.stop()
                return reason
        return process.how_it_ended()

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _register(self, **changes: object) -> None:
        self.registration = replace(self.registration, **changes)  # type: ignore[arg-type]
        registry.write(self.folder, self.registration)


def server_options(
    config: RunConfig, model: Path, log: Path, name: str, gpus: tuple[int, ...], address: str
) -> ServerOptions:
    """Options that one server of a run is started with. Raises UserError where the run has no servers."""
    if config.engine == "embedded":
        raise UserError("this run has no engine servers: set servers.engine=sglang or servers.engine=vllm")
    c = config.serving
    return ServerOptions(
        model=model,
        log=log,
        name=name,
        gpus=gpus,
        host=address,
        memory_fraction=config.rollout.gpu_memory_fraction,
        context_length=c.context_length or config.model.context_window,
        max_running=config.rollout.max_running,
        expected=expected_requests(config),
        prefill_delay_ms=c.prefill_delay_ms,
        lora_rank=served_rank(config),
        lora_versions=served_versions(config),
        lora_targets=_adapted_layers(config, model),
        flags=(*((MEMORY_SAVER,) if gives_memory_away(config) else ()), *c.flags),
        start_seconds=c.start_seconds,
        python=c.python or os.environ.get(f"CLUSTERKIT_{config.engine.upper()}_PYTHON") or sys.executable,
    )


def expected_requests(config: RunConfig) -> int:
    """Requests that a server of a run gets at a time: its share of the trajectories that may be under way, those of the
    next steps too with rollout.max_staleness, of what groups share, and of an evaluation beside them; or of all lines
    of the closing table, which are asked at once, where that is more.
    """
    r, e, servers = config.rollout, config.eval, config.num_servers
    groups = -(-r.batch_size * (1 + r.max_staleness) // servers)
    sampled = groups * (r.group_size + (1 if r.share_prefixes else 0))
    lines = 2 + len(e.final_chunks) + len(config.other_documents) + e.blank_memory  # the mixture is sampled, too
    lines += len(e.final_methods) * (1 + len(config.other_documents))
    beside, closing = (-(-e.num_tasks * count // servers) for count in (1 if e.every_steps else 0, lines))
    return max(sampled + beside, closing)


def _adapted_layers(config: RunConfig, model: Path) -> tuple[str, ...]:
    try:
        return served_layers(config, model)
    except (OSError, ValueError):  # no safetensors: the server reads other formats, too
        return (EVERY_LAYER,)


async def keep(hosts: Sequence[ServerHost]) -> int:
    """Keep servers until SIGTERM, SIGINT or SIGHUP; returns the exit code: 1 where all were given up, else 0.

    Raises:
        UserError: one cannot be started with its options; where that shows beforehand, none is started.
    """
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for host in hosts:
            host.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        for host in hosts:
            check_options(host.kind, host.options)
    except UserError as error:
        for host in hosts:
            host.refuse(str(error))
        raise
    codes = await asyncio.gather(*(host.run() for host in hosts))
    return min(codes, default=0)
