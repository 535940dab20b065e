"""`clusterkit completion`: scripts for shells, and what may follow the words of a command line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clusterkit.cli import actions
from clusterkit.cli.command import takes_value
from clusterkit.cli.main import COMMANDS, LazyGroup, app
from clusterkit.ui import output
from trainer.errors import UserError

if TYPE_CHECKING:
    from clusterkit.cli.actions.completion_values import Candidates

_CHOICES = re.compile(r"[a-z0-9_-]+(\|[a-z0-9_-]+)+")

BASH = r"""
_clusterkit() {
  local line=${COMP_LINE:0:COMP_POINT} last typed reply
  local -a words
  read -ra words <<<"$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  last=${words[${#words[@]} - 1]} typed=${words[${#words[@]} - 1]}
  # bash replaces only what follows the last = or : of a word.
  [[ $COMP_WORDBREAKS == *=* ]] && typed=${typed##*=}
  [[ $COMP_WORDBREAKS == *:* ]] && typed=${typed##*:}
  COMPREPLY=()
  while IFS= read -r reply; do
    reply=${reply%%$'\t'*}
    COMPREPLY+=("${reply#"${last%"$typed"}"}")
  done < <("${words[0]/#\~/$HOME}" completion --complete -- "${words[@]:1}" 2>/dev/null)
  if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
}
complete -o default -F _clusterkit clusterkit
"""
ZSH = r"""
#compdef clusterkit
_clusterkit() {
  local reply value
  local -a plain settings
  for reply in "${(@f)$(${~words[1]} completion --complete -- "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}"; do
    [[ -n $reply ]] || continue
    value=${${reply%%$'\t'*}//:/\\:}
    if [[ $value == *= ]]; then settings+=("$value:${reply#*$'\t'}"); else plain+=("$value:${reply#*$'\t'}"); fi
  done
  (( ${#plain} )) && _describe -t values value plain
  (( ${#settings} )) && _describe -t settings setting settings -S ''
  (( ${#plain} + ${#settings} )) || _files
}
if [[ ${funcstack[1]} == _clusterkit ]]; then _clusterkit "$@"; else compdef _clusterkit clusterkit; fi
"""
FISH = r"""
function __clusterkit_complete
    set -l words (commandline -opc)
    set -l last (commandline -ct)
    set -l replies ($words[1] completion --complete -- $words[2..-1] "$last" 2>/dev/null)
    if set -q replies[1]
        printf '%s\n' $replies
    else
        __fish_complete_path "$last"
    end
end
complete -c clusterkit -f -a '(__clusterkit_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def script(shell: str) -> None:
    """Print the script for a shell; empty: for that of $SHELL."""
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SCRIPTS:
        raise UserError(f"there is no completion for {name or 'an unknown shell'}: name one of {', '.join(SCRIPTS)}")
    output.exact(SCRIPTS[name].lstrip("\n"))


def complete(words: Sequence[str]) -> None:
    """Print what may stand in the place of the last word, one candidate a line: the word, a tab, what it means."""
    found: Candidates = []
    with suppress(UserError, OSError):  # nobody reads messages while a key is pressed
        found = candidates(list(words))
    if found:
        output.exact("\n".join(f"{word}\t{meaning}".rstrip() for word, meaning in found))


def candidates(words: list[str]) -> Candidates:
    """What may stand in the place of the last word; none where it may be anything, or a file."""
    *before, last = words
    command: Any = typer.main.get_command(app)
    path: list[str] = []
    typed: dict[str, str] = {}
    pending: Any = None
    arguments = 0
    for word in before:
        option, equals, value = word.partition("=")
        known = _options(command)
        if pending is not None:
            typed[pending.name], pending = word, None
        elif option in known and takes_value(known[option]):
            typed[known[option].name], pending = value, None if equals else known[option]
        elif word.startswith("-"):
            continue
        elif word in _commands(command):
            command, arguments = command.get_command(None, word), 0
            path.append(word)
        elif _commands(command):  # no command of this name
            return []
        else:
            arguments += 1
    option, equals, value = last.partition("=")
    if pending is not None:
        return _starting(last, _values(path, pending, typed, last))
    if equals and option in _options(command):
        found = _values(path, _options(command)[option], typed, value)
        return _starting(last, [(f"{option}={word}", meaning) for word, meaning in found])
    if last.startswith("-"):
        return _starting(last, _option_names(command))
    positional = [param for param in command.params if param.param_type_name == "argument" and not param.hidden]
    found = [(name, meaning) for name, meaning in _commands(command).items()]
    if positional and (arguments < len(positional) or positional[-1].nargs == -1):
        found += _values(path, positional[min(arguments, len(positional) - 1)], typed, last)
    return _starting(last, found)


def _starting(last: str, found: Candidates) -> Candidates:
    return [(word, " ".join(meaning.split())) for word, meaning in found if word.startswith(last)]


def _options(command: Any) -> dict[str, Any]:
    return {name: param for param in command.params for name in param.opts if name.startswith("-")}


def _option_names(command: Any) -> Candidates:
    shown = [param for param in command.params if not param.hidden and param.param_type_name == "option"]
    names = [(name, param.help or "") for param in shown for name in (*param.opts, *param.secondary_opts)]
    return [*((name, meaning) for name, meaning in names if name.startswith("--")), ("--help", "Show its help.")]


def _commands(command: Any) -> dict[str, str]:
    """The sub-commands, with what they do."""
    if isinstance(command, LazyGroup):
        return {name: one.help for name, one in COMMANDS.items()}
    return {
        name: one.get_short_help_str(limit=200)
        for name, one in getattr(command, "commands", {}).items()
        if not one.hidden
    }


def _values(path: list[str], param: Any, typed: dict[str, str], last: str) -> Candidates:
    """What may be the value of an option or an argument."""
    if _CHOICES.fullmatch(param.metavar or ""):
        return [(word, "") for word in param.metavar.split("|")]
    return actions.completion_values.values(path, param.name, typed, last)
