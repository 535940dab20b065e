"""Count the bytes that move through a pipe on a host, and report them while they move."""

from __future__ import annotations

import re
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Gets host, bytes done and bytes in all (0: unknown)."""

_LINE = re.compile(r"^@moved (\d+)$")

PRELUDE = r"""
work=$(mktemp -d)
: >"$work/moved"
( while sleep 0.5; do
    tr '\r' '\n' <"$work/moved" | awk '/^[0-9]+ bytes/ { moved = $1 } END { if (moved) print "@moved " moved }'
  done ) &
ticker=$!
trap 'kill "$ticker" 2>/dev/null || :; rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
moved() {
  LC_ALL=C dd bs=1M iflag=fullblock status=progress 2>"$work/moved" || { grep '^dd:' "$work/moved" >&2; false; }
}
"""
"""Start of a script that counts the bytes of the part `moved` of its pipes. Only the count may fail unseen."""


def counter(host: str, total: int, progress: Progress | None) -> Callable[[str], None] | None:
    """Return the `on_output` of a session that reports the bytes moved to `progress`."""
    if progress is None:
        return None
    progress(host, 0, total)

    def line(text: str) -> None:
        if found := _LINE.match(text):
            progress(host, int(found[1]), total)

    return line


def readable(output: str) -> str:
    """Return what a script printed, without the byte counts."""
    return "\n".join(line for line in output.splitlines() if line.strip() and not _LINE.match(line))[-1000:]
