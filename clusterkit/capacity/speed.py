"""How fast GPUs sample and train: rates measured with this trainer, and the arithmetic that scales them.

Measured on one H200 with the 1.5B shape (docs/performance.md). For another model the same share of what the GPU can do
is assumed: of its bfloat16 FLOP/s where prompts are read and rows are trained, of its memory's bytes/s where tokens are
sampled. For another GPU the share is kept and the data sheet's figure exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.capacity.shapes import ModelShape
from trainer.allocation import Allocation
from trainer.config import RunConfig

WIDTH = 2
"""Bytes of a weight and of a cached number: bfloat16."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet. flops: dense bfloat16 FLOP/s. bandwidth: of its memory, bytes/s. memory_gib: as sold."""

    name: str
    flops: float
    bandwidth: float
    memory_gib: float


GPUS = {
    "H200": Gpu("H200", 989.5e12, 4.8e12, 141),
    "H100": Gpu("H100", 989.5e12, 3.35e12, 80),
    "A100": Gpu("A100", 312e12, 2.039e12, 80),
}
MEASURED_ON = "H200"

# From rows of docs/performance.md: "Shared prefixes", sampling (1,280 requests of 2.0 million prompt tokens and 0.33
# million sampled ones at 256 sequences: 15,340 tokens/s with 23.8 % of the prompts' tokens from the cache, 20,521 with
# 75.8 %: 5.2 µs for each computed prompt token and 41 µs for each sampled one), and "One, two and four GPUs that do
# both" (the same requests on one, two and four servers: 14.6, 9.7 and 7.1 s, of which 4.6 s do not shrink: 3 ms a
# decoding step beside the weights; 2.4 fit the whole steps there).
PREFILL_SHARE = 0.54
"""Of the GPU's FLOP/s, while prompts are read."""
STEP_SECONDS = 2.4e-3
"""Of every decoding step, however few sequences it is for: starting kernels, scheduling, choosing tokens."""
STEADY_STEP_SECONDS = 1.1e-3
"""The same at best where one response is all, so that no prompts are read in between. It fits 128 responses of 2,048
tokens on each server, 4.05 ms a step ("Mathematics on two GPUs")."""
DECODE_SHARE = (0.55, 0.39)
"""Of its memory's bytes/s, while tokens are sampled, beside that; prompts are read apart from it. At best with
`--enable-tf32-matmul` and CUDA graphs for 512 sequences (25,059 tokens/s), at worst without."""
TENSOR_SHARE = (1.0, 0.46)
"""Of its GPUs' speed that a server on several of them reaches, at best and at worst: one on two GPUs sampled 20,502
tokens/s with the 1.5B shape, one on one GPU 22,411."""
MOST_SERVERS = 4
"""Servers that were measured together."""
MOST_RESPONSE = 2048
"""Tokens of a response that were measured where one is all."""


def forward_flops(shape: ModelShape, context: float) -> float:
    """Return the FLOPs of one token's forward pass through the layers, behind `context` tokens on average."""
    return 2 * shape.layers * shape.layer_parameters + 4 * shape.layers * shape.heads * shape.head_dim * context


def prefill_seconds(shape: ModelShape, gpu: Gpu, tokens: float, context: float, gpus: float = 1) -> float:
    """Return the seconds in which a server of `gpus` GPUs reads so many tokens, behind `context` tokens on average."""
    return tokens * forward_flops(shape, context) / (PREFILL_SHARE * gpu.flops * gpus)


def decode_seconds(
    shape: ModelShape, gpu: Gpu, context: float, gpus: float = 1, case: int = 1, step: float = STEP_SECONDS
) -> tuple[float, float]:
    """Return the seconds of a decoding step that all its sequences share, and those for one of `context` tokens.

    case: 0 at best, 1 at worst. step: seconds beside what is read from memory.
    """
    read = shape.parameters - (0 if shape.tied else shape.vocabulary * shape.hidden)
    speed = DECODE_SHARE[case] * gpu.bandwidth * gpus
    return step + WIDTH * read / speed, shape.kv_bytes_per_token * context / speed


