"""Starting an inference server of either kind: checked first, then as a child process whose end is noticed at once."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import shutil
import sys

from trainer.engines.dialect import Dialect, Kind
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server
from trainer.engines.options import ServerOptions, Setting, check_model, check_window
from trainer.engines.process import ServerCommand, ServerProcess, ServerStartError, free_port
from trainer.engines.vllm_dialect import LORA_RANKS
from trainer.errors import UserError

log = logging.getLogger(__name__)

PORT_TRIES = 3
_told: set[tuple[str, ...]] = set()


async def launch(kind: Kind, options: ServerOptions) -> tuple[Server, ServerProcess]:
    """Start a server and wait until it answers; from then on its death makes it unusable at once.

    Raises:
        UserError: the model folder, the GPUs or the Python cannot be right.
        ServerStartError: it did not start; the message holds the cause.
    """
    check_options(kind, options)
    dialect = make_dialect(kind)
    adapted = await asyncio.to_thread(dialect.adapted, options)
    _tell(options.name, adapted)
    for tries_left in reversed(range(1 if options.port else PORT_TRIES)):
        port = options.port or free_port(options.host)
        argv = (options.python, *dialect.argv(options, port), *adapted.flags, *options.flags)
        environment = {**dialect.environment(options), **adapted.environment, **options.env}
        process = ServerProcess(ServerCommand(options.name, argv, options.log, environment, dialect.grace)).start()
        url = f"http://{options.host}:{port}"
        try:
            await process.wait_ready(url + dialect.health_path, options.start_seconds)
        except ServerStartError as error:
            if tries_left and "ddress already in use" in str(error):
                continue
            raise
        except BaseException:  # cancelled: nobody else would end it
            await process.stop()
            raise
        idle = float(environment[dialect.idle_variable])  # what it has started with, a user's own number too
        server = Server(options.name, url, options.version, role=options.role, idle=idle)
        tie(server, process)
        return server, process
    raise AssertionError("unreachable")


def _tell(name: str, chosen: Setting) -> None:
    """Log what was chosen, once in this process for all servers that get the same."""
    ours = sorted(f"{name}={value}" for name, value in chosen.environment.items() if name.startswith("CLUSTERKIT_"))
    given = (*chosen.flags, *ours)
    if given and given not in _told:
        _told.add(given)
        log.info(
            "%s gets %s, because of %s; servers.flags (eval: --server-flag) takes others",
            name, " ".join(given), "; ".join(chosen.reasons),
        )  # fmt: skip


def tie(server: Server, process: ServerProcess) -> None:
    """Send no more requests to a server whose process has ended, and remember how it ended."""
    process.on_end(lambda: server.died(f"it {process.how_it_ended()}"))


def check_options(kind: Kind, options: ServerOptions) -> None:
    """Find what can be found wrong without starting a server. Raises UserError."""
    dialect = make_dialect(kind)
    _check_python(dialect, options)
    check_model(options)
    check_window(kind, options)
    if kind == "vllm" and options.lora_rank > LORA_RANKS[-1]:
        raise UserError(
            f"model.lora.rank={options.lora_rank}: vLLM takes adapters up to rank {LORA_RANKS[-1]}: lower it, or set "
            "weights.adapters=merged"
        )
    if kind == "sglang" and not options.gpus:
        raise UserError(f"{options.name} was given no GPU, and SGLang needs one: name one, or use vLLM on the CPU")


def _check_python(dialect: Dialect, options: ServerOptions) -> None:
    if options.python == sys.executable:
        if importlib.util.find_spec(dialect.module) is None:
            raise UserError(f"{dialect.title} is not installed in {sys.executable}: {dialect.extra}")
    elif shutil.which(options.python) is None:
        raise UserError(f"{options.python} is no program: name the interpreter that has {dialect.title}")
