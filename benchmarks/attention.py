"""Time of one layer's attention over rows that share a prefix, by kernel, and over the same rows whole.

    python3 benchmarks/attention.py [--groups 4 --rows 8 --prefix 1700 --own 530 --heads 12 --kv-heads 2]
    python3 benchmarks/attention.py --groups 1 --rows 16 --prefix 5150 --own 2070 --heads 28 --kv-heads 4

The first is a micro-batch of 1.5B's shape on the documented workload, the second a turn of MemAgent's set-up at the
width of 7B. `torch` is PyTorch's kernel, `flash4` FlashAttention 4's where it is installed (Hopper). Printed, a JSON
object a line: milliseconds of each pass, what share of the data sheet's peak its FLOPs reached, and PyTorch's time over
FlashAttention 4's. `lay_out` copies the keys and values that each row attends to, `repeat` repeats them for PyTorch's
kernel, as many as there are query heads; `torch_grouped_forward` needs no repeating, and is taken where `same_bits` is
true. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.train import flash4, varlen
from trainer.train.flops import peak_flops
from trainer.train.layout import PackedLayout

REPEATS = 20
HEAD = 128


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median over `REPEATS` calls after three that are not counted, by the GPU's own clock."""
    found = []
    for number in range(3 + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        if number >= 3:
            found.append(begin.elapsed_time(end))
    return statistics.median(found)


def measure(a: argparse.Namespace, shared: bool, device: torch.device) -> dict[str, Any]:
    """Times of both passes, of every kernel that is there. shared: prefixes are computed once."""
    if shared:
        lengths = [length for _ in range(a.groups) for length in (a.prefix, *[a.own] * a.rows)]
        before = [p for g in range(a.groups) for p in (-1, *[g * (a.rows + 1)] * a.rows)]
    else:
        lengths, before = [a.prefix + a.own] * (a.groups * a.rows), [-1] * (a.groups * a.rows)
    layout = PackedLayout.of(lengths, device, before)
    keys = layout.keys
    assert keys is not None
    pairs = sum(end * end - start * start for start, end in layout.spans) / 2
    forward_flops = 4 * pairs * a.heads * HEAD
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn((layout.num_tokens, heads, HEAD), generator=generator, device=device, dtype=torch.bfloat16)
        for heads in (a.heads, a.kv_heads, a.kv_heads)
    )
    places = (layout.ends, layout.longest, keys.ends, keys.longest, HEAD**-0.5, None)
    laid_out = [varlen._laid_out(t, keys.index) for t in (key, value)] if shared else [key, value]
    times = a.heads // a.kv_heads

    def repeated() -> list[Tensor]:
        return [t.repeat_interleave(times, 1) for t in laid_out]

    kernel = varlen.flash()
    assert kernel is not None
    found: dict[str, Any] = {"rows": "shared" if shared else "whole", "tokens": layout.num_tokens}
    found["lay_out_ms"] = milliseconds(lambda: [varlen._laid_out(t, keys.index) for t in (key, value)], device)
    found["repeat_ms"] = milliseconds(repeated, device)
    grad = torch.randn(query.shape, generator=generator, device=device, dtype=torch.bfloat16)

    def forward(run: varlen.Kernel, seen: list[Tensor]) -> float:
        with torch.no_grad():
            return milliseconds(lambda: run(query, *seen, *places), device)

    def backward(run: varlen.Kernel, seen: list[Tensor]) -> float:
        inputs = [t.clone().requires_grad_() for t in (query, *seen)]
        out = run(inputs[0], inputs[1], inputs[2], *places)
        return milliseconds(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), device)

    found["torch_forward_ms"], found["torch_backward_ms"] = (
        forward(kernel.run, repeated()),
        backward(kernel.run, repeated()),
    )
    if flash4.available():
        found["same_bits"] = flash4._takes_groups(device)
        if found["same_bits"]:
            found["torch_grouped_forward_ms"] = forward(flash4.run, laid_out)
        rows = {"cu_seqlens_q": layout.ends, "cu_seqlens_k": keys.ends, "max_seqlen_q": layout.longest}
        rows |= {"max_seqlen_k": keys.longest, "softmax_scale": HEAD**-0.5, "causal": True, "return_lse": True}
        fourth = flash4._package()._flash_attn_fwd
        found["flash4_forward_ms"] = milliseconds(lambda: fourth(query, *laid_out, **rows), device)
        found["flash4_backward_ms"] = backward(flash4.run, laid_out)
        for way in ("forward", "backward"):
            found[f"torch_over_flash4_{way}"] = found[f"torch_{way}_ms"] / found[f"flash4_{way}_ms"]
    peak = peak_flops(device)
    for name, way, factor in ((n, w, f) for n in ("torch", "flash4") for w, f in (("forward", 1.0), ("backward", 2.5))):
        if peak is not None and f"{name}_{way}_ms" in found:
            found[f"{name}_{way}_of_peak"] = factor * forward_flops / (found[f"{name}_{way}_ms"] * 1e-3 * peak)
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"groups": 4, "rows": 8, "prefix": 1700, "own": 530, "heads": 12, "kv-heads": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times a GPU's kernels, and there is no GPU here")
    if varlen.flash() is None:
        parser.error("no flash kernel here: PyTorch 2.10 or later, or flash-attn, and a GPU of compute capability 8.0")
    device = torch.device("cuda")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **vars(given)}))
    for shared in (True, False):
        print(json.dumps(measure(given, shared, device)), flush=True)


if __name__ == "__main__":
    main()
