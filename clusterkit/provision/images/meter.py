"""Bytes on their way through a pipe on a host, told line by line while they move."""

from __future__ import annotations

import re
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Gets host, bytes done and bytes in all (0: not known)."""

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
"""Start of a script whose pipes have a part `moved`, which is counted. Only the telling may fail unseen."""


def counter(host: str, total: int, progress: Progress | None) -> Callable[[str], None] | None:
    """What a session is to be given as `on_output`, so that progress is told the bytes moved."""
    if progress is None:
        return None
    progress(host, 0, total)

    def line(text: str) -> None:
        if found := _LINE.match(text):
            progress(host, int(found[1]), total)

    return line


def readable(output: str) -> str:
    """What a script said, without the counting."""
    return "\n".join(line for line in output.splitlines() if line.strip() and not _LINE.match(line))[-1000:]
