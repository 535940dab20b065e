"""What NCCL must be told before this process first uses it, so that weights can go to servers over it."""

from __future__ import annotations

import os

from trainer.config import RunConfig

NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Both ends need these. SGLang sets them for itself; without them on the trainer's side the first broadcast fails with
«Cuda failure 'invalid argument'», in the middle of an update."""


def prepare_nccl(config: RunConfig) -> None:
    """Set them where this run may send weights over NCCL; call it before the ranks meet. A user's own values stay."""
    if config.num_servers and config.weights.transport != "disk":
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)


def nccl_problem() -> str:
    """Why weights cannot go over NCCL from this process; empty when they can."""
    wrong = [
        f"{name}={os.environ.get(name, '')}" for name, value in NCCL_SETTINGS.items() if os.environ.get(name) != value
    ]
    if not wrong:
        return ""
    wanted = " ".join(f"{name}={value}" for name, value in NCCL_SETTINGS.items())
    return f"NCCL needs {wanted} in the trainer's environment before it starts, and there is {' '.join(wrong)}"
