"""Attention over packed rows: many conversations in one row of tokens, none sees another.

The linear layers of a transformer run on the packed row, where no token is padding. Attention alone needs to know the
rows. On CUDA in 16-bit dtypes a flash kernel takes them as they lie (trainer/train/varlen.py). Elsewhere it is computed
on small padded blocks: rows of similar length are gathered into one [rows, length] block, causal SDPA runs on it, and
the result goes back to its place. The cost is Σ rows·length² instead of (Σ length)² for one block-diagonal mask.

A row whose first tokens several rows share is laid down without them and sees the prefix, which is computed once. Both
ways attend over keys and values [prefix; own], laid out for each row, in one softmax: outputs of two parts must not be
merged by their log-sum-exp, whose gradient PyTorch's kernels leave out.

A layer with a sliding window of W sees, from position i, the keys i - W + 1 … i, as in transformers. Capped scores
(Gemma 2) are computed by the blocks on every device: no flash kernel that we use knows them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.errors import UserError
from trainer.train import varlen
from trainer.train.layout import PackedLayout, causal_band

IMPLEMENTATION = "clusterkit_packed"

# Capped scores exist for so many queries at a time.
CAPPED_QUERIES = 512
# What transformers passes on and what changes no result here: positions are in the rotated queries and keys already.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "is_causal"})


def packed_attention(  # the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_layout: PackedLayout | None = None,
    row_ends: Tensor | None = None,
    longest_row: int = 0,
    key_index: Tensor | None = None,
    key_ends: Tensor | None = None,
    longest_keys: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers attention function. query: [batch, heads, queries, d]; key, value: [batch, kv_heads, keys, d].

    With `packed_layout`, or `row_ends` and what follows it for the flash kernel, the batch is one packed row; without,
    `attention_mask` ([batch, 1, queries, keys], True where a key may be seen) is applied, and the queries are the last
    of the keys' positions. Returns [batch, queries, heads, d] and no weights.

    Args:
        sliding_window: keys that a query sees, itself among them; None: all of its past.
        softcap: scores become softcap·tanh(score / softcap); None: they stay as they are.

    Raises:
        UserError: transformers asks for something that is not computed here.
    """
    _refuse_unknown(module, others)
    if dropout:
        raise ValueError("attention dropout is not supported: it would make the trained policy differ from the sampled")
    if row_ends is not None:
        if softcap is not None:
            raise ValueError("the flash kernel does not cap scores")
        queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, d]
        seen = None
        if key_index is not None and key_ends is not None:
            seen = varlen.Keys(key_index, key_ends, longest_keys)
        return varlen.attend(queries, keys, values, row_ends, longest_row, scaling, sliding_window, seen)[None], None
    if packed_layout is not None:
        return _blocks(query, key, value, packed_layout, scaling, sliding_window, softcap), None
    if attention_mask is None:
        raise ValueError("attention needs packed rows or a mask: else tokens would see what comes after them")
    if sliding_window is not None and key.shape[2] > sliding_window:
        attention_mask = attention_mask & causal_band(query.shape[2], key.shape[2], sliding_window, query.device)
    return _attend(query, key, value, attention_mask, scaling, softcap).transpose(1, 2), None


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    """Raise UserError for a keyword that may change the result and is not known here; none is passed over."""
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UserError(f"{type(module).__name__} sees what comes after a token: train a causal language model")
    unknown = [n for n, value in others.items() if n not in HARMLESS and value is not None and value is not False]
    if unknown:
        raise UserError(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which is not computed here: log-probs "
            "would be wrong. Use another model, or the release of transformers that the images have"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator] # every batch has other blocks: compiled code would be made anew for each
def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention block by block. [1, heads, tokens, d] -> [1, tokens, heads, d]."""
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, d]
    pieces, places = [], []
    for block in layout.blocks:
        q, k, v = (x[block.index].transpose(1, 2) for x in (queries, keys, values))
        length = block.index.shape[1]
        narrow = window if window is not None and window < length else None
        mask = layout.band(length, narrow) if narrow is not None or softcap is not None else None
        out = _attend(q, k, v, mask, scaling, softcap)
        pieces.append(out.transpose(1, 2)[block.valid])
        places.append(block.index[block.valid])
    for number, shared in enumerate(layout.shared_blocks):
        q, k, v = (x[shared.index].flatten(0, 1).transpose(1, 2) for x in (queries, keys, values))
        before = (x[shared.prefix].transpose(1, 2) for x in (keys, values))
        times = shared.index.shape[1]
        # Expanded, so that the backward pass adds up the rows' gradients of the prefix in one order.
        both = (x[:, None].expand(-1, times, -1, -1, -1).flatten(0, 1) for x in before)
        k, v = (torch.cat([prefix, own], 2) for prefix, own in zip(both, (k, v), strict=True))
        mask = layout.shared_mask(number, window, torch.bool if softcap is not None else _computed_in(q))
        out = _attend(q, k, v, mask, scaling, softcap)
        out = out.transpose(1, 2).unflatten(0, (-1, times))
        pieces.append(out[shared.valid])
        places.append(shared.index[shared.valid])
    # Every position occurs exactly once, so the inverse permutation puts the pieces back without a scatter.
    restore = torch.argsort(torch.cat(places))
    return torch.cat(pieces)[restore][None]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Attention under a mask, causal without one; in float64 where the model computes in float32 on a CPU.

    The CPU kernel's fast exponential is good to about 20 bits, which sharp attention turns into differences of 1e-4
    between sampled and trained log-probs; in float64 they stay near 2e-6. Attention is a small part of the time.
    """
    precise = _computed_in(query) != query.dtype
    if precise:
        query, key, value = query.double(), key.double(), value.double()
    if softcap is not None:
        assert mask is not None
        out = _capped(query, key, value, mask, scaling, softcap)
    else:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    return out.float() if precise else out


def _computed_in(query: Tensor) -> torch.dtype:
    """Return float64 where `_attend` computes in it, else the query's dtype."""
    return torch.float64 if query.dtype == torch.float32 and query.device.type == "cpu" else query.dtype


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float) -> Tensor:
    """Attention with capped scores (Gemma 2, arXiv 2408.00118, 2.2), some queries at a time, made again in the backward
    pass. mask: [..., queries, keys] bool. [batch, heads, queries, d] -> the same.
    """
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def part(queries: Tensor, seen: Tensor) -> Tensor:
        scores = softcap * torch.tanh(queries @ key.transpose(2, 3) * (scale / softcap))
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=wide)
        return weights.to(value.dtype) @ value

    pieces = []
    for start in range(0, query.shape[2], CAPPED_QUERIES):
        some = slice(start, start + CAPPED_QUERIES)
        queries, seen = query[:, :, some], mask[..., some, :]
        pieces.append(
            checkpoint(part, queries, seen, use_reentrant=False) if torch.is_grad_enabled() else part(queries, seen)
        )
    return torch.cat(pieces, 2)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
