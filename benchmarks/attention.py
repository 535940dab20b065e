"""Time of one layer's attention over rows that share a prefix, by kernel, and over the same rows whole.

    python3 benchmarks/attention.py [--groups 4 --rows 8 --prefix 1700 --own 530 --heads 12 --kv-heads 2]
    python3 benchmarks/attention.py --groups 1 --rows 16 --prefix 5150 --own 2070 --heads 28 --kv-heads 4

The first is a micro-batch of 1.5B's shape on the documented workload, the second a turn of MemAgent's set-up at the
width of 7B. Printed, a JSON object a line for PyTorch's kernel and for FlashAttention 4's where it is installed
(Hopper): milliseconds of each pass, what share of the data sheet's peak its FLOPs reached, and FlashAttention 4's time
over the other's. `lay_out` copies the keys and values that each row attends to. PyTorch's kernel gets as many heads
of them as there are of queries: `repeat` comes on top of its forward pass, and adding up their gradients on top of its
backward pass. `used_forward` is the forward pass that training takes before FlashAttention 4's backward pass:
PyTorch's, with `grouped` heads where that is right. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from trainer.train import flash4, varlen
from trainer.train.flops import peak_flops
from trainer.train.layout import PackedLayout

REPEATS = 20
HEAD = 128


def milliseconds(run: Callable[[], Any]) -> float:
    """Mean over `REPEATS` calls, queued one behind another so that the GPU never waits, after three not counted."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(REPEATS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS


def measure(a: argparse.Namespace, shared: bool, device: torch.device) -> Iterator[dict[str, Any]]:
    """Times of the passes of every kernel that is there. shared: prefixes are computed once."""
    if shared:
        lengths = [length for _ in range(a.groups) for length in (a.prefix, *[a.own] * a.rows)]
        before = [p for g in range(a.groups) for p in (-1, *[g * (a.rows + 1)] * a.rows)]
    else:
        lengths, before = [a.prefix + a.own] * (a.groups * a.rows), [-1] * (a.groups * a.rows)
    layout, times = PackedLayout.of(lengths, device, before), a.heads // a.kv_heads
    keys, kernel = layout.keys, varlen.flash()
    assert keys is not None
    assert kernel is not None
    flops = 2 * sum(end * end - start * start for start, end in layout.spans) * a.heads * HEAD
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (
        torch.randn((layout.num_tokens, heads, HEAD), generator=generator, device=device, dtype=torch.bfloat16)
        for heads in (a.heads, a.kv_heads, a.kv_heads, a.heads)
    )
    places = (layout.ends, layout.longest, keys.ends, keys.longest, HEAD**-0.5, None)

    def lay_out() -> list[Tensor]:
        return [varlen._laid_out(t, keys.index) for t in (key, value)]

    def repeat() -> list[Tensor]:
        return [t.repeat_interleave(times, 1) for t in grouped]

    def forward(run: varlen.Kernel, seen: list[Tensor]) -> float:
        with torch.no_grad():
            return milliseconds(lambda: run(query, *seen, *places))

    def backward(run: varlen.Kernel, seen: list[Tensor]) -> float:
        inputs = [t.clone().requires_grad_() for t in (query, *seen)]
        out = run(inputs[0], inputs[1], inputs[2], *places)
        return milliseconds(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))

    def told(name: str, ahead: float, back: float) -> dict[str, Any]:
        found = {"rows": "shared" if shared else "whole", "tokens": layout.num_tokens, "kernel": name}
        found |= {"forward_ms": ahead, "backward_ms": back}
        if peak := peak_flops(device):
            found["forward_of_peak"] = flops / (ahead * 1e-3 * peak)
            found["backward_of_peak"] = 2.5 * flops / (back * 1e-3 * peak)
        return found

    grouped = lay_out() if shared else [key, value]
    seen = repeat()
    first = told(kernel.name, forward(kernel.run, seen), backward(kernel.run, seen))
    yield {**first, "lay_out_ms": milliseconds(lay_out), "repeat_ms": milliseconds(repeat)}
    if not flash4.available():
        return
    rows = {"cu_seqlens_q": layout.ends, "cu_seqlens_k": keys.ends, "max_seqlen_q": layout.longest}
    rows |= {"max_seqlen_k": keys.longest, "softmax_scale": HEAD**-0.5, "causal": True, "return_lse": True}
    run = flash4._package()._flash_attn_fwd
    second = told("flash4", milliseconds(lambda: run(query, *grouped, **rows)), backward(flash4.run, grouped))
    over = {f"{way}_over_{kernel.name}": second[f"{way}_ms"] / first[f"{way}_ms"] for way in ("forward", "backward")}
    yield {
        **second,
        **over,
        "used_forward_ms": forward(flash4.run, grouped),
        "grouped": flash4.takes_groups(device, times),
    }


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
        for found in measure(given, shared, device):
            shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
            print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
