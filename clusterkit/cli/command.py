"""The classes of all commands: older spellings of options, settings as KEY=VALUE or --set, examples in --help."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

OLD_NAMES = {
    "--output-path": "--out",
    "--model": "--model-path",
    "--flags": "--server-flag",
    "--per-server": "--tensor-parallel",
    "--watch": "--watch-dir",
    "--task": "--task-id",
}
"""Names that options had, and still have where a command has no other option of that name."""

_OPTION = re.compile(r"(--[A-Za-z][^\s=]*)(=.*)?", re.DOTALL)
_SETTING = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*=", re.IGNORECASE)


class _Shared:
    """What commands and groups have in common."""

    params: list[Any]
    epilog: str | None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name, in today's spelling."""
        args[:] = present_spelling(args, self.params, getattr(self, "commands", {}))  # Typer takes words out of it, too
        return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, and what a group has beside them, without Python's names of types."""
        super().format_options(ctx, _PlainTypes(formatter))  # type: ignore[misc]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the examples."""
        if self.epilog:
            write_examples(self.epilog, formatter)


class _PlainTypes:
    """A formatter of help that says `N` where Typer says `<int range>`; an argument's own name is enough."""

    def __init__(self, formatter: Any) -> None:
        self._formatter = formatter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._formatter, name)

    def write_dl(self, rows: Any, *rest: Any, **more: Any) -> None:
        """Write a list of names and what they mean."""
        self._formatter.write_dl([(_plain_types(name), text) for name, text in rows], *rest, **more)


def _plain_types(name: str) -> str:
    word, blank, kind = name.partition(" <")
    if not blank or not word.startswith("-"):
        return word
    return f"{word} {'TEXT' if kind.startswith(('str', 'path')) else 'N'}"


class Command(_Shared, TyperCommand):
    """A command."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, of what --help shows."""
        shown = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        return ["[OPTIONS]", *(piece for param in shown for piece in param.get_usage_pieces(ctx))]


class Group(_Shared, TyperGroup):
    """A command with sub-commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sub-commands, each with its whole first sentence."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, (one.help or "").split("\n\n")[0]) for name, one in commands.items() if one and not one.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def write_examples(text: str, formatter: Any) -> None:
    """Write command lines, one a line, as they are: a wrapped one could not be copied."""
    with formatter.section("Examples"):
        for line in inspect.cleandoc(text).splitlines():
            formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def present_spelling(words: list[str], params: list[Any], commands: Any = ()) -> list[str]:
    """Rewrite words of a command line into today's names of options.

    An underscore in the name of an option is a dash, an older name is the present one, and KEY=VALUE and `--set
    KEY=VALUE` are the same, whichever of them the command declares.

    Args:
        words: of the command line, after the command's name.
        commands: names of its sub-commands; what follows one is left to it.
    """
    options = {name: param for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}
    has_settings = any(param.name == "overrides" for param in params)
    found: list[str] = []
    is_value = False
    for position, word in enumerate(words):
        if not is_value and (word == "--" or word in commands):
            return found + words[position:]
        if is_value:
            is_value = False
        elif match := _OPTION.fullmatch(word):
            name = _present_name(match[1], options)
            if name == "--set" and name not in options and has_settings and words[position + (not match[2]) :]:
                found += [match[2][1:]] if match[2] else []
                continue
            is_value = not match[2] and takes_value(options.get(name))
            found.append(name + (match[2] or ""))
            continue
        elif word in options:
            is_value = takes_value(options[word])
        # os.path, because pathlib raises for names that are too long.
        elif "--set" in options and _SETTING.match(word) and not os.path.exists(word):  # noqa: PTH110
            found.append("--set")
        found.append(word)
    return found


def _present_name(name: str, options: dict[str, Any]) -> str:
    if name in options:
        return name
    dashed = name.replace("_", "-")
    known = (dashed, OLD_NAMES.get(dashed, ""))
    return next((one for one in known if one in options or one == "--set"), name)


def takes_value(param: Any) -> bool:
    """Whether a word follows an option. param: None for an option that is not known."""
    return param is not None and not param.is_flag and not getattr(param, "count", False)
