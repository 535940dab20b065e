"""What `clusterkit serve judge` is told about the servers and their run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from clusterkit.cli.hostoptions import takes
from clusterkit.cli.options import CACHE_HELP, LOOPBACK


@dataclass(frozen=True)
class JudgeOptions:
    """What was typed, unchecked: the options of these names."""

    model: str = ""
    preset: str = "memalpha-4B"
    gpus: str = ""
    tensor_parallel: int = 1
    engine: str = "sglang"
    address: str = LOOPBACK
    context_length: int = 0
    server_flag: list[str] | None = None
    flags: str = ""
    cache_dir: str = ""

    @property
    def quoted_flags(self) -> str:
        """All further options of the server's own, quoted as for a shell."""
        return shlex.join([*self.flags.split(), *(self.server_flag or ())])


_OPTIONS: dict[str, Any] = {
    "model": typer.Option(
        "--model-path",
        metavar="MODEL",
        help="Folder of the model, an asset's name; on a cluster also org/name. Needed to start.",
    ),
    "preset": typer.Option("--preset", metavar="NAME", help="Preset of the run: gives its experiment's name."),
    "gpus": typer.Option(
        "--gpus", metavar="N|LIST", help="How many GPUs, such as 3, or which, such as 2,3,4; none: the CPU."
    ),
    "tensor_parallel": typer.Option("--tensor-parallel", min=1, metavar="N", help="GPUs of one server."),
    "engine": typer.Option("--engine", metavar="sglang|vllm", help="Kind of server."),
    "address": typer.Option(
        "--address", metavar="IP", help="Address to listen on: this host's private one where the run is on another."
    ),
    "context_length": typer.Option(
        "--context-length", min=0, metavar="TOKENS", help="Longest request; 0: the model's own."
    ),
    "server_flag": typer.Option(
        "--server-flag", metavar="OPTION", help="A further option of the server's own, one argument; repeatable."
    ),
    "flags": typer.Option("--flags", hidden=True, help="Options of the server's own, with blanks between them."),
    "cache_dir": typer.Option(
        "--cache-dir", metavar="FOLDER", help=f"On this machine: {CACHE_HELP[0].lower()}{CACHE_HELP[1:]}"
    ),
}


def takes_judge_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a Typer command the options of `JudgeOptions`; it gets them as its parameter `options`."""
    return takes(command, "options", JudgeOptions, _OPTIONS)
