"""What SGLang is given because of the GPU and the packages that it runs with, where the user has said nothing else.

Found by looking at files and at nvidia-smi; nothing of SGLang is imported, and no GPU is used.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.engines.options import ServerOptions, Setting, visible_devices

log = logging.getLogger(__name__)

TRIED_VERSIONS = ("0.5.17",)
PROBE = Path(__file__).with_name("sglang_probe.py")
SGLANG_SIDE = Path(__file__).with_name("sglang_side")
PROBE_SECONDS = 60
SYSTEM_CUDA = Path("/usr/local/cuda")
HOPPER = 9
_ATTENTION = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")
# Options that say something of graphs for prompts, of this and older versions.
_PREFILL_GRAPHS = (
    "--cuda-graph-backend-prefill", "--disable-prefill-cuda-graph", "--cuda-graph-config", "--cuda-graph-bs-prefill",
    "--cuda-graph-max-bs-prefill", "--disable-piecewise-cuda-graph", "--enforce-piecewise-cuda-graph",
    "--enable-breakable-cuda-graph",
)  # fmt: skip

_TF32 = "--enable-tf32-matmul"
_GRAPHS = "--cuda-graph-max-bs-decode"
# Options that say something of graphs for decoding.
_DECODE_GRAPHS = (
    _GRAPHS, "--cuda-graph-max-bs", "--cuda-graph-bs", "--cuda-graph-bs-decode", "--cuda-graph-backend-decode",
    "--cuda-graph-config", "--disable-cuda-graph", "--disable-decode-cuda-graph",
)  # fmt: skip
LARGEST_GRAPH = 256
"""Requests of SGLang's own largest graph, on GPUs of ROOMY_MIB and more."""
ROOMY_MIB = 60 * 1024
GRAPH_STEP, MOST_IN_A_GRAPH = 32, 640
"""SGLang makes one for every 32 requests beyond 512; each takes a second, and memory."""

_DELAYER = "--enable-prefill-delayer"
_DELAY_SHARE = "0.1"
"""Of the responses that are being sampled: so many prompts are worth a pass."""

OUTPUT_LAYER = "CLUSTERKIT_SGLANG_OUTPUT_LAYER"
"""Read by sglang_side, which has a name of its own for it. The user's own value wins."""
_CACHE = "--radix-cache-backend"
# Options with which the cache of prefixes is another one, or must be SGLang's own.
_CACHES = (_CACHE, "--disable-radix-cache", "--kv-cache-dtype", "--enable-int8-mamba-checkpoint")


@dataclass(frozen=True, slots=True)
class Packages:
    """What sglang_probe.py prints of an interpreter; see there."""

    version: str = ""
    options: frozenset[str] = frozenset()
    fa3: bool = False
    cuda_home: str = ""
    bin: str = ""


@dataclass(frozen=True, slots=True)
class GPU:
    """What nvidia-smi tells of a server's GPUs.

    major: first number of the compute capability, None where it does not tell. memory_mib: of each; 0: not told.
    """

    major: int | None = None
    memory_mib: int = 0


def setting(options: ServerOptions) -> Setting:
    """Look at the interpreter and the GPUs of a server, and choose."""
    packages = look(options.python)
    known = {**os.environ, **options.env}
    environment = compiler_environment(packages, known)
    compiles = has_compiler({**known, **environment})
    flags, reasons = choose(packages, look_at(options.gpus), compiles, options)
    if packages.version in TRIED_VERSIONS and takes_plugin(options):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SGLANG_SIDE), known.get("PYTHONPATH", ""))))
        if names_of(options).isdisjoint(_CACHES):
            flags += (_CACHE, "clusterkit")
            reasons += ("SGLang's own cache of prefixes is slow once it is full of finished turns",)
        if options.fp32_head and not options.deterministic:
            environment[OUTPUT_LAYER] = known.get(OUTPUT_LAYER, "exact")
            reasons += ("SGLang copies a float32 output layer's weights in every step, unless that says exact",)
    return Setting(flags, reasons, environment)


def takes_plugin(options: ServerOptions) -> bool:
    """Whether a server gets sglang_side: not where the user chooses its plugins, or which modules it finds."""
    return "SGLANG_PLUGINS" not in os.environ and {"SGLANG_PLUGINS", "PYTHONPATH"}.isdisjoint(options.env)


def names_of(options: ServerOptions) -> set[str]:
    """Options that the user's own flags name."""
    return {word.partition("=")[0] for word in options.flags}


