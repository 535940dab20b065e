"""What to print about a command line that Typer refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer

from clusterkit.common.suggest import did_you_mean
from clusterkit.ui import output

_UsageError: Any = typer.BadParameter.__base__
_REASONS = (
    (r"Input should be less than or equal to (\S+)", r"give at most \1"),
    (r"Input should be greater than or equal to (\S+)", r"give at least \1"),
    (r"Input should be a valid integer.*", "give a whole number"),
    (r"Input should be a valid number.*", "give a number"),
)
"""Reasons of Typer's, and what they mean to somebody who types."""


def show_usage_error(error: Exception, arguments: Sequence[str]) -> bool:
    """Print the message for an error of Typer about a command line; False for any other error."""
    if not isinstance(error, _UsageError):
        return False
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context is not None else " ".join(["clusterkit", *arguments[:1]])
    if type(error).__name__ == "NoArgsIsHelpError":
        output.note(context.get_help())
    else:
        output.error(f"{_reason(error, arguments)}\nOptions and examples: {command} --help")
    return True


def _reason(error: Any, arguments: Sequence[str]) -> str:
    param = getattr(error, "param", None)
    if param is None:
        return _unknown_words(error)
    option = next((name for name in param.opts if name.startswith("--")), param.metavar or str(param.name).upper())
    if type(error).__name__ == "MissingParameter":
        return f"{option} is missing" + (f": {param.help.rstrip('.')}" if getattr(param, "help", None) else "")
    reason = str(error.message)
    for pattern, meaning in _REASONS:
        reason = re.sub(pattern, meaning, reason, flags=re.DOTALL)
    return f"{' '.join([option, *_typed(param.opts, arguments)])}: {reason}"


def _unknown_words(error: Any) -> str:
    """Words that the command does not know."""
    text = str(error.format_message())
    if (option := getattr(error, "option_name", "")) and type(error).__name__ == "NoSuchOption":
        if setting := _setting(option, _params(error)):
            told = f"settings are typed without dashes, as {setting}=VALUE"
            return f"{error.ctx.command_path} has no option {option}: {told}"
        options = [name[2:] for param in _params(error) if not param.hidden for name in param.opts if name[:2] == "--"]
        meant = did_you_mean(option.removeprefix("--"), options).replace(" mean ", " mean --")
        return f"{error.ctx.command_path} has no option {option}.{meant}"
    if unknown := re.fullmatch(r"No such command '(.*?)'.*", text):
        names = list(error.ctx.command.commands)
        meant = did_you_mean(unknown[1], names)
        return f"{error.ctx.command_path} has no command '{unknown[1]}'.{meant}\nCommands: {', '.join(names)}"
    found = re.fullmatch(r"Got unexpected extra arguments?\(?s?\)? \((.*)\)", text)
    if not found:
        return text
    repeated = {name for param in _params(error) if getattr(param, "multiple", False) for name in param.opts}
    further = ""
    if "--compare" in repeated:
        further = f". Runs to draw over it: --compare {found[1].replace(' ', ' --compare ')}"
    elif "--from" in repeated:  # a shell makes several words of docs/*.md
        further = ". Every input has a --from of its own; files of a folder are taken with --from FOLDER"
    return f"more words than it takes: {found[1]}{further}"


def _params(error: Any) -> list[Any]:
    """Options and arguments of the command that was typed."""
    return [] if getattr(error, "ctx", None) is None else error.ctx.command.params


def _setting(option: str, params: Sequence[Any]) -> str:
    """The setting that was typed as an option, where the command takes settings; empty for none."""
    name = option.removeprefix("--").replace("-", "_")
    if re.match(r"[a-z_]+\.", name):
        return name
    if not any(param.metavar == "KEY=VALUE" and "--set" not in param.opts for param in params):
        return ""
    from clusterkit.config.fields import fields  # noqa: PLC0415 (slow, and every --help would pay for it)
    from trainer.config import RunConfig  # noqa: PLC0415

    return next((key for key in fields(RunConfig) if name in (key, key.rpartition(".")[2])), "")


def _typed(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The value of an option on a command line, where it can be found."""
    for position, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in names:
            return [value] if equals else list(arguments[position + 1 : position + 2])
    return []
