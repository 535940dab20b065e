"""`python -m trainer.judge.serve`: hosts servers of one model that answer and judge for a run, until it is told to end.

It starts one server for each group of GPUs, registers it for the run (trainer.judge.servers), starts it again when it
dies, and removes the registrations at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import sys

from trainer.config_servers import ServersConfig
from trainer.engines.options import ServerOptions
from trainer.errors import UserError
from trainer.judge.servers import RESTARTS, folder_of, gpu_groups, parser, require_model
from trainer.serving import registry
from trainer.serving.host import ServerHost, keep
from trainer.serving.keeper import clear_dead
from trainer.signals import end_with_input


def make_hosts(arguments: argparse.Namespace) -> list[ServerHost]:
    """Make the hosts of the servers, without starting any.

    Raises:
        UserError: the GPUs do not divide, or another model is served already.
    """
    folder = folder_of(arguments)
    model = arguments.model.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    clear_dead(folder)
    require_model(folder, model)
    hosts = []
    for gpus in gpu_groups(arguments.gpus, arguments.per_server):
        name = arguments.name or registry.free_name(folder, "judge")
        options = ServerOptions(
            model,
            folder / f"{name}.log",
            name,
            gpus,
            arguments.address,
            context_length=arguments.context_length,
            chats=True,
            hang_seconds=ServersConfig().hang_seconds,
            fp32_head=False,  # nothing is trained on what it says
            flags=tuple(shlex.split(arguments.flags)),
            python=os.environ.get(f"CLUSTERKIT_{arguments.engine.upper()}_PYTHON") or sys.executable,
            role="judge server",
        )
        hosts.append(ServerHost(arguments.engine, options, folder, RESTARTS))
    return hosts


def main() -> int:
    """Entry point; returns the exit code."""
    arguments = parser(__doc__ or "").parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        hosts = make_hosts(arguments)
        if arguments.tied:
            end_with_input(signal.SIGTERM)
        return asyncio.run(keep(hosts))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or arguments.fileroot}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
