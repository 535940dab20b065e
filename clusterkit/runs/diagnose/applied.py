"""overrides.yaml in a run's folder: settings that `diagnose --apply` changed and the next `train` command uses.

The file keeps the value that the command had for each setting. A command with any other value takes precedence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clusterkit.config.overrides import known_field, to_config
from clusterkit.config.presets import nest
from clusterkit.runs.diagnose.model import Change
from clusterkit.runs.directory import FILEROOT, RunDirectory
from clusterkit.runs.trials import must_stay
from trainer.config import RunConfig, flatten
from trainer.disk import file_failures
from trainer.errors import UserError
from trainer.files import write_atomic

_HEAD = (
    "# Settings that `clusterkit train` takes for this run instead of the command's own (`was`).\n"
    "# Written by `clusterkit diagnose --apply`. Take a setting out, or delete the file, to go back.\n"
)


@dataclass(frozen=True)
class Applied:
    """One setting of the file."""

    key: str
    was: Any
    now: Any
    because: str


def overrides_file(run: RunDirectory) -> Path:
    """Return the path of a run's applied settings."""
    return run.logs / "overrides.yaml"


def read_applied(run: RunDirectory) -> list[Applied]:
    """Return the settings that were applied to a run; none if there is no file.

    Raises:
        UserError: the file is damaged, or names an unknown setting or one that must stay.
    """
    path = overrides_file(run)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}): repair it, or delete it") from None
    try:
        applied = [
            Applied(str(key), v["was"], v["now"], str(v.get("because", ""))) for key, v in (values or {}).items()
        ]
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{path} must hold `KEY: {{was: VALUE, now: VALUE}}`: repair it, or delete it") from None
    for item in applied:
        try:
            known_field(item.key)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        if must_stay(item.key):
            raise UserError(
                f"{path}: {item.key} must stay while a run goes on. Take it out, and start another run with "
                f"{item.key}={item.now} trial_name=NEW"
            )
    return applied


def apply_changes(run: RunDirectory, changes: Iterable[tuple[Change, str]]) -> list[Applied]:
    """Add changes, each with its reason, to what was applied before; return all settings of the file.

    Raises:
        UserError: a change cannot be applied to a run that goes on, or the file cannot be read or written.
    """
    kept = {item.key: item for item in read_applied(run)}
    for change, because in changes:
        if not change.applicable:
            raise UserError(f"{change.key} cannot be applied to a run that goes on")
        before = kept.get(change.key)
        # The command keeps the value from before the first change.
        was = before.was if before else change.now
        kept[change.key] = Applied(change.key, was, change.proposed, because)
    values = {item.key: {"was": item.was, "now": item.now, "because": item.because} for item in kept.values()}
    with file_failures(run.logs, FILEROOT):
        write_atomic(overrides_file(run), _HEAD + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return list(kept.values())


def with_applied(config: RunConfig, run: RunDirectory) -> tuple[RunConfig, list[str]]:
    """Return the configuration with the applied settings, and a sentence for the user about each of them.

    Raises:
        UserError: the file is damaged, or its values do not fit the configuration.
    """
    applied = read_applied(run)
    if not applied:
        return config, []
    values, notes = flatten(config), []
    for item in applied:
        if item.key not in values:  # a setting of servers, and the command samples in its own process now
            continue
        typed = values[item.key]
        if typed == item.was:
            values[item.key] = item.now
            notes.append(f"{item.key}={item.now} instead of {item.was} ({item.because}), from {overrides_file(run)}")
        elif typed != item.now:
            notes.append(f"{item.key}={typed} as typed; {overrides_file(run)} has {item.now} instead of {item.was}")
    try:
        return to_config(nest(values)), notes
    except UserError as error:
        raise UserError(f"with {overrides_file(run)}: {error}") from None
