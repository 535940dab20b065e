"""Parts of scripts for hosts, so that no script ends with 0 after a command that failed.

`set -e` ends a script at a command that fails (`STRICT`; sessions put it before all that they run as root). It misses a
command in a `$(…)` that is a word of another command, such as the list of a `for`, and all parts of a pipe but the
last: use `for_each` and `pipe` for these. `tests/unit/test_shell_faults.py` makes every command of every script fail.
"""

from __future__ import annotations

import shlex

STRICT = "set -eu\n"
"""The first line of all that runs as root. A command that may fail ends with `|| :`, with the reason beside it."""


def for_each(listing: str, body: str) -> str:
    """Return a script that runs a body for every word (`$id`) that a command prints. The command has to succeed.

    Args:
        listing: a command that prints words without blanks, such as `docker ps --quiet`.
    """
    indented = "".join(f"  {line}\n" for line in body.splitlines())
    return f"ids=$({listing})\nfor id in $ids; do\n{indented}done\n"


def first_of(listing: str) -> str:
    """Return a script that sets `id` to the first line that a command prints. The command has to succeed."""
    return f'ids=$({listing})\nid=${{ids%%"\n"*}}\n'


def pipe(*parts: tuple[str, str]) -> str:
    """Return a script of a pipe in which no part fails unseen: a failure ends the script, with the names of the parts.

    It needs no file for that, so it works on a full disk. It uses the file descriptors 3 and 4.

    Args:
        parts: (name, command) each. The user reads the name. Write `&&` between several commands.
    """
    lines = []
    for number, (name, command) in enumerate(parts, 1):
        report = f"printf . >&3 || echo {shlex.quote(name)} >&3"
        last = number == len(parts)
        # A part must not inherit 3: a process that it leaves would keep the pipe open.
        lines.append(f"  {{ {{ {command}; }} 3>&- {'>&4 ' if last else ''}4>&- && {report}; }}{'' if last else ' |'}\n")
    return (
        "exec 4>&1\n"
        f"went=$({{\n{''.join(lines)}}} 3>&1)\n"
        "exec 4>&-\n"
        f'if [ "$went" != {"." * len(parts)} ]; then\n'
        "  echo \"failed: $(printf %s \"$went\" | tr -d . | tr '\\n' ' ')\" >&2\n"
        "  exit 1\n"
        "fi\n"
    )
