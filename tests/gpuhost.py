"""Stand-ins for what a GPU host has and this machine lacks: nvidia-smi says what a real one said on two H200."""

from __future__ import annotations

import os
from pathlib import Path

CASES = Path(__file__).parent / "cases" / "nvidia_smi"
NOT_RUNNING = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)


def stand_in(folder: Path, name: str, body: str) -> None:
    """A program that is found before the real one of that name, where the folder is first in PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def nvidia_smi(folder: Path, *, cuda: str = "13.0", capability: str = "9.0") -> None:
    """One that answers as on two H200, but for CUDA's version and the compute capability."""
    plain = (CASES / "h200_plain.txt").read_text().replace("CUDA Version: 13.0", f"CUDA Version: {cuda}")
    (folder / "plain.txt").write_text(plain)
    table = (CASES / "h200_gpus.csv").read_text().splitlines()
    (folder / "gpus.csv").write_text("".join(f"{line}, {capability}\n" for line in table))
    stand_in(
        folder,
        "nvidia-smi",
        f'case "$*" in\n'
        f"  -L) cat {CASES}/h200_list.txt ;;\n"
        f"  *query-gpu=compute_cap,memory.total*) printf '%s, 143771\\n' {capability} {capability} ;;\n"
        f"  *query-gpu=compute_cap*) printf '%s\\n' {capability} {capability} ;;\n"
        f"  *query-gpu*) cat {folder}/gpus.csv ;;\n"
        f"  *) cat {folder}/plain.txt ;;\n"
        f"esac",
    )


def broken_nvidia_smi(folder: Path, message: str = NOT_RUNNING) -> None:
    """One whose driver does not run."""
    stand_in(folder, "nvidia-smi", f"cat <<'E'\n{message}\nE\nexit 9")


def first_in_path(*folders: Path) -> str:
    """PATH with these folders before all others."""
    return os.pathsep.join([*map(str, folders), os.environ["PATH"]])
