"""Estimates of the memory of one GPU that trains or generates, and of the disk for checkpoints, in bytes.

They find plans that miss by a factor; the last per cents depend on the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.capacity.plan import largest_micro_batch
from clusterkit.capacity.shapes import ModelShape
from trainer.allocation import Layout
from trainer.config import RunConfig
from trainer.config_parts import CHUNKED
from trainer.placement import served_rank, served_versions

GIB = 1024**3
REPORTED = {
    **{11: 10.8, 12: 11.6, 16: 15.6, 20: 19.6, 24: 22.5, 32: 31.4, 40: 39.4, 48: 44.4, 64: 63.0},
    **{80: 79.2, 94: 93.1, 96: 95.0, 141: 139.8, 144: 142.8, 180: 178.3, 192: 178.3},
}
"""GiB that PyTorch sees of a card sold with so many GB: the least of all such cards (of 48 GB: an L40S with ECC)."""
USUAL_SHARE = 0.98
"""Share of the size as sold, for cards that are not listed."""
ROOM = 0.05
"""Share of a GPU's memory that an estimate should leave free: fragments, other processes, and its own error."""
RUNTIME = 4 * GIB
"""CUDA context, NCCL buffers, and memory that the allocator cannot use."""
STATE_BYTES = 16
"""Per trained parameter: master weight, gradient and the two moments of Adam, 4 bytes each."""
RECOVER_BYTES = 12
"""Per parameter in a recover checkpoint: master weight and the two moments."""
RECOVER_SLOTS = 3
"""Recover checkpoints on the disk at most: two are kept, and the next is written beside them."""
RELEASED = 2 * GIB
"""Bytes that an engine keeps while training uses its GPU."""
FLOAT32 = 4
"""Bytes."""
KEYS_PER_TOKEN = 4
"""Keys and values that are laid out for each token of a micro-batch, of groups of 8 to 16 with long prefixes."""

PIECE = 4096
"""Tokens of which the feed-forward part is computed at a time with chunked activations (trainer/train/chunks.py)."""


def reported_gib(sold: float) -> float:
    """Return the usable GiB of a card; `sold`: its size as sold, or with a fraction as nvidia-smi reports it."""
    if sold != int(sold):
        return sold
    return REPORTED.get(int(sold), sold * USUAL_SHARE)


@dataclass(frozen=True)
class Usage:
    """What uses the memory of one GPU (or a disk), in bytes by name."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Cache:
    """The KV cache of one engine server: its bytes beside the weights, its tokens, and its sequences of full length."""

    weights: int
    space: int
    tokens: int
    sequences: float


def training_usage(config: RunConfig, shape: ModelShape, layout: Layout) -> Usage:
    """Estimate the memory of one FSDP rank while it trains.

    With P parameters, R ranks of a replica (all GPUs of the layout, or s t c of them; a pipeline is folded in), b bytes
    of the compute dtype, n tokens of the largest micro-batch (a row that is longer than train.max_tokens_per_mb is
    alone in its own), t x c GPUs that share a sequence, L layers, h hidden, f feed-forward, k key/value width:

        state        16 P / R                      sharded master weights, gradients, Adam's moments, in float32; with
                                                   model.lora of the adapters' parameters alone
        base         b P / R                       with model.lora: the weights that stay as they are
        reference    b P / R                       with a KL term; with model.lora it is the base
        gathered     b (2 layers + embeddings) / t  the layer in use, the next one, embedding and head
        activations  b n h L / (t c)               one input per layer with full gradient checkpointing, and
                     2 b n (6 h + 2 k + 4 f) / (t c)  one layer at work, values and gradients; without checkpointing
                                                   the values of all L layers, with selective checkpointing half;
                                                   chunked: 4 f of 4,096 tokens only; offloaded: two inputs for L
        pieces       (4 + b) 3 h f / t             with chunked activations: a feed-forward part's gradients, summed in
                                                   float32; with model.lora of its adapters' alone: left out
        prefix keys  2 b n k r L / t               with shared prefixes: keys and values laid out for each row that
                                                   follows a prefix, r for each token; of one layer with checkpointing;
                     + 4 n k (r + 1) / t           and, of one layer's keys or values, both in float32
        logits       3 x 4 x logprob_chunk x vocabulary   scores, probabilities and gradients in float32
        runtime      4 GiB
    """
    ranks, width, lora = layout.sharded_over, weight_bytes(config), config.model.lora
    split = layout.tensor * layout.context
    tokens, kind = largest_micro_batch(config), config.model.gradient_checkpointing
    piece = PIECE * layout.tensor  # each of the ranks that share a layer gives as many tokens
    keys = tokens * shape.kv_heads * shape.head_dim // layout.tensor
    keys_of = shape.layers if kind == "none" else 1
    chunk = min(config.train.logprob_chunk, tokens)
    return Usage(
        {
            "state": STATE_BYTES * trained_parameters(config, shape) // ranks,
            "base": _base_bytes(config, shape) // ranks,
            "reference": width * shape.parameters // ranks if config.algorithm.kl_coef and not lora.rank else 0,
            "gathered": width * (2 * shape.layer_parameters + shape.embedding_parameters) // layout.tensor,
            "activations": width * _activations(kind, shape, tokens, piece) // split,
            "pieces": (FLOAT32 + width) * 3 * shape.hidden * shape.intermediate // layout.tensor
            if kind in CHUNKED and tokens > piece and not lora.rank
            else 0,
            "prefix keys": keys * (2 * width * KEYS_PER_TOKEN * keys_of + FLOAT32 * (KEYS_PER_TOKEN + 1))
            if config.train.share_prefixes and config.rollout.group_size > 1
            else 0,
            "logits": 3 * 4 * chunk * shape.vocabulary,
            "runtime": RUNTIME,
        }
    )


def _activations(kind: str, shape: ModelShape, tokens: int, piece: int) -> int:
    """Return how many numbers a micro-batch keeps for the backward pass, at its most. piece: tokens of the longest."""
    narrow, wide = 6 * shape.hidden + 2 * shape.kv_heads * shape.head_dim, 4 * shape.intermediate
    inside = narrow + wide
    if kind == "none":
        return tokens * inside * (shape.layers + 1)
    if kind == "selective":
        return tokens * (inside // 2 * shape.layers + 2 * inside)
    if kind == "full":
        return tokens * (shape.hidden * shape.layers + 2 * inside)
    inputs = shape.hidden * (2 if kind == "offloaded" else shape.layers)
    return tokens * (inputs + 2 * narrow) + min(tokens, piece) * 2 * wide


def waiting_usage(config: RunConfig, shape: ModelShape, layout: Layout) -> int:
    """Return what a rank keeps on its GPU while an engine generates there: weights and moments (12 P / R), or 0."""
    return 0 if config.train.offload else resting_bytes(config, shape) // layout.sharded_over


def host_usage(config: RunConfig, shape: ModelShape, layout: Layout) -> Usage:
    """Estimate the memory of a host, beside its processes' own, for what its FSDP ranks keep there all the time.

    offload      12 P / R a rank   with train.offload: weights and moments; with model.lora the base, too
    recover      12 P / R a rank   the copy that a recover checkpoint is written from in the background
    checkpoint    b P / R a rank   that of a persistent one; twice where adapters are merged in for it
    inputs        b n h L / (t c) a rank   with offloaded activations: one input per layer (see `training_usage`)

    It is pinned, and PyTorch pins the next power of two for each tensor (norms and biases are too small to count).
    """
    here, ranks = min(config.n_gpus_per_node, layout.gpus), layout.sharded_over
    copies = config.checkpoint.async_recover is not False
    merges = bool(config.model.lora.rank) and config.checkpoint.merged
    width, lora = weight_bytes(config), config.model.lora
    resting = 3 * _pinned(shape.adapter_matrices(lora) if lora.rank else shape.matrices, FLOAT32, ranks)
    whole = _pinned(shape.matrices, width, ranks)
    tokens, split = largest_micro_batch(config), layout.tensor * layout.context
    inputs = shape.layers * _pinned([tokens * shape.hidden], width, split)
    parts = {
        "offloaded weights and optimizer": resting + whole * bool(lora.rank) if config.train.offload else 0,
        "copy for recover checkpoints": resting if copies else 0,
        "copy for persistent checkpoints": (2 if merges else 0 if lora.rank else 1) * whole if copies else 0,
        "layers' inputs": inputs if config.model.gradient_checkpointing == "offloaded" else 0,
    }
    return Usage({name: size * here for name, size in parts.items()})


def _pinned(matrices: list[int], width: int, ranks: int) -> int:
    """Return the bytes that a rank pins for its share of matrices. width: bytes of a number."""
    return sum(1 << (-(-width * numbers // ranks) - 1).bit_length() for numbers in matrices)


def resting_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes that all ranks keep of a model between steps: weights and moments, and a base's weights."""
    return RECOVER_BYTES * trained_parameters(config, shape) + _base_bytes(config, shape)


