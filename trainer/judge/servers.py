"""Servers of a judge: the options to start them with, and where they are registered.

    FILEROOT/judges/USER/EXPERIMENT/TRIAL/judge-0.json        as trainer.serving.registry, one file a server
    FILEROOT/judges/USER/EXPERIMENT/TRIAL/judge-0.log

They may be started before there is a run, so they have a folder of their own. Each server's host writes its file. A run
reads the files at its start, and again while it waits for servers that are gone, so that it finds new ones at other
addresses. No engine is imported here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import UserError
from trainer.serving import registry
from trainer.serving.registry import Registration

HOST_MODULE = "trainer.judge.serve"
"""What `python -m` runs as the host of judge servers."""
RESTARTS = 5
"""How often a server that died is started again."""


def judges_folder(fileroot: str | Path, user: str, experiment: str, trial: str) -> Path:
    """Folder with the registrations of a trial's servers."""
    return Path(fileroot).expanduser().absolute() / "judges" / user / experiment / trial


def folder_of(arguments: argparse.Namespace) -> Path:
    """`judges_folder` of the options that `parser` reads."""
    return judges_folder(arguments.fileroot, arguments.user, arguments.experiment, arguments.trial)


def judge_urls(folder: Path) -> list[str]:
    """Addresses of the ready servers that a folder registers."""
    return urls_of(registry.read(folder))


def urls_of(servers: Sequence[Registration]) -> list[str]:
    """Addresses of the ready servers."""
    return [one.url for one in servers if one.state == "ready" and one.url]


def require_model(folder: Path, model: Path) -> None:
    """Raise UserError where the folder's servers serve another model: all judges of a run have one."""
    for one in registry.read(folder):
        if one.model and one.state != "ended" and Path(one.model).name != model.name:
            raise UserError(
                f"{one.name} on {one.node} serves {Path(one.model).name} for this run already, and all judges of a run "
                f"have one model: end it first (clusterkit serve stop --judges), or serve that one"
            )


def parser(description: str) -> argparse.ArgumentParser:
    """Parser of the options of a host of servers, here and where Ray places the hosts."""
    options = argparse.ArgumentParser(prog=f"python -m {HOST_MODULE}", description=description)
    options.add_argument("--model", type=Path, required=True, help="folder of the model")
    options.add_argument("--fileroot", required=True)
    options.add_argument("--user", required=True)
    options.add_argument("--experiment", required=True)
    options.add_argument("--trial", required=True)
    options.add_argument("--name", default="", help="of the server, where it is one; left out: the next free ones")
    options.add_argument("--gpus", default="", help="how many, or which, with commas; empty: the CPU")
    options.add_argument("--per-server", type=int, default=1, help="GPUs of one server")
    options.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    options.add_argument("--address", default="127.0.0.1", help="the address to listen on")
    options.add_argument("--context-length", type=int, default=0)
    options.add_argument("--flags", default="", help="more options of the server's own, quoted as for a shell")
    options.add_argument("--tied", action="store_true", help="end with standard input")
    return options


def gpu_groups(typed: str, per_server: int) -> list[tuple[int, ...]]:
    """Share GPUs out over servers.

    Args:
        typed: a number of GPUs, or their device numbers with commas; empty: none.

    Returns:
        Device numbers by server; one server without GPUs where there are none.

    Raises:
        UserError: `typed` is neither, or the GPUs do not divide into groups.
    """
    try:
        numbers = [int(part) for part in typed.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"--gpus {typed}: give how many, such as 3, or which, such as 2,3,4") from None
    if len(numbers) == 1 and "," not in typed:
        numbers = list(range(numbers[0]))
    if len(numbers) % per_server:
        raise UserError(f"--gpus {typed}: {len(numbers)} GPUs do not divide into servers of {per_server}")
    return [tuple(numbers[i : i + per_server]) for i in range(0, len(numbers), per_server)] or [()]
