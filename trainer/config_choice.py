"""Sections of which one field chooses the class: task, agent and reward by `name`, servers by `engine`.

Each has the fields of what is chosen and no others.

A task, agent or reward of the user's own, `module:Class`, may build on any of ours, so its section has the fields of
all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config_parts import Section

OWN = "own"
"""Tag of the class for a class of the user's own, and for names that are not known: it refuses those."""

CLASS_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""`module:Class`, with dots within the module's name."""

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Choice:
    """A section and its classes: those of ours, by name, and the one for any other name, which refuses unknown ones.

    default: the name where none is given. key: the field that holds it.
    """

    section: str
    default: str
    ours: Mapping[str, type[Section]]
    own: type[Section]
    key: str = "name"

    @property
    def setting(self) -> str:
        """Dotted key of the name."""
        return f"{self.section}.{self.key}"

    def tag(self, value: Any) -> str:
        """Tag of the class that a mapping, or a section that was made, belongs to: pydantic's discriminator."""
        mapping = isinstance(value, Mapping)
        name = value.get(self.key, self.default) if mapping else getattr(value, self.key, self.default)
        return OWN if self.chosen(name) is self.own else str(name)

    def chosen(self, name: Any) -> type[Section]:
        """The class that a name chooses; the user's own for any other."""
        return self.ours.get(name, self.own) if isinstance(name, str) else self.own

    def known(self, field: str) -> bool:
        """Whether any class has the field."""
        return any(field in cls.model_fields for cls in (*self.ours.values(), self.own))

    def having(self, field: str) -> tuple[str, ...]:
        """Those of our names that have a field."""
        return tuple(name for name, cls in self.ours.items() if field in cls.model_fields)

    def lacks(self, name: Any, field: str) -> bool:
        """Whether a field is another name's."""
        return field not in self.chosen(name).model_fields and self.known(field)

    def defaults(self) -> dict[str, Any]:
        """Field -> default of everything that any name has, but the name."""
        classes = (*self.ours.values(), self.own)
        infos = {field: info for cls in classes for field, info in cls.model_fields.items() if field != self.key}
        return {field: info.get_default(call_default_factory=True) for field, info in infos.items()}

    def refusal(self, name: str, field: str, what: str = "this run", advice: str = ": leave it out") -> str:
        """The sentence for a field that the chosen name does not have. what has that name, and what to do."""
        names = self.having(field)
        whose = _listed(names) if names else "module:Class, one of your own"
        setting = f"{self.section}.{field}"
        return f"{setting} is a setting of {self.setting}={whose}, and {what} has {self.setting}={name}{advice}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def as_class(cls: type[S], section: Section) -> S:
    """A section as one of the class: itself if it is one, else what both have, and defaults."""
    if isinstance(section, cls):
        return section
    shared = (name for name in cls.model_fields if name != "name" and name in type(section).model_fields)
    return cls.model_validate({name: getattr(section, name) for name in shared})


def named_class(name: str, setting: str, known: tuple[str, ...]) -> str:
    """The name of one of ours, or `module:Class`. Raises ValueError for anything else."""
    if name in known or CLASS_NAME.fullmatch(name):
        return name
    raise ValueError(f"{setting}={name} is not known: choose {', '.join(known)}, or name a class of yours module:Class")


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON knows them, so that they survive every file they are written to. Raises ValueError."""
    try:
        return dict(json.loads(json.dumps(options, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"options must be numbers, texts, true, false, lists and mappings: {error}") from None