def trained_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Return the parameters that learn: the adapters' with model.lora, else all."""
    return shape.adapter_parameters(config.model.lora) or shape.parameters


def enough_memory(needed: float) -> int:
    """Return the GB, as sold, of the smallest listed GPU that has so many bytes and some to spare; 0 if none has."""
    return next((sold for sold in sorted(REPORTED) if needed <= (1 - ROOM) * REPORTED[sold] * GIB), 0)


def cache_of(config: RunConfig, shape: ModelShape, layout: Layout, gpu_memory: int, longest: int) -> Cache:
    """Estimate the KV cache of one server, over all of its t x p GPUs.

    gpu_memory_fraction x memory x t p is for 16-bit weights (2 P), the versions of an adapter that are held beside one
    another, and the cache. A token takes 2 (key, value) x 2 bytes x layers x key/value heads x head size, and more
    where t exceeds the key/value heads, because heads are not divided.
    """
    gpus = layout.tensor * layout.pipeline
    adapters = served_versions(config) * shape.adapter_parameters(config.model.lora) if served_rank(config) else 0
    weights = 2 * (shape.parameters + adapters)
    space = int(config.rollout.gpu_memory_fraction * gpu_memory) * gpus - weights
    copies = max(1, layout.tensor // shape.kv_heads)
    tokens = max(0, space) // (shape.kv_bytes_per_token * copies)
    return Cache(weights, space, tokens, tokens / longest)


def disk_usage(config: RunConfig, shape: ModelShape, saves: int) -> Usage:
    """Estimate the storage of a run: its first model, three recover checkpoints of 12 P, `saves` exports of b P.

    With model.lora recover checkpoints have the adapters alone; exports, them beside the merged model or in its place.
    """
    adapters = shape.adapter_parameters(config.model.lora)
    whole = weight_bytes(config) * shape.parameters if config.checkpoint.merged or not adapters else 0
    return Usage(
        {
            "model": 2 * shape.parameters if config.model.path else 0,
            "recover": RECOVER_SLOTS * RECOVER_BYTES * trained_parameters(config, shape),
            "checkpoints": saves * (whole + FLOAT32 * adapters),
        }
    )


def _base_bytes(config: RunConfig, shape: ModelShape) -> int:
    return weight_bytes(config) * shape.parameters if config.model.lora.rank else 0


def weight_bytes(config: RunConfig) -> int:
    """Return the bytes of a weight while a layer computes."""
    return 2 if config.model.dtype == "bfloat16" else 4
