"""The nearest valid names to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def nearest_keys(wrong: str, keys: Iterable[str], limit: int = 3) -> list[str]:
    """Return similar dotted keys, best first: by the whole key, its last part, or that part's initials (`lr`)."""
    scored = sorted(((_key_score(wrong.lower(), key.lower()), key) for key in keys), key=lambda item: -item[0])
    best = scored[0][0] if scored else 0.0
    # Several are returned only if they are about equally similar.
    return [key for score, key in scored[:limit] if score >= max(0.6, best - 0.08)]


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return ` Did you mean X?` to append to a message; empty if no name is similar."""
    by_lower = {name.lower(): name for name in names}
    matches = get_close_matches(wrong.lower(), by_lower, n=1, cutoff=0.5)
    return f" Did you mean {by_lower[matches[0]]}?" if matches else ""


def _key_score(wrong: str, key: str) -> float:
    wrong_section, _, wrong_last = wrong.rpartition(".")
    section, _, last = key.rpartition(".")
    last_score = max(_ratio(wrong_last, last), 0.9 if wrong_last == _initials(last) else 0.0)
    if not wrong_section:
        return last_score
    # The section counts less: people remember the field and guess its section.
    return max(_ratio(wrong, key), 0.8 * last_score + 0.2 * _ratio(wrong_section, section))


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def _initials(name: str) -> str:
    return "".join(part[0] for part in name.split("_") if part)
