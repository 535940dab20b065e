"""Why a server did not start or died, read from its log."""

from __future__ import annotations

import re

# What a log says, and what to do about it. The first that matches wins; more special ones stand first.
_KNOWN: tuple[tuple[str, str], ...] = (
    (r"No module named '?sglang\b(?!\.)", "SGLang is not installed in this Python: install it beside the trainer"),
    (r"No module named '?vllm\b(?!\.)", "vLLM is not installed in this Python: pip install vllm"),
    (r"No module named '?(sglang|vllm)\.",
     "this version has no such module: check what the server's options name, or use a version that was tried"),
    (r"No module named '?([\w.]+)", "a Python package of the server is missing: install it beside the server"),
    (r"CUDA driver version is insufficient|driver on your system is too old",
     "the NVIDIA driver is older than the CUDA of this torch: update the driver, or install a torch for its CUDA"),
    (r"No accelerator \(CUDA", "the server sees no GPU: check nvidia-smi and the GPU numbers of the allocation"),
    (r"No CUDA GPUs are available|no CUDA-capable device|invalid device ordinal|Found no NVIDIA driver",
     "the server sees too few GPUs: check nvidia-smi, and that the allocation asks for no more GPUs than there are"),
    (r"no kernel image is available", "the server's kernels were not built for this GPU: install a build for it"),
    (r"larger than the available KV cache",
     "one whole context does not fit into the KV cache: lower servers.context_length, or raise the memory fraction"),
    (r"increase --mem-fraction-static|leave no GPU memory for the KV cache|No available memory for the cache blocks",
     "nothing is left for the KV cache: raise the server's memory fraction, or use more GPUs a server"),
    (r"less than desired GPU memory utilization|not enough GPU memory"
     r"|CUDA out of memory|OutOfMemoryError|CUDA error: out of memory",
     "the GPU's memory is full: lower the server's memory fraction, end what else uses the GPU, or take more GPUs"),
    (r"[Aa]ddress already in use", "the port was taken by another program: start again"),
    (r"Cannot find any model weights|no file named .*safetensors|No safetensors",
     "the model folder holds no weights: check the model path"),
    (r"does not appear to have a file named config\.json|Unrecognized model in|Incorrect path_or_model_id",
     "this is no model folder (config.json is missing or names no model type): check the model path"),
    (r"architectures .* (are|is) not supported|no SGLang implementation",
     "the server does not know this model architecture: use a newer server, or another model"),
    (r"max_model_len .*greater than the derived", "the model has a shorter context: lower servers.context_length"),
    (r"is not divisible by|must be divisible by tensor parallel|assert self\.total_num_(kv_)?heads % tp_size",
     "the model's heads do not divide by the tensor parallel size: use a size that divides them"),
    (r"unrecognized arguments|invalid choice",
     "this server does not know an option: use a version that was tried"),
    (r"ncclUnhandledCudaError|NCCL error", "NCCL failed between the server's GPUs: NCCL_DEBUG=INFO gives the reason"),
)  # fmt: skip
_ERROR_LINE = re.compile(r"^\s*(\w+\.)*\w*(Error|Exception|Exit)\b.*|.*\b(error|ERROR|Killed|Aborted)\b.*")


def log_cause(text: str) -> str:
    """One sentence: the line of the log that tells most, and what to do about it where that is known."""
    lines = _lines(text)
    if known := _known(lines):
        return known
    for line in reversed(lines):
        if _ERROR_LINE.match(line):
            return _short(line)
    return _short(lines[-1]) if lines else "its log is empty"


def log_end(text: str, count: int = 3) -> str:
    """What a server that has not failed does, or waits for: a known line with advice, else the last ones of its log."""
    lines = _lines(text)
    return _known(lines) or " | ".join(map(_short, lines[-count:])) or "nothing, it is empty"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]


def _known(lines: list[str]) -> str:
    for pattern, advice in _KNOWN:
        expression = re.compile(pattern)
        for line in reversed(lines):
            if expression.search(line):
                return f"{_short(line)} — {advice}"
    return ""


def _short(line: str, limit: int = 300) -> str:
    return line if len(line) <= limit else line[: limit - 1] + "…"
