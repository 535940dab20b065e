"""What runs inside SGLang: a cache of prefixes that makes room in pieces, a float32 output layer without copies.

SGLang 0.5.17 evicts what the next step of decoding lacks, a few hundred tokens, and lists and orders all evictable
leaves of its tree for that. Every finished turn of a memory agent leaves a leaf that nobody asks for again, so a long
evaluation or a large step fills the cache with thousands of them; the lists, and Python's garbage collector, which they
call over all that the scheduler holds, then take several times as long as decoding
(benchmarks/cache_eviction.py). Its float32 output layer (--enable-fp32-lm-head) copies the layer's weights into
float32 in every step, a tenth of a step of decoding where the model is small and its vocabulary large.

The folder of this file is on the server's PYTHONPATH and holds nothing else; the entry point beside it is how SGLang
finds its plugins.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

NAME = "clusterkit"
"""Of the cache, for --radix-cache-backend: a server that is not given it gets SGLang's own."""
PIECES = 32
"""A piece is this part of what can be evicted: the least recently used three percent go early, and the order of all is
found once for some hundred steps.
"""
PROCESSOR = "sglang.srt.layers.logits_processor"
"""Where SGLang has its output layer."""
OUTPUT_LAYER = "CLUSTERKIT_SGLANG_OUTPUT_LAYER"
"""Environment variable: "exact" for products of 16-bit numbers that are summed in float32, else SGLang's own layer."""


def register() -> None:
    """Make the cache known to SGLang: the one that it would have made, in pieces where that is the plain one.

    And put the output layer in the place of SGLang's, where the environment asks for it. Called in each of its
    processes.
    """
    from sglang.srt.mem_cache import registry  # noqa: PLC0415 (SGLang's Python alone)
    from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: PLC0415

    def make(context: Any) -> Any:
        cache = registry.default_radix_cache_factory(context)
        return evict_in_pieces(cache) if type(cache) is RadixCache else cache

    registry.register_radix_cache_backend(NAME, make)
    if os.environ.get(OUTPUT_LAYER) == "exact":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

        HookRegistry.register(f"{PROCESSOR}.LogitsProcessor._compute_lm_head", output_layer, HookType.AROUND)


def evict_in_pieces(cache: Any) -> Any:
    """Have a cache evict at least a piece whenever it must evict at all. Returns it."""
    evict = cache.evict

    def evict_piece(params: Any) -> Any:
        least = cache.evictable_size() // PIECES
        return evict(replace(params, num_tokens=max(params.num_tokens, least)))

    cache.evict = evict_piece
    return cache


def output_layer(computed: Callable[..., Any], self: Any, hidden: Any, layer: Any, *others: Any, **more: Any) -> Any:
    """Return scores [tokens, vocabulary] in float32 of states and weights in bfloat16 or float16.

    A product of two such numbers is a float32, and cuBLAS sums them in float32, as it does the copies in TF32.
    `computed` is SGLang's own, for all other layers: LoRA, quantised, in float32, on a CPU. So it is where somebody
    else's plugin has replaced it, and where SGLang's batch-invariant products are in use, which would round the scores
    to the states' dtype.
    """
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled  # noqa: PLC0415

    weight = getattr(layer, "weight", None)
    if (
        not self.use_fp32_lm_head
        or computed.__module__ != PROCESSOR
        or is_batch_invariant_mode_enabled()
        or not isinstance(weight, torch.Tensor)
        or not weight.is_cuda
        or weight.dtype not in (torch.bfloat16, torch.float16)
        or hidden.dtype != weight.dtype
        or hidden.dim() != 2
        or not hidden.numel()
        or hasattr(layer, "set_lora")
        or is_quantised(layer)
    ):
        return computed(self, hidden, layer, *others, **more)
    return torch.mm(hidden, weight.T, out_dtype=torch.float32)


def is_quantised(layer: Any) -> bool:
    """Whether SGLang computes the layer by its quantisation's method."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method  # noqa: PLC0415

    return bool(should_apply_lm_head_quant_method(layer, getattr(layer, "quant_method", None)))
