"""Which engine answers here, found out without loading any."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from evaluation.config import ServerConfig


def choose_kind(server: ServerConfig) -> str:
    """The engine that `auto` means here."""
    if server.engine != "auto":
        return server.engine
    if server.url:
        return "openai"
    if visible_gpus():
        if importlib.util.find_spec("sglang"):
            return "sglang"
        if importlib.util.find_spec("vllm") or os.environ.get("CLUSTERKIT_VLLM_PYTHON"):
            return "vllm"
    return "embedded"


def visible_gpus() -> int:
    """GPUs that this process may use."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0  # no import of seconds to find out
    import torch  # noqa: PLC0415 (seconds, and nothing to count without a device)

    return int(torch.cuda.device_count())
