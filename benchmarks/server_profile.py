"""Where the GPU's time goes in an SGLang server: the kernels of its profiler's traces."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any


async def request(pool: Any, server: Any, folder: Path, steps: int, delay: float) -> None:
    """After `delay` seconds have the server trace its next `steps` passes: of decoding, if turns are written then."""
    await asyncio.sleep(delay)
    wanted = {
        "output_dir": str(folder.resolve()),
        "num_steps": steps,
        "activities": ["GPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    await pool.call(server, "POST", "/start_profile", wanted, 60)


def facts(folder: Path, steps: int, most: int = 14) -> dict[str, Any]:
    """Return milliseconds a step, the GPU's busy share of them, and the kernels that take longest; empty without trace.

    Kernels with the same name, its arguments apart, are one; `ms` is what they take in a step.
    """
    spans = []
    # Of the newest trace: a folder may have those of earlier calls.
    for path in sorted(folder.glob("*.json.gz"), key=lambda one: one.stat().st_mtime)[-1:]:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        spans += [
            (event["ts"], event["ts"] + event["dur"], event["name"])
            for event in events
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
    if not spans:
        return {}
    spans.sort()
    spent: Counter[str] = Counter()
    busy, until = 0.0, spans[0][0]
    for start, end, name in spans:
        spent[_short(name)] += end - start
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0]
    return {
        "step_ms": round(whole / steps / 1000, 3),
        "busy": round(busy / whole, 3),
        "launches": len(spans) // steps,
        "kernels": [{"ms": round(value / steps / 1000, 3), "name": name} for name, value in spent.most_common(most)],
    }


def _short(name: str) -> str:
    """A kernel's name without its arguments, and no longer than a line can show."""
    return name.replace("(anonymous namespace)::", "").removeprefix("void ").partition("(")[0][:110]
