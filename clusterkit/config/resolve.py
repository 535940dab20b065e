"""Resolve a preset, a task and overrides to one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkit.config import presets
from clusterkit.config.aliases import translate
from clusterkit.config.fields import applies, has_effect
from clusterkit.config.overrides import LEAVE_OUT, parse_overrides, to_config
from clusterkit.config.presets import Setting, SizePreset
from trainer.config import RunConfig, flatten
from trainer.config_choices import CHOICES
from trainer.config_tasks import OwnTaskConfig, SftConfig
from trainer.custom import is_custom
from trainer.errors import UserError


@dataclass(frozen=True)
class Resolved:
    """A validated configuration and its sources. `overrides` are the words as typed."""

    config: RunConfig
    size: SizePreset
    task: str
    settings: dict[str, Setting]
    overrides: tuple[str, ...] = ()

    @property
    def trial_is_named(self) -> bool:
        """Whether the user chose the trial's name."""
        return "trial_name" in self.settings


def resolve(preset: str | None, task: str | None = None, overrides: Sequence[str] = ()) -> Resolved:
    """Merge a preset's layers with overrides and validate the result.

    Raises:
        UserError: a name, a key or a value is wrong.
    """
    if not preset:
        meant = next((f" Did you mean --preset {word}?" for word in overrides if word in presets.size_names()), "")
        raise UserError(
            f"no preset chosen.{meant} Add --preset NAME, one of {', '.join(presets.size_names())}. "
            "What each is for: clusterkit presets"
        )
    size = presets.load_size(preset)
    values = parse_overrides(overrides)
    if task is None and values.get("trainer.type") == "sft":
        task = "sft"  # the only task with examples; it brings its other settings
    chosen = presets.choose_task(size, task)
    own = is_custom(str(values.get("task.name", "")))
    if not own and values.get("task.name") not in (None, presets.config_task(chosen)):
        own_class = (
            ", or name a class of yours: task.name=module:Class"
            if values["task.name"] not in presets.task_names()
            else ""
        )
        raise UserError(
            f"task.name={values['task.name']}: a task brings settings of its own; choose it with --task{own_class}"
        )
    if values.get("preset", preset) != preset:
        raise UserError(f"preset={values['preset']}: choose the preset with --preset")
    settings = _drop_inapplicable_parts(presets.collect(size, chosen, values), overrides)
    nested = presets.nest({key: setting.value for key, setting in settings.items()})
    config = to_config(nested, lambda key: _advice(size, chosen, values, key))
    for key in ("experiment_name", "trial_name"):
        if getattr(config, key).startswith("."):
            raise UserError(
                f"{key}={getattr(config, key)} becomes the name of a folder: begin it with a letter or digit"
            )
    return Resolved(_with_absolute_paths(config), size, chosen, settings, tuple(overrides))


def _drop_inapplicable_parts(settings: dict[str, Setting], overrides: Sequence[str]) -> dict[str, Setting]:
    """Return the settings without those parts of a translated key that the task or agent does not have.

    AReaL's dataset.path is a folder and a file here, and some tasks take only a folder.

    Raises:
        UserError: no part of the key applies.
    """
    chosen = {key: setting.value for key, setting in settings.items()}
    foreign = {key for key, setting in settings.items() if setting.origin == "override" and not applies(key, chosen)}
    for argument in overrides if foreign else ():
        key, _, text = argument.partition("=")
        translation = translate(key, text)
        parts = translation.settings.keys() & foreign
        if translation.note and parts and parts == translation.settings.keys():
            part = min(parts)
            section, _, field = part.partition(".")
            choice = CHOICES[section]
            raise UserError(
                f"{translation.note}, and {choice.refusal(str(chosen.get(choice.setting, choice.default)), field)}"
            )
        if translation.note:
            foreign -= parts
            settings = {name: setting for name, setting in settings.items() if name not in parts}
    return settings


def _advice(size: SizePreset, chosen: str, typed: dict[str, Any], key: str) -> str:
    """Return what to do about a setting that the chosen task's parts have not: other tasks of the preset may."""
    if typed.keys() & {"task.name", "trainer.type"} or key.partition(".")[0] not in ("agent", "reward", "task"):
        return LEAVE_OUT
    tasks = [task for task in size.tasks if task != chosen and applies(key, _values(size, task, typed))]
    return f"{LEAVE_OUT}, or choose --task {' or '.join(tasks)}" if tasks else LEAVE_OUT


def _values(size: SizePreset, task: str, typed: dict[str, Any]) -> dict[str, Any]:
    return {key: setting.value for key, setting in presets.collect(size, task, typed).items()}


def shown_values(config: RunConfig) -> dict[str, Any]:
    """Return the settings to show; train.ranks is the number of ranks even if allocation_mode determines it."""
    values = config.model_dump()
    values["train"]["ranks"] = config.ranks
    return values


def applicable_values(config: RunConfig) -> dict[str, Any]:
    """Return the settings to show without those that the run does not read."""
    flat = {**flatten(config), "train.ranks": config.ranks}
    return presets.nest({key: value for key, value in flat.items() if has_effect(key, config)})


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make paths absolute, so that `python -m trainer RUN/config.yaml` is the same run from every folder."""
    places = {"fileroot": str(Path(config.fileroot).expanduser().absolute())}
    if config.custom:
        places["code_dir"] = str(Path(config.code_dir or ".").expanduser().absolute())
    anchored = config.model_copy(update=places)
    path = Path(config.data_path or "").expanduser()
    if config.data_path and isinstance(config.task, SftConfig | OwnTaskConfig) and path.exists():
        task = config.task.model_copy(update={"path": str(path.absolute())})
        anchored = anchored.model_copy(update={"task": task})
    return anchored
