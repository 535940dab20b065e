"""From what was typed to an EvalConfig: the checkpoint, and the settings of the run or preset that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clusterkit.config.overrides import explain, known_field, parse_value
from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import RunDirectory, runs, user_name
from clusterkit.runs.trials import saved_config
from evaluation.config import EvalConfig
from evaluation.steps import checkpoints_in, place_of_run
from trainer.assets import MODEL_ASSETS
from trainer.config import RunConfig
from trainer.config_choices import CHOICES
from trainer.config_tasks import HotpotqaConfig, MathConfig
from trainer.errors import RunError, UserError
from trainer.judge.servers import judge_urls, judges_folder

LIMITS = ("chunk_tokens", "max_question_tokens", "max_memory_tokens", "max_final_tokens")
"""Lengths of the agent that the model's context window bounds."""
ADVICE = ": leave it out, or take that name as well (--set)"


@dataclass(frozen=True)
class EvalArguments:
    """What was typed."""

    model_path: str | None  # the checkpoint; None for the newest
    output_path: str  # folder of the results; on a cluster a name, or a path there
    data_names: tuple[str, ...]  # suites and files; empty for those of the run
    data_path: str  # folder that data are looked for in first
    preset: str | None  # whose agent settings hold
    compare: tuple[str, ...]  # folders of earlier results
    settings: tuple[str, ...]
    values: dict[str, Any]  # fields of `EvalConfig` that need no translation
    fileroot: str | None = None  # where runs of this machine are, as typed
    watch: str = ""  # in place of a checkpoint, the folder or run whose checkpoints are watched; empty for none
    once: bool = False  # see `WatchConfig`
    cache_dir: str = ""


@dataclass(frozen=True)
class SubmittedEval:
    """An evaluation that goes on without us."""

    submission_id: str  # its job
    output: str
    log: str
    place: str  # options that name the place, such as `--cluster lab`
    attached: bool = False  # it ran already

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        state = "attached" if self.attached else "started"
        return {"state": state, "submission_id": self.submission_id, "output_path": self.output, "log": self.log}


def choose_checkpoint(typed: str | None, fileroot: Path) -> str:
    """The checkpoint that is meant: a folder or asset as typed, the newest of EXPERIMENT/TRIAL, or of the newest run.

    Raises:
        UserError: the folder that was typed is not there. RunError: no run has a checkpoint.
    """
    if typed is not None:
        folder = Path(typed).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file() and (inside := checkpoints_in(folder)):
            return str(inside[-1].absolute())
        if folder.is_file():
            raise UserError(f"--model-path {typed} is a file: name the folder of a checkpoint")
        if folder.exists():
            return str(folder.absolute())
        if typed.startswith(("/", ".", "~")) or typed.count("/") > 1:
            raise UserError(
                f"--model-path {typed}: there is no such folder: name one with a checkpoint, EXPERIMENT/TRIAL of a run "
                "or an asset (clusterkit assets list)"
            )
        if "/" not in typed:
            return typed
        experiment, trial = typed.split("/")
        for run in runs(fileroot, experiment, trial):
            if inside := checkpoints_in(run.checkpoints):
                return str(inside[-1])
        return typed
    for run in reversed(runs(fileroot)):
        if inside := checkpoints_in(run.checkpoints):
            return str(inside[-1])
    raise RunError(
        f"no checkpoint of a run under {fileroot}: name one with --model-path FOLDER, or train first, such as "
        "clusterkit train --preset tiny"
    )


