"""Model FLOPs of training and the peak of the GPU: what MFU (model FLOPs utilisation) is made of.

    training step = 6·P_body·T + 6·P_head·T_loss + 6·L·heads·d_head·Σ len²

P_body: matrix parameters of the layers (no embedding, no norm, no bias); T: tokens computed. P_head: of the output
layer, which runs on the T_loss loss positions only. The last term is causal attention: QKᵀ and PV are 2·len²·d_head a
head each, half of it is masked; forward and backward are three times that. A layer with a sliding window W has
2·len·W - W² in place of len² for rows over W. What rows begin with alike and is computed once counts once, its
attention too: MFU is of what was computed (`mfu`), and beside it stands what whole rows would have taken in the same
time (`mfu_of_rows`). Recomputed activations do not count (that
would be HFU), nor do the optimizer and the elementwise operations. MFU = FLOPs / seconds / ranks / peak of one GPU.

With adapters (LoRA) the frozen matrices get no gradients: 4 in place of 6 for body and head, and 6·P_adapters·T on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trainer.train.families import windows
from trainer.train.lora import is_adapter

# Dense bfloat16 tensor-core FLOP/s by the data sheets, by a part of torch.cuda.get_device_name(); the first that is
# found counts.
PEAK_BF16: tuple[tuple[str, float], ...] = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989.5e12),
    ("H200", 989.5e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.5e12),
    ("H800", 989.5e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Sizes that the FLOPs of a model depend on. body, head: parameters. attention: layers · heads · head size.

    windows: how many layers have which sliding window, in tokens; None: none. adapters: parameters that are trained in
    place of all others; 0: all are.
    """

    body: int
    head: int
    attention: int
    windows: tuple[tuple[int | None, int], ...] = ((None, 1),)
    adapters: int = 0

    @classmethod
    def of(cls, lm: Any) -> ModelFlops:
        """Of a transformers causal language model, sharded or not."""
        c = lm.config
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        matrices = [(name, p.numel()) for name, p in lm.model.layers.named_parameters() if p.ndim == 2]
        adapters = sum(size for name, size in matrices if is_adapter(name))
        body = sum(size for _, size in matrices) - adapters
        counts = tuple(Counter(windows(c)).items())
        return cls(
            body, lm.lm_head.weight.numel(), c.num_hidden_layers * c.num_attention_heads * size, counts, adapters
        )

    def squares(self, spans: Iterable[tuple[int, int]]) -> float:
        """Σ end² - start² of segments whose tokens stand at the positions start … end - 1 of their rows, or what a
        sliding window leaves of it; a mean over the layers.
        """
        layers = sum(count for _, count in self.windows)
        total = 0
        for start, end in spans:
            for window, count in self.windows:
                total += count * (_square(end, window) - _square(start, window))
        return total / layers

    def forward(self, tokens: float, loss_tokens: float, squares: float) -> float:
        """FLOPs of a forward pass over rows of Σ length = `tokens`, `squares` (see there)."""
        matrices = (self.body + self.adapters) * tokens + self.head * loss_tokens
        return 2.0 * (matrices + self.attention * squares)

    def training(self, tokens: float, loss_tokens: float, squares: float) -> float:
        """FLOPs of forward and backward pass; the module's formula."""
        frozen = self.body * tokens + self.head * loss_tokens if self.adapters else 0.0
        return 3.0 * self.forward(tokens, loss_tokens, squares) - 2.0 * frozen


def _square(length: int, window: int | None) -> int:
    narrow = min(length, window or length)
    return 2 * length * narrow - narrow * narrow


@dataclass(frozen=True, slots=True)
class Work:
    """What optimizer steps took, over all ranks.

    seconds: on the clock. tokens: computed (equal rows of a micro-batch once, a shared prefix once). flops: model FLOPs
    of these. peak_bytes: most GPU memory of any rank; 0 on a CPU. row_tokens, row_flops: of the rows, each whole.
    retries: times that PyTorch's allocator had to give cached memory back to make room, each step's on the rank with
    most. repeated_tokens: computed again because a group has no room in one micro-batch. group_tokens: of a micro-batch
    that has room for the largest group.
    """

    seconds: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    peak_bytes: int = 0
    row_tokens: int = 0
    row_flops: float = 0.0
    retries: int = 0
    repeated_tokens: int = 0
    group_tokens: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.seconds + other.seconds,
            self.tokens + other.tokens,
            self.flops + other.flops,
            max(self.peak_bytes, other.peak_bytes),
            self.row_tokens + other.row_tokens,
            self.row_flops + other.row_flops,
            self.retries + other.retries,
            self.repeated_tokens + other.repeated_tokens,
            max(self.group_tokens, other.group_tokens),
        )

    def numbers(self, ranks: int, peak: float | None) -> dict[str, float]:
        """Numbers of a step's record; empty for no work.

        train_tokens_per_s: computed. train_row_tokens_per_s: of the rows that were learned from. train_shared: share of
        the rows' tokens that did not have to be computed. train_repeated (share of the computed tokens) and
        train_group_tokens, where rows begin alike: see `repeated_tokens` and `group_tokens`. mfu and mfu_of_rows: of
        what was computed and of whole rows, where the GPU's peak FLOP/s is known. gpu_memory_peak_gib,
        gpu_alloc_retries: on a GPU.
        """
        if not self.seconds or not self.tokens:
            return {}
        found = {
            "train_tokens_per_s": self.tokens / self.seconds,
            "train_row_tokens_per_s": self.row_tokens / self.seconds,
            "train_shared": 1 - self.tokens / self.row_tokens,
        }
        if self.group_tokens:
            found["train_repeated"] = self.repeated_tokens / self.tokens
            found["train_group_tokens"] = float(self.group_tokens)
        if peak is not None:
            found["mfu"] = self.flops / self.seconds / ranks / peak
            found["mfu_of_rows"] = self.row_flops / self.seconds / ranks / peak
        if self.peak_bytes:
            found["gpu_memory_peak_gib"] = self.peak_bytes / 2**30
            found["gpu_alloc_retries"] = float(self.retries)
        return found


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Most bytes allocated since the last reset_peak_memory_stats, and `Work.retries` so far; 0, 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def peak_flops(device: torch.device) -> float | None:
    """Data-sheet bfloat16 FLOP/s of a GPU; None on a CPU and for a GPU that the table lacks."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """As `peak_flops`, by the GPU's name."""
    return next((peak for part, peak in PEAK_BF16 if part in name), None)
