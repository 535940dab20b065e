"""One long row in a step: peak memory and tokens/s by what is kept of its activations (model.gradient_checkpointing).

    python3 benchmarks/long_rows.py [--rows 28672 65536] [--kinds full chunked offloaded] [--lora 32] [--json FILE]
    python3 benchmarks/long_rows.py --lora 0 --layers 4
    python3 benchmarks/long_rows.py --device cpu --shape tiny --rows 8500 --lora 4 --seconds 1

The row is a response but for its first 1024 tokens, as in mathematics. One GPU of 80 GB has room for all of a 7B model
with adapters of rank 32, or for all weights of four of its layers, embedding and output layer. Steps are those of
benchmarks/training.py, which this builds on: random weights in bfloat16, compiled layers. The last table has for each
length and kind the peak of the GPU's memory, the step's seconds, and what both are to the first kind's. A length that
does not fit is told as such.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import training
from shapes import SHAPES

from trainer.train.flops import peak_flops

PROMPT = 1024
KINDS = ("full", "chunked", "offloaded")


def line(result: dict[str, Any], first: dict[str, Any] | None) -> str:
    """A line of the table."""
    row, kind = result["row"], result["kind"]
    if "error" in result:
        return f"| {row:,} | {kind} | does not fit or failed: {result['error'][:160]} | | |"
    against = ""
    if first is not None and first is not result:
        saved, slower = first["peak_gib"] - result["peak_gib"], result["step_s"] / first["step_s"]
        against = f"{saved:.1f} GiB less, {slower:.2f} times the time"
    return f"| {row:,} | {kind} | {result['peak_gib']} GiB | {result['step_s']} s | {against} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: as many as it has")
    parser.add_argument("--lora", type=int, default=32, help="rank of the adapters; 0: all weights are trained")
    parser.add_argument("--rows", nargs="+", type=int, default=[28672], help="tokens of the row")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--logprob-chunk", type=int, default=1024, help="loss positions whose logits exist at a time")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured time of each; three steps at least")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    a = parser.parse_args()
    name = torch.cuda.get_device_name() if a.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {a.shape}, adapters of rank {a.lora}", flush=True)
    sheet = peak_flops(torch.device(a.device))
    peaks = {f"the data sheet's {sheet / 1e12:.5g} TFLOP/s (MFU)": sheet} if sheet else {}
    results: list[dict[str, Any]] = []
    way = "compiled" if a.device == "cuda" else "eager"
    for row in a.rows:
        for kind in a.kinds:
            case = training.Case(
                a.shape, f"{way}, {kind}", row, row, 1, a.seconds, a.device, response=max(1, row - PROMPT),
                layers=a.layers, lora=a.lora, logprob_chunk=a.logprob_chunk,
            )  # fmt: skip
            result = training.run_case(case) | {"kind": kind, "row": row}
            if "error" in result:
                print(f"{row}, {kind}: {result['error']}", flush=True)
            else:
                training.show(result, peaks)
            results.append(result)
            if a.json:
                a.json.write_text(json.dumps({"device": name, "results": results}, indent=1))
    print("\n| row | kept | peak memory | a step | beside the first |\n|---|---|---|---|---|")
    for result in results:
        same = [other for other in results if other["row"] == result["row"] and "error" not in other]
        print(line(result, same[0] if same else None))
    return 0 if any("error" not in result for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
