"""Sections of the configuration whose class depends on one of their fields (discriminated unions).

The sections task, agent and reward are chosen by their field `name`, the section servers by `engine`. Each class has
only the fields that apply to the choice. The section for a class of the user's own (`module:Class`) has the fields of
all classes, as the user's class may build on any of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, field_validator
from pydantic_core import CoreSchema, core_schema

OWN = "own"
"""Tag of the section for a class of the user's own. That section also refuses names that are not known."""

CLASS_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""`module:Class`, with dots within the module's name."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused and defaults are validated too."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)


S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Choice:
    """The classes of a section. In an annotation's metadata it is the discriminator of a pydantic union."""

    section: str  # name of the section, such as task
    default: str  # the choice where none is typed
    ours: Mapping[str, type[Section]]  # our classes by name
    own: type[Section]  # class for every other name, which refuses unknown ones
    key: str = "name"  # the field that holds the name

    @classmethod
    def by_name(cls, section: str, own: type[OwnSection], *ours: type[Section]) -> Choice:
        """Make a choice between classes, each named by the default of its field `name`. The first is the default."""
        names = {one.model_fields["name"].default: one for one in ours}
        own.choice = cls(section, next(iter(names)), names, own)
        return own.choice

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {name: handler.generate_schema(cls) for name, cls in {**self.ours, OWN: self.own}.items()}
        return core_schema.tagged_union_schema(choices, discriminator=self.tag)

    @property
    def setting(self) -> str:
        """The setting that chooses, such as task.name."""
        return f"{self.section}.{self.key}"

    def tag(self, value: Any) -> str:
        """Tag of the class that a mapping or a section belongs to (pydantic's discriminator function)."""
        mapping = isinstance(value, Mapping)
        name = value.get(self.key, self.default) if mapping else getattr(value, self.key, self.default)
        return OWN if self.chosen(name) is self.own else str(name)

    def chosen(self, name: Any) -> type[Section]:
        """The class that a name chooses: one of ours, else that of the user's own classes."""
        return self.ours.get(name, self.own) if isinstance(name, str) else self.own

    def known(self, field: str) -> bool:
        """Whether any class has the field."""
        return any(field in cls.model_fields for cls in (*self.ours.values(), self.own))

    def lacks(self, name: Any, field: str) -> bool:
        """Whether a name's class lacks a field that another name's class has."""
        return field not in self.chosen(name).model_fields and self.known(field)

    def defaults(self) -> dict[str, Any]:
        """Defaults of the fields of all classes, without the field that chooses."""
        classes = (*self.ours.values(), self.own)
        infos = {field: info for cls in classes for field, info in cls.model_fields.items() if field != self.key}
        return {field: info.get_default(call_default_factory=True) for field, info in infos.items()}

    def refusal(self, name: str, field: str, what: str = "this run", advice: str = ": leave it out") -> str:
        """Error message for a field that the chosen class does not have.

        Args:
            what: subject of the sentence: what the choice was made for.
            advice: end of the sentence: what to do.
        """
        names = [name for name, cls in self.ours.items() if field in cls.model_fields]
        whose = _listed(names) if names else "module:Class, one of your own"
        setting = f"{self.section}.{field}"
        return f"{setting} is a setting of {self.setting}={whose}, and {what} has {self.setting}={name}{advice}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def as_class(cls: type[S], section: Section) -> S:
    """The section itself if it is an instance of the class, else an instance with the fields that both have."""
    if isinstance(section, cls):
        return section
    shared = (name for name in cls.model_fields if name != "name" and name in type(section).model_fields)
    return cls.model_validate({name: getattr(section, name) for name in shared})


class OwnSection(Section):
    """Base of the sections for classes of the user's own."""

    options: dict[str, Any] = {}
    """Settings of a class of your own, as it wants them: options.NAME=VALUE, below the section's name."""
    choice: ClassVar[Choice]

    @field_validator("name", check_fields=False)
    @classmethod
    def _known(cls, name: str) -> str:
        if name in cls.choice.ours or CLASS_NAME.fullmatch(name):
            return name
        raise ValueError(
            f"{cls.choice.setting}={name} is not known: choose {', '.join(cls.choice.ours)}, or name a class of yours "
            "module:Class"
        )

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:  # as JSON knows them, so that they survive every file they are written to
            return dict(json.loads(json.dumps(options, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"options must be numbers, texts, true, false, lists and mappings: {error}") from None