# docs/performance.md, training of the 1.5B shape with compiled layers: 48.3 % on one H200 that only trains; in whole
# steps with shared prefixes on GPUs that sample, too, 43.4 % on one, 40.3 on two and 39.3 on four (36.7 in the second).
MFU = (0.483, 0.367)
"""Model FLOPs utilisation of training, at its best and at its worst."""
ADAPTED = 2 / 3 / (0.602 / 0.659)
"""Of the speed of training all weights, with low-rank adapters: two thirds of the products take 0.602 s in place of
0.659 (docs/lora.md)."""
RECOMPUTED = 32_511 / 40_894
"""Of the speed of training, with every layer's activations computed again in the backward pass."""
TENSOR_TRAINING = (0.79, 0.73)
"""Of that, where ranks share layers: two GPUs as one tensor parallel group and four as two of them, compiled, over one
GPU alone (six layers of 7B's width); the worse figure is over the better single GPU of two hosts."""
MOST_TENSOR = 2
"""GPUs that shared layers in training."""
MOST_SHARED = 3.0
"""Tokens of rows over those that training computed, at most, in what was measured: sections of 2,000 tokens, memories
of 256, 8 trajectories a document."""
MOST_MEASURED = 4
"""GPUs that trained together."""
NETWORK = {"H200": 50e9, "H100": 50e9, "A100": 25e9}
"""Bytes/s of a GPU's own network adapter: 400 Gbit/s, 200 in A100 hosts. Not measured."""
UNMEASURED = 0.3
"""Added to the worse end of what was not measured."""

# docs/performance.md, 3.09 GB: updates over NCCL and through a folder; whole steps on shared GPUs over CUDA IPC.
NCCL = (3.09e9 / 0.031, 3.09e9 / 0.042)
IPC = (3.09e9 / 0.30, 3.09e9 / 0.54)
FOLDER = 3.09e9 / (3.1 + 0.911)
"""Bytes/s of one copy of the weights: NCCL between two GPUs of a host, CUDA IPC on one, a folder in memory."""
HOST_MEMORY = 50e9
"""Bytes/s between a GPU and pinned host memory, in either direction."""


@dataclass(frozen=True)
class Controller:
    """What the controllers add, by benchmarks/fleet.py (docs/scale.md).

    wait_share: of sampling, beyond the servers' own time. request_seconds, token_seconds: of a processor, for each
    request and, beside that, for each sampled token. change_seconds: of a version change, beyond the slowest server.
    """

    wait_share: float
    request_seconds: float
    token_seconds: float
    change_seconds: float


CONTROLLER = Controller(wait_share=0.03, request_seconds=0.3e-3, token_seconds=1.0e-6, change_seconds=0.12)


def publishing_seconds(config: RunConfig, shape: ModelShape, allocation: Allocation, gpu: str) -> tuple[float, float]:
    """Return the seconds, at best and at worst, until all servers have new weights.

    Servers on the trainer's GPUs read them there, all at once. Others get them over NCCL from rank 0, one group of
    servers after another; between hosts each broadcast goes through rank 0's adapter.
    """
    if allocation.rollout is None:
        return 0.0, 0.0
    size, servers = WIDTH * shape.parameters, allocation.rollout.layout.data
    if allocation.colocated or config.weights.transport == "disk":
        low, high = (size / IPC[0], size / IPC[1]) if allocation.colocated else (size / FOLDER, size / FOLDER)
    else:
        groups = -(-servers // (config.weights.servers_per_group or servers))
        network = NETWORK[gpu] if config.n_nodes > 1 else NCCL[0]
        low, high = (groups * size / min(speed, network) for speed in NCCL)
    return low + CONTROLLER.change_seconds, high + CONTROLLER.change_seconds
