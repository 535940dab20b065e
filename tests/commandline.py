"""Parse a command line as clusterkit does, without running it."""

from __future__ import annotations

from typing import Any

from clusterkit.cli.hostoptions import expand_arguments
from clusterkit.cli.main import HOST_COMMANDS


def parsed(group: Any, words: list[str]) -> dict[str, Any]:
    """Parameters of a command line, parsed by the command itself and not run."""
    if words[0] in HOST_COMMANDS:
        words = expand_arguments(words)
    context = group.make_context("clusterkit", words)
    name, command, rest = group.resolve_command(context, words)
    context = command.make_context(name, rest, parent=context)
    if hasattr(command, "resolve_command") and rest:  # a group with commands of its own
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return dict(context.params)
