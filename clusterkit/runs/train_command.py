"""The `clusterkit train` command that goes on with a run, from what was typed or what the run has recorded."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from clusterkit.runs.directory import RUNS, RunDirectory, folder_of_runs
from clusterkit.runs.log.metrics import History

_HIDDEN = "***"
"""What stands for a password in a recorded command, which therefore cannot be typed again."""


def again_command(arguments: Sequence[str]) -> str:
    """The typed command that goes on with the run: as it was, but without asking for a fresh start."""
    return shlex.join(["clusterkit", *(item for item in _bare(arguments) if item != "recover_mode=disabled")])


def further_command(arguments: Sequence[str], trial: str, total_steps: int) -> str:
    """The command that trains a complete run for more steps."""
    kept = [
        item for item in _bare(arguments) if not item.startswith(("trial_name=", "train.total_steps=", "recover_mode="))
    ]
    return shlex.join(["clusterkit", *kept, f"trial_name={trial}", f"train.total_steps={total_steps}"])


def recorded_command(history: History, run: RunDirectory, cluster: str | None = None) -> str:
    """Return the command of the newest attempt, so that it goes on with this run wherever it is typed.

    Args:
        run: the run, as its place names it.
        cluster: option that names the run's cluster, empty where the command goes there by itself; None for a run of
            this machine.

    Returns:
        A line for a shell; empty where none was recorded, or a password in it was not.
    """
    newest = [history.finish or {}, history.start or {}, *history.attempts[-1:]]
    recorded = (record["command"] for record in newest if record.get("command"))
    command = run.ended_command or next(recorded, None)
    if not isinstance(command, str) or _HIDDEN in command:
        return ""
    try:
        program, *words = shlex.split(command)
    except ValueError:  # empty, or damaged
        return ""
    if program != "clusterkit":
        return ""
    line = again_command(words)
    words = _bare(words)
    swept = any(word == "--sweep" or word.startswith("--sweep=") for word in words)
    if "train" in words and not swept and not any(word.startswith("trial_name=") for word in words):
        line += f" trial_name={shlex.quote(run.trial)}"  # other trials may have come since
    if cluster is None:
        typed = list(_values(words, "fileroot"))
        if folder_of_runs(typed[-1] if typed else RUNS) != run.fileroot:
            line += f" --fileroot {shlex.quote(str(run.fileroot))}"
    elif not list(_values(words, "cluster")):
        line += cluster
    return line


def _values(words: Sequence[str], name: str) -> Iterator[str]:
    """What an option or setting of a name was given."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        key, equals, value = word.partition("=")
        if key in (name, f"--{name}") and (equals or key.startswith("--")):
            yield value if equals else following


def _bare(arguments: Sequence[str]) -> list[str]:
    """The words with settings as KEY=VALUE, those that were typed as --set KEY=VALUE, too; the last of each key."""
    words = [item.removeprefix("--set=") for item in arguments if item != "--set"]
    keys = ["" if before.startswith("-") else _key(word) for before, word in zip(["", *words], words, strict=False)]
    last = {key: place for place, key in enumerate(keys)}
    return [word for place, (word, key) in enumerate(zip(words, keys, strict=True)) if not key or last[key] == place]


def _key(word: str) -> str:
    """The key of a setting; empty for another word."""
    key, equals, _ = word.partition("=")
    return key if equals and not key.startswith("-") else ""
