"""The memory agent's two prompts in words of one's own: a YAML file, checked. Both sides read it: no torch."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from trainer.errors import UserError

NEEDED = {"update": ("problem", "memory", "section"), "final": ("problem", "memory")}
NO_MEMORY = "No previous memory"
MOST_BYTES = 256 << 10
# Braces behind a letter or a brace are LaTeX's: \boxed{answer}, \frac{a}{b}.
_NAMED = re.compile(r"(?<![A-Za-z}])\{([A-Za-z_]+)\}")
_DOUBLED = re.compile(r"\{\{(problem|memory|section)\}\}")
_MEANT = {"prompt": "problem", "question": "problem", "chunk": "section", "context": "section"}


def read_wording(path: Path) -> dict[str, str]:
    """The texts `update`, `final` and `no_memory` of a file.

    Raises:
        UserError: it cannot be read, is not YAML of that form, or a placeholder is missing, unknown or there twice.
    """
    where = f"agent.template_file={path}"
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UserError(f"{where} has more than {MOST_BYTES >> 10} KiB: it is to hold two prompts, no documents")
        values = yaml.safe_load(data.decode("utf-8"))
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}: name a YAML file of this machine") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not text in UTF-8: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not YAML ({' '.join(str(error).split())}): {_FORM}") from error
    if not isinstance(values, dict) or not set(NEEDED) <= set(map(str, values)) <= {*NEEDED, "no_memory"}:
        has = ", ".join(map(str, values)) if isinstance(values, dict) else f"a {type(values).__name__}"
        raise UserError(f"{where} has {has or 'nothing'}: {_FORM}")
    values = {"no_memory": NO_MEMORY, **values}
    try:
        check_wording(values)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return values


_FORM = (
    "it is to have the keys update and final, each a text (update: | and the prompt in the lines below, indented), and "
    "may have no_memory"
)


def check_wording(values: dict[str, str]) -> None:
    """Raise ValueError for a text that is none, or whose placeholders are not those that are filled in."""
    if unknown := set(values) - {*NEEDED, "no_memory"}:
        raise ValueError(f"{', '.join(sorted(unknown))} is unknown: {_FORM}")
    for name, text in values.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} is no text but {text!r}: {_FORM}")
    for name, needed in NEEDED.items():
        text = values.get(name, "")
        if doubled := _DOUBLED.search(text):
            raise ValueError(f"{name} has {doubled[0]}: write {{{doubled[1]}}}, with single braces")
        for found in _NAMED.findall(text):
            if found not in needed:
                raise ValueError(f"{name} has {{{found}}}, which is not filled in{_instead(found, needed)}")
        for one in needed:
            if (count := text.count(f"{{{one}}}")) != 1:
                often = "lacks" if not count else f"has {count} times"
                raise ValueError(f"{name} {often} {{{one}}}: it is to stand there once")
    if found := _NAMED.search(values["no_memory"]):
        raise ValueError(f"no_memory has {found[0]}: nothing is filled in there")


def _instead(found: str, needed: tuple[str, ...]) -> str:
    meant = _MEANT.get(found)
    if meant in needed:
        return f": {{{found}}} is {{{meant}}} here"
    if found == "section" or meant == "section":
        return ": no section is read for the answer"
    return f": there are {', '.join(f'{{{one}}}' for one in needed)}"
