"""How fast GPUs sample and train: rates measured with this trainer, and the arithmetic that scales them.

Measured on one H200 with the 1.5B shape (docs/performance.md). For another model the same share of what the GPU can do
is assumed: of its bfloat16 FLOP/s where prompts are read and rows are trained, of its memory's bytes/s where tokens are
sampled. For another GPU the share is kept and the data sheet's figure exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.capacity.shapes import ModelShape

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

# From two rows of docs/performance.md, "Shared prefixes", sampling, server as a run starts it: 1,280 requests of 2.0
# million prompt tokens and 0.33 million sampled ones at 256 sequences. 15,340 tokens/s with 23.8 % of the prompts'
# tokens from the cache, 20,521 with 75.8 %: 5.2 µs for each computed prompt token and 41 µs for each sampled one.
PREFILL_SHARE = 0.54
"""Of the GPU's FLOP/s, while prompts are read."""
DECODE_SHARE = 0.31
"""Of its memory's bytes/s, while tokens are sampled; prompts are read apart from that."""
FAST_DECODE_SHARE = 0.39
"""The same with `--enable-tf32-matmul` and CUDA graphs for 512 sequences (25,059 tokens/s)."""


def forward_flops(shape: ModelShape, context: float) -> float:
    """Return the FLOPs of one token's forward pass through the layers, behind `context` tokens on average."""
    return 2 * shape.layers * shape.layer_parameters + 4 * shape.layers * shape.heads * shape.head_dim * context


def prefill_seconds(shape: ModelShape, gpu: Gpu, tokens: float, context: float, gpus: int = 1) -> float:
    """Return the seconds in which a server of `gpus` GPUs reads so many tokens, behind `context` tokens on average."""
    return tokens * forward_flops(shape, context) / (PREFILL_SHARE * gpu.flops * gpus)


def decode_seconds(
    shape: ModelShape, gpu: Gpu, context: float, gpus: int = 1, share: float = DECODE_SHARE
) -> tuple[float, float]:
    """Return the seconds of a decoding step for the weights, and those for one sequence of `context` tokens."""
    read = shape.parameters - (0 if shape.tied else shape.vocabulary * shape.hidden)
    speed = share * gpu.bandwidth * gpus
    return WIDTH * read / speed, shape.kv_bytes_per_token * context / speed