def choose(
    packages: Packages, gpu: GPU, compiles: bool, options: ServerOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return options for the command line, and why each was chosen; the user's own (`options.flags`) win.

    compiles: whether kernels can be compiled here.
    """
    flags: list[str] = []
    reasons: list[str] = []
    names = names_of(options)
    if gpu.major is not None and _ATTENTION[0] in packages.options and names.isdisjoint(_ATTENTION):
        if gpu.major == HOPPER and packages.fa3:
            flags += [_ATTENTION[0], "fa3"]
            reasons.append("a Hopper GPU, and SGLang's kernels hold FlashAttention 3")
        elif not compiles:
            flags += [_ATTENTION[0], "triton"]
            reasons.append("FlashInfer's kernels would have to be compiled, and there is no nvcc")
    if names.isdisjoint(_PREFILL_GRAPHS):
        new, old = "--cuda-graph-backend-prefill", "--disable-piecewise-cuda-graph"
        if new in packages.options or old in packages.options:
            flags.append(f"{new}=disabled" if new in packages.options else old)
            reasons.append("graphs of prompts take start-up time and memory, and sampling was slower with them")
    for more, why in (
        _output_layer(packages, gpu, options, names),
        _graphs(packages, gpu, options, names),
        _delayed_prompts(packages, options, names),
    ):
        flags += more
        reasons += why
    return tuple(flags), tuple(reasons)


def _output_layer(packages: Packages, gpu: GPU, options: ServerOptions, names: set[str]) -> tuple[list[str], list[str]]:
    # Products of bfloat16 numbers are exact in TF32; a server in float32 would be another model.
    known = _TF32 in packages.options and gpu.major is not None and names.isdisjoint((_TF32, "--dtype"))
    if not known or not options.fp32_head or options.deterministic:
        return [], []
    return [_TF32], ["the float32 output layer is faster on tensor cores, and its log-probs are no further off"]


def _graphs(packages: Packages, gpu: GPU, options: ServerOptions, names: set[str]) -> tuple[list[str], list[str]]:
    known = _GRAPHS in packages.options and gpu.memory_mib >= ROOMY_MIB and names.isdisjoint(_DECODE_GRAPHS)
    expected = min(options.expected, options.max_running or options.expected)
    if not known or expected <= LARGEST_GRAPH:
        return [], []
    largest = min(-(-expected // GRAPH_STEP) * GRAPH_STEP, MOST_IN_A_GRAPH)
    return [_GRAPHS, str(largest)], [f"up to {expected} requests at a time are expected, and its graphs end at 256"]


def _delayed_prompts(packages: Packages, options: ServerOptions, names: set[str]) -> tuple[list[str], list[str]]:
    share, most = "--prefill-delayer-queue-min-ratio", "--prefill-delayer-max-delay-ms"
    if not options.prefill_delay_ms or not names.isdisjoint((_DELAYER, share, most, "--disable-overlap-schedule")):
        return [], []  # it needs the schedule beside the GPU
    if not {_DELAYER, share, most} <= packages.options:
        known = packages.version or "of a version that it does not tell"
        log.warning("SGLang %s cannot hold prompts back: servers.prefill_delay_ms does nothing", known)
        return [], []
    flags = [_DELAYER, share, _DELAY_SHARE, most, f"{options.prefill_delay_ms:g}"]
    return flags, [f"prompts wait up to {options.prefill_delay_ms:g} ms for others, and sampling for fewer passes"]


@lru_cache(maxsize=8)
def look(python: str) -> Packages:
    """Ask an interpreter for its packages. Nothing is known of one that does not answer."""
    try:
        # -P: the probe's own folder holds no packages.
        done = subprocess.run(
            [python, "-P", str(PROBE)], capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return Packages(**{**answer, "options": frozenset(answer["options"])})
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError) as error:
        log.debug("%s did not tell its packages: %s", python, error)
        return Packages()


def look_at(gpus: tuple[int, ...]) -> GPU:
    """Ask nvidia-smi for these GPUs, and take the least of what they have."""
    query = "--query-gpu=compute_cap,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={visible_devices(gpus)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return GPU()
    found = re.findall(r"^(\d+)\.\d+, *(\d*)", done.stdout, re.MULTILINE)
    return GPU(min((int(major) for major, _ in found), default=None), min((int(m or 0) for _, m in found), default=0))


def has_compiler(environment: Mapping[str, str]) -> bool:
    """Whether a CUDA compiler is found as SGLang looks for it."""
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if named:
        return os.access(Path(named) / "bin" / "nvcc", os.X_OK)
    found = shutil.which("nvcc", path=environment.get("PATH"))
    return found is not None or os.access(SYSTEM_CUDA / "bin" / "nvcc", os.X_OK)


def compiler_environment(packages: Packages, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that lead SGLang to the compiler and ninja of its interpreter, where it has them.

    SGLang compiles some kernels where they first run. A host with nothing but a driver has no compiler, and that of
    another CUDA would not fit PyTorch's. $CUDA_HOME says otherwise.
    """
    added: dict[str, str] = {}
    path = environment.get("PATH", os.defpath)
    if packages.cuda_home and not (environment.get("CUDA_HOME") or environment.get("CUDA_PATH")):
        added["CUDA_HOME"] = packages.cuda_home
    if packages.bin and not shutil.which("ninja", path=path) and os.access(Path(packages.bin) / "ninja", os.X_OK):
        added["PATH"] = f"{packages.bin}{os.pathsep}{path}"
    return added
