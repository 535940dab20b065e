"""`python -m trainer.judge.serve`: servers of one model that answer and judge for a run, until they are told to end.

Starts one server for each group of GPUs, each registered for the run (trainer.judge.registry) and started again when it
dies, and takes the registrations away at the end. A run finds them there, also new ones while it waits.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from trainer.engines.options import ServerOptions
from trainer.errors import UserError
from trainer.judge.places import gpu_groups
from trainer.judge.registry import HOST_MODULE, judges_folder
from trainer.serving import registry
from trainer.serving.host import ServerHost, keep
from trainer.serving.keeper import clear_dead
from trainer.serving.tied import end_with_input

RESTARTS = 5
PYTHON_VARIABLES = {"sglang": "CLUSTERKIT_SGLANG_PYTHON", "vllm": "CLUSTERKIT_VLLM_PYTHON"}


def require_model(folder: Path, model: Path) -> None:
    """Refuse a second model beside one that is served already. Raises UserError."""
    for one in registry.read(folder):
        if one.model and one.state != "ended" and Path(one.model).name != model.name:
            raise UserError(
                f"{one.name} on {one.node} serves {Path(one.model).name} for this run already, and all judges of a run "
                f"have one model: end it first (clusterkit serve judge --stop), or serve that one"
            )


def parser() -> argparse.ArgumentParser:
    """The options; of a host of servers on one machine, and of what places such hosts on a cluster."""
    made = argparse.ArgumentParser(prog=f"python -m {HOST_MODULE}", description=__doc__)
    made.add_argument("--model", type=Path, required=True, help="folder of the model")
    made.add_argument("--fileroot", required=True)
    made.add_argument("--user", required=True)
    made.add_argument("--experiment", required=True)
    made.add_argument("--trial", required=True)
    made.add_argument("--name", default="", help="of the server, where it is one; left out: the next free ones")
    made.add_argument("--gpus", default="", help="how many, or which, with commas; empty: the CPU")
    made.add_argument("--per-server", type=int, default=1, help="GPUs of one server")
    made.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    made.add_argument("--address", default="127.0.0.1", help="the address to listen on")
    made.add_argument("--context-length", type=int, default=0)
    made.add_argument("--flags", default="", help="more options of the server's own, with blanks between them")
    made.add_argument("--tied", action="store_true", help="end with standard input")
    return made


def make_hosts(arguments: argparse.Namespace) -> list[ServerHost]:
    """The hosts of the servers that are asked for, none of them started.

    Raises:
        UserError: the GPUs do not divide, or another model is served already.

    """
    folder = judges_folder(arguments.fileroot, arguments.user, arguments.experiment, arguments.trial)
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
            fp32_head=False,  # nothing is trained on what it says
            flags=tuple(arguments.flags.split()),
            python=os.environ.get(PYTHON_VARIABLES[arguments.engine]) or sys.executable,
        )
        hosts.append(ServerHost(arguments.engine, options, folder, RESTARTS))
    return hosts


def main() -> int:
    """Entry point; returns the exit code."""
    arguments = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        hosts = make_hosts(arguments)
        if arguments.tied:
            end_with_input()
        return asyncio.run(keep(hosts))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or arguments.fileroot}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
