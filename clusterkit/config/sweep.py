"""`train --sweep KEY=V1,V2`: the combinations of settings, and a trial name for each."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterkit.config.aliases import translate
from clusterkit.config.overrides import known_field, parse_overrides, parse_value
from trainer.errors import UserError

NAMES = ("trial_name", "experiment_name", "fileroot", "preset")
"""Settings that say which run it is: the trials' own names tell their values."""
LONGEST_NAME = 120
"""Characters of a trial's name; folders may have 255."""
_OPENING, _CLOSING = "[{", "]}"


@dataclass(frozen=True)
class Combination:
    """One trial of a sweep."""

    words: tuple[str, ...]  # KEY=VALUE, as typed
    trial: str  # its name, which tells the values


@dataclass(frozen=True)
class _Swept:
    """A value of one swept setting: as typed, the setting's own key, and the value in plain text."""

    word: str
    key: str
    text: str


def combinations(sweeps: Sequence[str], settings: Sequence[str]) -> list[Combination]:
    """Return all combinations of the swept values; the last setting varies fastest.

    Args:
        sweeps: KEY=V1,V2 words; a value that is a list stands in brackets.
        settings: the command's other KEY=VALUE words. Its trial_name begins the trials' names.

    Raises:
        UserError: a word is none, a setting is given twice, or two values are the same.
    """
    swept = [_values(word) for word in sweeps]
    fixed = parse_overrides(settings)
    keys = [values[0].key for values in swept]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--sweep {key} is given twice: name all its values in one, as --sweep {key}=V1,V2")
        if key in fixed:
            raise UserError(f"{key} is swept and also set to {fixed[key]}: leave one of them out")
    short = {key: key.rpartition(".")[2] for key in keys}
    names = {key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()}
    prefix = f"{fixed['trial_name']}_" if "trial_name" in fixed else ""
    found = []
    for chosen in itertools.product(*swept):
        name = prefix + "_".join(f"{names[one.key]}-{_plain(one.text)}" for one in chosen)
        found.append(Combination(tuple(one.word for one in chosen), name))
    return _distinct(found)


def split_values(text: str) -> list[str]:
    """Split at the commas that are in no brackets, braces or quotes."""
    values, depth, quote, start = [], 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'" and not text[start:place].strip():
            quote = sign
        elif sign in _OPENING:
            depth += 1
        elif sign in _CLOSING:
            depth -= 1
        elif sign == "," and depth <= 0:
            values.append(text[start:place])
            start = place + 1
    return [*values, text[start:]]


def _values(word: str) -> list[_Swept]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise UserError(f"--sweep {word}: write KEY=V1,V2, such as --sweep train.learning_rate=1e-5,2e-5")
    values: list[_Swept] = []
    for value in split_values(text):
        if not value.strip():
            raise UserError(f"--sweep {word}: a value is missing; write KEY=V1,V2")
        one = _swept(key, value.strip())
        if same := next((other for other in values if other.text == one.text), None):
            raise UserError(f"--sweep {word}: {same.word} and {one.word} are the same value")
        values.append(one)
    return values


def _swept(key: str, value: str) -> _Swept:
    settings = {key: value} if key in NAMES else translate(key, value).settings
    if any(ours in NAMES for ours in settings):
        raise UserError(f"--sweep {key}: every trial gets a name of its own that tells its values; sweep a setting")
    if len(settings) != 1:  # a key of another tool for several of ours: they are told as it was typed
        parse_overrides([f"{key}={value}"])
        return _Swept(f"{key}={value}", key, value)
    ((ours, part),) = settings.items()
    return _Swept(f"{key}={value}", ours, _text(parse_value(known_field(ours), part)))


def _text(value: Any) -> str:
    """A value as text that is the same however it was typed: 1e-5 and 0.00001."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:.12g}"
    return "-".join(map(_text, value)) if isinstance(value, list) else str(value)


def _plain(text: str) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-.") or "empty"


def _distinct(found: list[Combination]) -> list[Combination]:
    """Give names that are too long, or the same for different values, a few letters that tell them apart."""
    names = [one.trial for one in found]

    def named(one: Combination) -> Combination:
        if names.count(one.trial) == 1 and len(one.trial) <= LONGEST_NAME:
            return one
        digest = hashlib.sha256("\0".join(one.words).encode()).hexdigest()[:8]
        return Combination(one.words, f"{one.trial[:LONGEST_NAME]}-{digest}")

    return [named(one) for one in found]
