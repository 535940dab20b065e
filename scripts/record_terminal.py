"""Record a command in a terminal as an animated picture (SVG) for the README.

    python scripts/record_terminal.py docs/pictures/demo.svg --title "make demo" -- clusterkit train --preset tiny

The command runs in a terminal of its own (`pyte` says what the terminal would show). Long waits are shortened, and the
whole is played in `--seconds`. A reader whose system asks for less motion sees the last screen alone.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import pyte

COLOURS = {
    "default": "#d0d7de",
    "black": "#6e7681",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#f0f6fc",
}
WIDE, HIGH, MARGIN, BAR = 7.83, 18, 14, 34
"""Pixels: a character of 13 px, a line, the border, the bar with the title."""
MERGED, LONGEST_WAIT, LAST = 0.15, 1.5, 4.0
"""Seconds: changes closer together are one frame; a longer wait is cut to this; the last screen stays."""
FRAMES = 90


@dataclass(frozen=True)
class Frame:
    """What the screen showed from a moment on: its lines, each of pieces of one colour."""

    seconds: float
    lines: tuple[tuple[tuple[str, str, bool], ...], ...]


def frames(command: list[str], columns: int, rows: int, until: float) -> Iterator[Frame]:
    """Run a command and tell what its terminal shows; it is interrupted (Ctrl-C) after `until` seconds."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(rows))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    start, told = time.monotonic(), 0.0
    interrupted = False
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.1)
        now = time.monotonic() - start
        if now > until and not interrupted:
            os.kill(process, signal.SIGINT)
            interrupted = True
        if ready:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # the command has ended
                break
            if not data:
                break
            stream.feed(data)
        if screen.dirty and now - told >= MERGED:
            told = now
            screen.dirty.clear()
            yield Frame(now, _lines(screen))
    yield Frame(time.monotonic() - start, _lines(screen))
    os.waitpid(process, 0)


def _lines(screen: pyte.Screen) -> tuple[tuple[tuple[str, str, bool], ...], ...]:
    lines = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        pieces = [
            ("".join(cell.data for cell in run), colour, bold)
            for (colour, bold), run in groupby(cells, key=lambda cell: (cell.fg, cell.bold))
        ]
        while pieces and not pieces[-1][0].strip():
            pieces.pop()
        lines.append(tuple(pieces))
    return tuple(lines)


def shortened(shown: list[Frame], seconds: float) -> list[Frame]:
    """The same screens in less time: no long wait, at most FRAMES of them, all together in `seconds`."""
    different = [frame for index, frame in enumerate(shown) if index == 0 or frame.lines != shown[index - 1].lines]
    every = -(-len(different) // FRAMES)
    different = [*different[:-1][::every], different[-1]]
    clock, at = 0.0, [0.0]
    for before, after in pairwise(different):
        clock += min(after.seconds - before.seconds, LONGEST_WAIT)
        at.append(clock)
    scale = min(1.0, (seconds - LAST) / clock) if clock else 1.0
    return [Frame(moment * scale, frame.lines) for moment, frame in zip(at, different, strict=True)]


def picture(shown: list[Frame], title: str, columns: int, rows: int) -> str:
    """The frames as an SVG file: a strip of screens, of which a window shows one at a time."""
    wide, high = columns * WIDE + 2 * MARGIN, rows * HIGH + 2 * MARGIN
    total = shown[-1].seconds + LAST
    steps = "".join(
        f"{100 * frame.seconds / total:.3f}% {{ transform: translateY({-index * high:.0f}px) }}\n"
        for index, frame in enumerate(shown)
    )
    last = -(len(shown) - 1) * high
    screens = "\n".join(
        f'<g transform="translate({MARGIN} {index * high + MARGIN + HIGH - 5:.0f})">{_screen(frame)}</g>'
        for index, frame in enumerate(shown)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high + BAR:.0f}" role="img">
<title>{escape(title)}</title>
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }}
.strip {{ animation: play {total:.2f}s step-end infinite }}
@keyframes play {{
{steps}}}
@media (prefers-reduced-motion: reduce) {{ .strip {{ animation: none; transform: translateY({last:.0f}px) }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<circle cx="20" cy="17" r="6" fill="#ff5f56"/>
<circle cx="40" cy="17" r="6" fill="#ffbd2e"/>
<circle cx="60" cy="17" r="6" fill="#27c93f"/>
<text x="{wide / 2:.0f}" y="22" text-anchor="middle" fill="#8b949e">{escape(title)}</text>
<svg y="{BAR}" width="{wide:.0f}" height="{high:.0f}"><g class="strip">
{screens}
</g></svg>
</svg>
"""


def _screen(frame: Frame) -> str:
    return "".join(
        f'<text y="{row * HIGH}" xml:space="preserve">{"".join(map(_piece, line))}</text>'
        for row, line in enumerate(frame.lines)
        if line
    )


def _piece(piece: tuple[str, str, bool]) -> str:
    text, colour, bold = piece
    fill = COLOURS.get(colour.removeprefix("bright"), f"#{colour}" if len(colour) == 6 else COLOURS["default"])
    weight = ' font-weight="bold"' if bold else ""
    return f'<tspan fill="{fill}"{weight}>{escape(text)}</tspan>'


def main() -> None:
    """Record the command that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the file to write")
    parser.add_argument("--title", default="", help="the bar's text; by default the command")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--lines", type=int, default=26)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the picture plays")
    parser.add_argument("--until", type=float, default=3600.0, help="interrupt the command after so many seconds")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    shown = list(frames(given.command, given.columns, given.lines, given.until))
    text = picture(shortened(shown, given.seconds), given.title or " ".join(given.command), given.columns, given.lines)
    given.picture.write_text(text)
    print(f"{given.picture}: {len(text) / 1e3:.0f} KB, {len(shown)} screens", file=sys.stderr)


if __name__ == "__main__":
    main()
