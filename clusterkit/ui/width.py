"""Lines that fit the terminal, and characters that its encoding has."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Iterable
from textwrap import wrap

_LABEL = r"[A-Za-z][A-Za-z ]{0,16}: |[A-Za-z][A-Za-z' ]{0,30} {2,}"
_COMMAND = re.compile(rf" *(?:{_LABEL})?(?:clusterkit|tensorboard) [a-z-]")
"""A line that is a command, or a label and one: cut off after a backslash, it can still be copied."""

_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\ """)
"""A part of a command that a line break would change."""
_KEPT_BLANK = "\0"

_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.-~=+*#", strict=True)),
    **dict(zip("░·•━╸╺✓✗≈", ".-*=--+x~", strict=True)),
    **{"→": "->", "←": "<-", "…": "...", "≤": "<=", "≥": ">=", "\u2013": "-", "\u2014": "-", "\u00d7": "x"},
}


def terminal_width(otherwise: int | None = None) -> int | None:
    """The columns that stdout has: $COLUMNS, else those of its terminal, else what is given.

    otherwise: None where lines are for scripts, too: then $COLUMNS counts on a terminal only. Programs that use
    readline leave it to their children.
    """
    if otherwise is None and not sys.stdout.isatty():
        return None
    if (typed := os.environ.get("COLUMNS", "")).isdigit() and int(typed):
        return int(typed)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or otherwise
    except (OSError, ValueError, AttributeError):
        return otherwise


def fitted(lines: Iterable[str], otherwise: int | None = None) -> str:
    """Return lines as a text that fits the terminal.

    What is cut off goes on under the column that it began in, and a command after a backslash.

    Args:
        lines: one may have line breaks.
        otherwise: columns where there is no terminal; None leaves the lines as they are there.
    """
    text = "\n".join(lines)
    width = terminal_width(otherwise)
    return text if width is None else "\n".join(part for line in text.split("\n") for part in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    command = _COMMAND.match(line)
    if command:
        line = _QUOTED.sub(lambda quoted: quoted[0].replace(" ", _KEPT_BLANK), line)
    gaps = [gap.end() for gap in re.finditer(r"(?<=\S) {2,}", line) if gap.end() <= width // 2]
    indent = len(line) - len(line.lstrip(" "))
    hanging = gaps[-1] if gaps else indent + 2
    room = width - 2 if command else width
    # `wrap` would fold blanks between columns: the head keeps them, and only what follows it is wrapped.
    head = line[: gaps[-1]] if gaps else line[:indent]
    words = wrap(
        line[len(head) :],
        room,
        initial_indent=" " * len(head),
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    parts = [head + words[0][len(head) :], *words[1:]]
    if not command:
        return parts
    parts = [part.replace(_KEPT_BLANK, " ") for part in parts]
    return [f"{part} \\" for part in parts[:-1]] + parts[-1:]


def replace_by_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handle characters that an encoding lacks (bars, arrows): what looks like them in ASCII, else a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error("clusterkit-ascii", replace_by_ascii)
