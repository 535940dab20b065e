"""What runs inside SGLang's schedulers: its cache of prefixes makes room for more than the next step at a time.

SGLang 0.5.17 evicts what the next step of decoding lacks, a few hundred tokens, and lists and orders all evictable
leaves of its tree for that. Every finished turn of a memory agent leaves a leaf that nobody asks for again, so a long
evaluation or a large step fills the cache with thousands of them; the lists, and Python's garbage collector, which they
call over all that the scheduler holds, then take several times as long as decoding
(benchmarks/cache_eviction.py). The folder of this file is on the server's PYTHONPATH and holds nothing else; the
entry point beside it is how SGLang finds its plugins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

NAME = "clusterkit"
"""Of the cache, for --radix-cache-backend: a server that is not given it gets SGLang's own."""
PIECES = 32
"""A piece is this part of what can be evicted: the least recently used three percent go early, and the order of all is
found once for some hundred steps.
"""


def register() -> None:
    """Make the cache known to SGLang: the one that it would have made, in pieces where that is the plain one.

    Called in each of its processes.
    """
    from sglang.srt.mem_cache import registry  # noqa: PLC0415 (SGLang's Python alone)
    from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: PLC0415

    def make(context: Any) -> Any:
        cache = registry.default_radix_cache_factory(context)
        return evict_in_pieces(cache) if type(cache) is RadixCache else cache

    registry.register_radix_cache_backend(NAME, make)


def evict_in_pieces(cache: Any) -> Any:
    """Have a cache evict at least a piece whenever it must evict at all. Returns it."""
    evict = cache.evict

    def evict_piece(params: Any) -> Any:
        least = cache.evictable_size() // PIECES
        return evict(replace(params, num_tokens=max(params.num_tokens, least)))

    cache.evict = evict_piece
    return cache
