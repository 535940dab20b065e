"""The values of settings that a log of AReaL or SGLang prints."""

from __future__ import annotations

import re
from typing import Any

import yaml

SETTING_WORDS = (") - ", "ServerArgs(", "realhf.apps", "areal.launcher")
"""Every line that prints a value contains one of these."""

_AREAL = re.compile(r"^\s*([A-Za-z_]\w*(?:\.\w+)*) \((?:int|float|str|bool|NoneType)\) - (.*)$")
_SERVER = re.compile(r"ServerArgs\((.*)\)")
_ARGUMENT = re.compile(r"(\w+)=('[^']*'|[^,()\[\]{}']+)")
_TYPED = re.compile(r"\s([a-z_]\w*(?:\.[a-z_]\w*)*)=(\S+)")


class LoggedSettings:
    """Options and their values from a log: AReaL's configuration, SGLang's arguments, a command line."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def read_line(self, line: str) -> None:
        """Take the values from one line."""
        if ") - " in line:
            match = _AREAL.match(line)
            if match:
                self.values[match[1]] = _value(match[2])
        elif "ServerArgs(" in line:
            match = _SERVER.search(line)
            for name, value in _ARGUMENT.findall(match[1]) if match else ():
                self.values[f"sglang.{name}"] = _value(value.strip("'"))
        elif "realhf.apps" in line or "areal.launcher" in line:
            self.values.update((key, _value(value)) for key, value in _TYPED.findall(line))

    def get(self, option: str) -> Any:
        """Return the value of an option, also of one logged with a longer name (`actor.sglang.…`); None if unknown."""
        if option in self.values:
            return self.values[option]
        return next((value for key, value in self.values.items() if key.endswith(f".{option}")), None)


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, int | float | bool | str) else None
