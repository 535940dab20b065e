"""`python -m trainer.serving CONFIG.yaml --model FOLDER`: the host of one server of a run, until it is told to end.

It starts the server, registers it in the run's folder, starts it again when it dies, and takes the registration away at
the end. SIGTERM ends both. With `--tied` it also ends when its standard input does: with the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from trainer.config import RunConfig
from trainer.configfile import read_config
from trainer.errors import UserError
from trainer.paths import RunPaths
from trainer.serving import registry
from trainer.serving.host import ServerHost, keep, server_options
from trainer.signals import end_with_input


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.serving", description=__doc__)
    parser.add_argument("config", type=Path, help="the run's resolved configuration")
    parser.add_argument("--model", type=Path, required=True, help="folder of the weights to start with")
    parser.add_argument("--name", default="", help="of the server within the run; left out: the next free one")
    parser.add_argument("--gpus", default="", help="device numbers with commas; empty: none")
    parser.add_argument("--address", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--kept", action="store_true", help="it stays when the trainer ends")
    parser.add_argument("--tied", action="store_true", help="end with standard input")
    arguments = parser.parse_args()
    try:
        config = read_config(arguments.config, RunConfig)
        folder = registry.folder_of(RunPaths.of(config).logs)
        name = arguments.name or registry.free_name(folder)
        gpus = tuple(int(number) for number in arguments.gpus.split(",") if number)
        options = server_options(config, arguments.model, folder / f"{name}.log", name, gpus, arguments.address)
        host = ServerHost(config.engine, options, folder, config.serving.restarts, kept=arguments.kept)  # type: ignore[arg-type]
        if arguments.tied:
            end_with_input(signal.SIGTERM)
        return asyncio.run(keep([host]))
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, UserError) else 2


if __name__ == "__main__":
    sys.exit(main())
