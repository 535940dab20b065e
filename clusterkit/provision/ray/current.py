"""The current cluster: the one that commands go to when none is named, as kubectl's current context.

`clusterkit use NAME` chooses it, and so does the first set-up of a cluster; $CLUSTERKIT_CLUSTER chooses for one shell.
Without a choice it is the only cluster that this machine knows a Ray of.
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


@dataclass(frozen=True)
class Current:
    """name: of the current cluster; empty where none is. why: it is that one. ready: clusters that have a Ray."""

    name: str
    why: str
    ready: tuple[str, ...]


def current() -> Current:
    """The current cluster.

    Raises:
        UserError: $CLUSTERKIT_CLUSTER names none, or the file that keeps the choice is damaged.

    """
    ready = ready_clusters()
    if named := os.environ.get(VARIABLE, "").strip():
        if not _kept(named):
            there_are = inventory.cluster_names()
            known = f" Clusters: {', '.join(there_are)}." if there_are else ""
            raise UserError(
                f"${VARIABLE} is '{named}', and there is no such cluster.{did_you_mean(named, there_are)}{known}\n"
                f"Name one of them, or take it back: unset {VARIABLE}"
            )
        return Current(named, f"from ${VARIABLE}", ready)
    chosen = _read()
    if chosen and _kept(chosen):
        return Current(chosen, "the current one", ready)
    return Current(ready[0], "the only one", ready) if len(ready) == 1 else Current("", "", ready)


def ready_clusters() -> tuple[str, ...]:
    """Names of the clusters that were set up and not taken down, as far as this machine knows."""
    return tuple(name for name in inventory.cluster_names() if local_file(name).is_file())


def option(name: str) -> str:
    """What a printed command needs to go to this cluster: " --cluster NAME", or nothing where it does so by itself."""
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
    try:
        write_private(path(), name + "\n")
    except OSError as error:
        raise RunError(
            f"{path()} cannot be written: {error.strerror}\nSet CLUSTERKIT_CONFIG to a folder that is yours."
        ) from None


def forget(name: str) -> bool:
    """Take the choice back where it is this cluster; whether it was."""
    try:
        if _read() != name:
            return False
        path().unlink(missing_ok=True)
    except (UserError, OSError):  # a damaged file, or one that stays, names no cluster that is to be used
        return False
    return True


def path() -> Path:
    """The file that keeps the choice: one line, the cluster's name."""
    return config_folder() / "current"


def _kept(name: str) -> bool:
    return name in inventory.cluster_names()


def _read() -> str:
    """What was chosen; empty where nothing was."""
    try:
        text = path().read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(f"{path()} cannot be read: {reason}. {_WAYS}") from None
    if not re.fullmatch(inventory.NAME, text):
        raise UserError(f"{path()} names no cluster ({text[:40]!r}). {_WAYS}")
    return text


_WAYS = "Choose a cluster again: clusterkit use NAME; or name one: --cluster NAME"
