"""How scripts for hosts are put together, so that none of them ends with 0 after a command that failed.

POSIX sh sees to that in part only. `set -e` ends a script at a command that fails (`STRICT`; sessions put it before
whatever they run as root). It misses a command inside `$(…)` that is a word of another command, such as the list of a
`for`, and every part of a pipe but the last: `for_each` and `pipe` are for these. `tests/unit/test_shell_faults.py`
fails every command of every script in turn.
"""

from __future__ import annotations

import shlex

STRICT = "set -eu\n"
"""The first line of all that runs as root. What must go on after a failure says so: `|| :` with a reason beside it."""


def for_each(listing: str, body: str) -> str:
    """Script that runs a body once for every word, `$id`, that a command lists; the command has to succeed.

    Args:
        listing: a command that prints words without blanks, such as `docker ps --quiet`. body: lines of sh.

    """
    indented = "".join(f"  {line}\n" for line in body.splitlines())
    return f"ids=$({listing})\nfor id in $ids; do\n{indented}done\n"


def first_of(listing: str) -> str:
    """Script that sets `id` to the first line that a command prints, empty without one; the command has to succeed."""
    return f'ids=$({listing})\nid=${{ids%%"\n"*}}\n'


def pipe(*parts: tuple[str, str]) -> str:
    """Script of a pipe in which no part fails unseen: it ends the script and says which parts failed.

    It needs no file to remember that, so it holds on a full disk, too. File descriptors 3 and 4 are its own.

    Args:
        parts: (name, command) each; the name is what the user reads. One command: of several, `&&` between them.

    """
    lines = []
    for number, (name, command) in enumerate(parts, 1):
        said = f"printf . >&3 || echo {shlex.quote(name)} >&3"
        last = number == len(parts)
        # What a part runs must not hold on to 3: the pipe would not end before it does.
        lines.append(f"  {{ {{ {command}; }} 3>&- {'>&4 ' if last else ''}4>&- && {said}; }}{'' if last else ' |'}\n")
    return (
        "exec 4>&1\n"
        f"went=$({{\n{''.join(lines)}}} 3>&1)\n"
        "exec 4>&-\n"
        f'if [ "$went" != {"." * len(parts)} ]; then\n'
        "  echo \"failed: $(printf %s \"$went\" | tr -d . | tr '\\n' ' ')\" >&2\n"
        "  exit 1\n"
        "fi\n"
    )