def checkpoint_here(typed: str | None, fileroot: Path) -> str:
    """As `choose_checkpoint`, on this machine, which downloads nothing: a name that means nothing here is refused.

    Raises:
        UserError: the folder that was typed is not there. RunError: there is no such run or asset, or the run has no
            checkpoint.
    """
    checkpoint = choose_checkpoint(typed, fileroot)
    if Path(checkpoint).exists() or checkpoint.lower() in MODEL_ASSETS:
        return checkpoint
    known = runs(fileroot)
    names = [run.name for run in known]
    if checkpoint in names:
        raise RunError(
            f"{checkpoint} under {fileroot} has no checkpoint yet (clusterkit status shows how it is doing); name "
            "another with --model-path"
        )
    listed = (
        f"; runs: {', '.join(names[-5:])}" if names else ", which has no runs (--fileroot FOLDER for another folder)"
    )
    if "/" in checkpoint:
        raise RunError(f"no run {checkpoint} under {fileroot}{listed}. There is no folder of that name either")
    raise RunError(
        f"--model-path {checkpoint} is no folder and no asset ({', '.join(MODEL_ASSETS)}). A run is named "
        f"EXPERIMENT/TRIAL, under {fileroot}{listed}"
    )


def run_of(checkpoint: Path) -> RunDirectory | None:
    """The run that wrote a checkpoint, by where it lies; None for one from elsewhere."""
    run = run_by_place(checkpoint)
    return run if run is not None and run.config.is_file() else None


def run_by_place(checkpoint: Path) -> RunDirectory | None:
    """The run whose checkpoints lie there, here or on a cluster, should there be one; None for another place."""
    place = place_of_run(checkpoint)
    return RunDirectory(*place) if place is not None else None


def run_settings(checkpoint: str, preset: str | None) -> RunConfig | None:
    """The settings that a checkpoint was trained with, or those of the preset that is named; None where unknown."""
    if preset is not None:
        return resolve(preset).config
    run = run_of(Path(checkpoint))
    return None if run is None else saved_config(run)


def default_names(config: RunConfig | None) -> list[str]:
    """The suite of the task that a run trains on, or where it holds no problem out, one of others."""
    task = config.task if config is not None else None
    if isinstance(task, MathConfig) and not task.eval_fraction:
        return ["math_500"]
    if task is not None and task.name in ("recall", "needles", "facts", "math", "memalpha"):
        return [task.name]
    if isinstance(task, HotpotqaConfig):
        return [f"ruler_hqa@{task.num_documents}"]
    raise UserError("no data set named: add --data-names, such as math_500,aime24 or ruler_hqa@50")


def make_request(values: dict[str, Any], settings: RunConfig | None, assignments: Sequence[str]) -> EvalConfig:
    """A validated configuration.

    Args:
        settings: of the run, for agent and task; None: nobody has set the agent's lengths, but for `assignments`.

    Raises:
        UserError: a value that is not allowed, or a key that is not known, with the nearest ones.
    """
    tree: dict[str, Any] = {}
    if settings is not None:
        tree = {"agent": settings.agent.model_dump(), "task": settings.task.model_dump()}
        tree["judge"] = settings.judge.model_dump()
        if not settings.judge.url:
            folder = judges_folder(settings.fileroot, user_name(), settings.experiment_name, settings.trial_name)
            tree["judge"]["url"] = ",".join(judge_urls(folder))
        tree["server"] = {"prefill_delay_ms": getattr(settings.servers, "prefill_delay_ms", 0.0)}
    tree |= {**values, "server": tree.get("server", {}) | values.get("server", {})}
    typed = set[str]()
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"--set {assignment}: write KEY=VALUE, such as --set agent.chunk_tokens=512")
        value = parse_value(known_field(key, EvalConfig), text)
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        if key == "agent.template_file":
            place.pop("wording", None)  # of the file that the run was trained with
        place[leaf] = value
        typed.add(key)
    if settings is None:
        tree["free_limits"] = [name for name in LIMITS if f"agent.{name}" not in typed]
    _drop_others(tree, typed)
    try:
        return EvalConfig.model_validate(tree)
    except ValidationError as error:
        lines = (explain(problem, EvalConfig, "this evaluation", ADVICE) for problem in error.errors())
        raise UserError("\n".join(lines)) from None


def _drop_others(tree: dict[str, Any], typed: set[str]) -> None:
    """Take out what the run's task or agent has and the one that was typed instead does not."""
    for section, choice in CHOICES.items():
        part = tree.get(section, {})
        name = part.get(choice.key, choice.default)
        others = [field for field in part if choice.lacks(name, field) and f"{section}.{field}" not in typed]
        for field in others:
            del part[field]
