"""Type a command like a user, or parse its line as clusterkit does without running it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from clusterkit.cli.hostoptions import expand_arguments
from clusterkit.cli.main import HOST_COMMANDS


def run_clusterkit(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `clusterkit WORDS` to its end. options: of subprocess.run."""
    command = [sys.executable, "-m", "clusterkit.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


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
