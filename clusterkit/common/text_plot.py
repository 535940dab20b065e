"""Numbers as short text: sparklines, durations, sizes, shares, tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw values as one line, averaged to at most `width` characters; equal values are in the middle."""
    finite = [value for value in values if value - value == 0]
    if not finite:
        return ""
    count = min(width, len(finite))
    bins = [finite[len(finite) * i // count : len(finite) * (i + 1) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in bins]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * count
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def iso_time(seconds: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def duration(seconds: float | None) -> str:
    """Return `8.2 s`, `3 min 20 s`, `2 h 05 min`, `1 d 3 h`, or `unknown`."""
    if seconds is None:
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60:02d} s" if whole % 60 else "")
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def count(value: float | None) -> str:
    """Return `950`, `12.3 k`, `4.56 M`, or `unknown`."""
    if value is None:
        return "unknown"
    for limit, factor, unit in ((1e3, 1, ""), (1e6, 1e3, " k"), (1e9, 1e6, " M")):
        if value < limit:
            return f"{value / factor:.3g}{unit}" if unit else f"{value:.0f}"
    return f"{value / 1e9:.3g} G"


def gpus(number: int) -> str:
    """Return `1 GPU`, `8 GPUs`."""
    return f"{number} GPU{'s' * (number != 1)}"


def size(num_bytes: float | None) -> str:
    """Return `12 MB`, or `unknown size`."""
    return "unknown size" if num_bytes is None else f"{count(num_bytes)}B" if num_bytes >= 1e3 else f"{num_bytes:.0f} B"


def progress_bar(done: float, total: float, width: int = 10) -> str:
    """Return `█████░░░░░ 0.45 of 0.90 GB` for numbers of bytes; without a bar if the total is unknown (0)."""
    if total <= 0:
        return f"{done / 1e9:.2f} GB"
    filled = min(int(done / total * width), width)
    return f"{'█' * filled}{'░' * (width - filled)} {done / 1e9:.2f} of {total / 1e9:.2f} GB"


def shares(parts: dict[str, float]) -> str:
    """Return `rollout 61 %, train 30 %`, the largest share first, without those that round to 0 %."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value / total:.0%}" for name, value in ordered if value / total >= 0.005)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines, its columns aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
