"""Output of all commands: results on stdout, messages on stderr, and JSON without NaN."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from typing import Any, TextIO

from clusterkit.ui.colour import for_stream
from clusterkit.ui.width import fitted

debug = False
"""Set by --debug: show tracebacks, and the output of a trainer that fails."""


def result(text: str) -> None:
    """Print a result for people."""
    exact(for_stream(text, sys.stdout))


def lines(found: Iterable[str], otherwise: int | None = None) -> None:
    """Print a result for people in lines that fit the terminal. otherwise: columns where there is none."""
    result(fitted(found, otherwise))


def exact(text: str) -> None:
    """Print a result for programs, or a file of the user's, as it is."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def result_json(value: Any) -> None:
    """Print a result for programs: one JSON document, with null for NaN and infinities; dataclasses are objects."""
    exact(json.dumps(_finite(value), indent=2, ensure_ascii=False))


def line_json(value: Any) -> None:
    """Print one observation of many as a single line of JSON."""
    exact(json.dumps(_finite(value), ensure_ascii=False))


def outcome(text: str | Callable[[], str], facts: Any, *, as_json: bool) -> None:
    """Print what came of a command: a text for people, which may have to be made first, or its facts as JSON.

    The text is folded where the terminal is too narrow for it.
    """
    if as_json:
        result_json(facts)
    else:
        lines([text if isinstance(text, str) else text()])


def note(text: str) -> None:
    """Print progress or advice on stderr."""
    _write(sys.stderr, text)


def advice(found: Iterable[str]) -> None:
    """Print what to type next on stderr, in lines that fit the terminal."""
    note(fitted(found))


def notes(lines: Iterable[str]) -> None:
    """Print notes on how the command was understood."""
    for line in lines:
        note(f"note: {line}")


def error(text: str) -> None:
    """Print the message of a failure."""
    _write(sys.stderr, text if text.startswith("error: ") else f"error: {text}")


def tolerate_any_encoding() -> None:
    """Replace characters that the terminal's encoding lacks (bars, sparklines) by ASCII, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="clusterkit-ascii")


def silence_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's last flush does not fail on a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(stream: TextIO, text: str) -> None:
    # The terminal may be gone (SIGHUP); that must not end the command.
    try:
        stream.write(for_stream(text.rstrip("\n"), stream) + "\n")
        stream.flush()
    except OSError:
        return


def _finite(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
