"""SGLang's cache of prefixes when it is full of a memory agent's finished turns: milliseconds of a step of decoding.

    .venv-gpu/bin/python benchmarks/cache_eviction.py [--tokens 2500000] [--turn 200] [--running 256] [--steps 2000]

Needs SGLang's packages (`make gpu-setup`) and no GPU: the cache and the allocator of SGLang's scheduler keep the places
of tokens alone, on the CPU here. The cache is filled with turns of --turn tokens that have nothing in common, as those
of the paper's order have after their problem; then each step takes a place for every running request, and evicts where
there is none. Printed: a JSON line for SGLang's own cache, the peer, and one for `--radix-cache-backend clusterkit`
(trainer/engines/sglang_side), both also after SGLang's /freeze_gc, with the median and the mean of a step; last, how
many times as fast each is in the mean. Most of the mean is Python's garbage collector, which the lists of leaves call.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer" / "engines" / "sglang_side"))

import torch
from clusterkit_sglang import evict_in_pieces
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


def full_cache(tokens: int, turn: int) -> Any:
    """Return SGLang's cache, full of finished turns."""
    allocator = TokenToKVPoolAllocator(tokens, torch.bfloat16, "cpu", None, need_sort=False)
    cache = RadixCache(CacheInitParams(False, None, allocator, page_size=1))
    while (places := allocator.alloc(turn)) is not None:
        finish(cache, places)
    return cache


def finish(cache: Any, places: torch.Tensor) -> None:
    """A turn ends: its tokens go into the tree."""
    ids = array("q", (random.randrange(1 << 40) for _ in range(len(places))))
    cache.insert(InsertParams(key=RadixKey(ids, None), value=places.clone()))


def decode(cache: Any, running: int, turn: int, steps: int) -> list[float]:
    """Seconds that each step spends on places for its tokens. Turns end as they are full, and others begin."""
    allocator = cache.token_to_kv_pool_allocator
    taken: list[torch.Tensor] = []
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        evict_from_tree_cache(cache, running)
        places = allocator.alloc(running)
        seconds.append(time.perf_counter() - began)
        taken.append(places)
        if len(taken) == turn:
            for row in torch.stack(taken, 1):
                finish(cache, row)
            taken = []
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_500_000, help="that the cache holds")
    parser.add_argument("--turn", type=int, default=200, help="tokens that a finished turn leaves")
    parser.add_argument("--running", type=int, default=256, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    means = []
    for name in ("sglang", "sglang, frozen", "clusterkit", "clusterkit, frozen"):
        gc.unfreeze()
        gc.collect()
        if name.endswith("frozen"):
            gc.freeze()
        random.seed(0)
        cache = full_cache(given.tokens, given.turn)
        leaves = len(cache.evictable_leaves)
        if name.startswith("clusterkit"):
            cache = evict_in_pieces(cache)
        seconds = decode(cache, given.running, given.turn, given.steps)
        means.append(statistics.mean(seconds))
        told = {"cache": name, "leaves": leaves, "median_ms": round(1e3 * statistics.median(seconds), 3)}
        print(json.dumps(told | {"mean_ms": round(1e3 * means[-1], 3), "max_ms": round(1e3 * max(seconds), 1)}))
    print(json.dumps({"ratios": [round(means[0] / mean, 1) for mean in means]}))


if __name__ == "__main__":
    main()
