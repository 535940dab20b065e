"""What judge servers are asked for with, and what is refused before anything is started; no engine is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.errors import UserError
from trainer.judge.registry import HOST_MODULE
from trainer.serving import registry

RESTARTS = 5
"""How often a server that died is started again."""


def require_model(folder: Path, model: Path) -> None:
    """Refuse a second model beside one that is served already. Raises UserError."""
    for one in registry.read(folder):
        if one.model and one.state != "ended" and Path(one.model).name != model.name:
            raise UserError(
                f"{one.name} on {one.node} serves {Path(one.model).name} for this run already, and all judges of a run "
                f"have one model: end it first (clusterkit serve judge --stop), or serve that one"
            )


def parser(description: str) -> argparse.ArgumentParser:
    """The options; of a host of servers on one machine, and of what places such hosts on a cluster."""
    made = argparse.ArgumentParser(prog=f"python -m {HOST_MODULE}", description=description)
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
