"""The current cluster: commands use it where no other is named, like kubectl's current context.

`clusterkit use NAME` and the first set-up of a cluster choose it; $CLUSTERKIT_CLUSTER chooses for one shell. Without a
choice it is the only cluster that was set up from this machine. `clusterkit use --here` chooses that there is none.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from clusterkit.common.suggest import did_you_mean
from clusterkit.hosts import inventory
from clusterkit.hosts.folders import config_folder, write_private
from clusterkit.provision.ray.token import local_file
from trainer.errors import RunError, UserError

VARIABLE = "CLUSTERKIT_CLUSTER"
HERE = "--here"
"""What the file holds where this machine was chosen; no cluster has such a name."""


@dataclass(frozen=True)
class Current:
    """The current cluster, and why it is that one."""

    name: str
    why: str  # as a remark in parentheses
    ready: tuple[str, ...]  # clusters that have a Ray
    here: bool = False  # there is none because this machine was chosen


def current() -> Current:
    """Return the current cluster.

    Raises:
        UserError: $CLUSTERKIT_CLUSTER names none, or the file that keeps the choice is damaged.
    """
    ready = ready_clusters()
    if named := os.environ.get(VARIABLE, "").strip():
        names = inventory.cluster_names()
        if named not in names:
            known = f" Clusters: {', '.join(names)}." if names else ""
            raise UserError(
                f"${VARIABLE} is '{named}', and there is no such cluster.{did_you_mean(named, names)}{known}\n"
                f"Name one of them, or take it back: unset {VARIABLE}"
            )
        return Current(named, f"from ${VARIABLE}", ready)
    chosen = _read()
    if chosen == HERE:
        return Current("", "this machine was chosen", ready, here=True)
    if chosen in inventory.cluster_names():
        return Current(chosen, "the current one", ready)
    return Current(ready[0], "the only one", ready) if len(ready) == 1 else Current("", "", ready)


def has_current() -> bool:
    """Return whether there is a current cluster; a choice that is damaged counts as none."""
    try:
        return bool(current().name)
    except UserError:
        return False


def ready_clusters() -> tuple[str, ...]:
    """Return the clusters that were set up from this machine and not taken down."""
    return tuple(name for name in inventory.cluster_names() if local_file(name).is_file())


def option(name: str) -> str:
    """Return the option with which a printed command uses this cluster; empty where it does so by itself."""
    try:
        now = current()
    except UserError:
        return f" --cluster {name}"
    goes_there = now.name == name or (not now.name and not now.ready and name == inventory.DEFAULT)
    return "" if goes_there else f" --cluster {name}"


def choose(name: str) -> None:
    """Make a cluster the current one, in place of another.

    Raises:
        UserError: there is no such cluster. RunError: the choice cannot be written.
    """
    inventory.load(name)
    _write(name)


def choose_here() -> None:
    """Let commands go to this machine, although there are clusters. Raises RunError: the choice cannot be written."""
    _write(HERE)


def _write(choice: str) -> None:
    try:
        write_private(path(), choice + "\n")
    except OSError as error:
        raise RunError(
            f"{path()} cannot be written: {error.strerror}\nSet CLUSTERKIT_CONFIG to a folder that is yours."
        ) from None


def forget(name: str) -> bool:
    """Remove the choice where it is this cluster. Return whether it was."""
    try:
        if _read() != name:
            return False
        path().unlink(missing_ok=True)
    except (UserError, OSError):  # a damaged or undeletable file chooses nothing
        return False
    return True


def path() -> Path:
    """Return the file with the choice: one line, the cluster's name or `HERE`."""
    return config_folder() / "current"


def _read() -> str:
    """Return the chosen cluster, or `HERE`; empty without a choice."""
    try:
        text = path().read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(f"{path()} cannot be read: {reason}. {_WAYS}") from None
    if text != HERE and not re.fullmatch(inventory.NAME, text):
        raise UserError(f"{path()} names no cluster ({text[:40]!r}). {_WAYS}")
    return text


_WAYS = "Choose a cluster again: clusterkit use NAME; or name one: --cluster NAME"
