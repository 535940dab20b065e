"""What an evaluation on a cluster means: checkpoint, data and folders by the places of the cluster's storage."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

import yaml

from clusterkit.backends.base import Say, folder_of_runs
from clusterkit.backends.ray.files import any_exists, run_checked
from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.stage_inputs import FILES, HOTPOTQA, InputStager
from clusterkit.backends.ray.storage import cache_of, list_runs, read_from
from clusterkit.evaluate.request import (
    EvalArguments,
    choose_checkpoint,
    default_names,
    make_request,
    run_by_place,
    run_of,
    run_settings,
)
from clusterkit.provision.assets.model import NodeAsset, Origin, asset_of
from clusterkit.provision.steps.step import Refused
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.serving.engines import remote_servers
from evaluation.config import EvalConfig, WatchConfig
from evaluation.steps import global_step
from trainer.adapter_folder import CONFIG as ADAPTER
from trainer.config import RunConfig
from trainer.config_tasks import FilesConfig, MathConfig
from trainer.errors import RunError, UserError
from trainer.judge.servers import judges_folder, urls_of

NOWHERE = "/nonexistent"
"""In place of a folder of this machine in what goes to another one."""


def output_folder(head: Head, typed: str, user: str | None = None) -> str:
    """Where the answers lie there: below the runs' place, for a name.

    Args:
        typed: --out.
        user: whose answers; None for ours.

    Raises:
        UserError: the place is not shared by the hosts.
    """
    storage = head.cluster.storage
    if typed.startswith(f"{storage}/"):
        return typed.rstrip("/")
    name = PurePosixPath(typed)
    if name.is_absolute() or ".." in name.parts or typed.startswith("~") or not name.parts:
        raise UserError(
            f"--out {typed}: with --cluster it is a name, such as eval, or a folder below {storage}, which is "
            "all that the hosts share"
        )
    return f"{head.fileroot}/eval/{user or user_name()}/{name}"


async def remote_request(
    head: Head, arguments: EvalArguments, say: Say, *, change: bool = True
) -> EvalConfig | WatchConfig:
    """The evaluation, or the watch, in the cluster's places; what is missing there is copied to it.

    Args:
        change: off for a look at what would be asked.

    Raises:
        UserError: a checkpoint or data that are neither there nor here, or a setting that is not allowed.
        RunError, HostError: a download or a copy failed.
    """
    output = output_folder(head, arguments.output_path)
    stager = InputStager(head, say, output, _data_path(head, arguments.data_path))
    watched = await _watched(head, arguments.watch) if arguments.watch else None
    if watched is not None:
        model, settings = "", await _settings(head, watched)
    else:
        model, settings = await _model(head, arguments, stager)
    if arguments.preset:
        settings = run_settings(model, arguments.preset)
    names = []
    for name in arguments.data_names or default_names(settings):
        if name.startswith(f"{head.cluster.storage}/"):
            names.append(name)
        elif "/" in name or name.endswith(FILES):
            names.append(stager.file(Path(name).expanduser()))
        else:
            if not await _own_data(name, settings, stager):
                await stager.suite_data(name)
            names.append(name)
    values = {
        **arguments.values,
        "model_path": model,
        "output_path": output,
        "data_names": names,
        "data_path": stager.data_path(),
        "cache_dir": cache_of(head.cluster),
        "compare": [output_folder(head, folder) for folder in arguments.compare],
    }
    request = make_request(values, settings, arguments.settings)
    if change:
        await stager.bring()
    if watched is None:
        return request
    folder, logs = str(watched.checkpoints), str(watched.logs)
    return WatchConfig(folder=folder, evaluation=request, run_logs=logs, once=arguments.once)


async def _watched(head: Head, typed: str) -> RunDirectory:
    """The run there that is meant by EXPERIMENT/TRIAL, or by the folder of its checkpoints."""
    run = None
    if _is_run(typed):
        run = RunDirectory(Path(head.fileroot), user_name(), *typed.split("/"))
    elif typed.startswith(f"{head.cluster.storage}/"):
        below = (Path(typed, "actor", "epoch"), Path(typed, "epoch"))
        run = next((found for path in below if (found := run_by_place(path)) is not None), None)
    if run is None:
        raise UserError(f"--watch-dir {typed}: with --cluster name a run there, as EXPERIMENT/TRIAL")
    if not await any_exists(head, [str(run.config)]):
        raise UserError(
            f"--watch-dir {typed}: cluster {head.cluster.name} has no such run (no {run.config}): clusterkit status "
            f"--cluster {head.cluster.name} shows the newest"
        )
    return run


def copied_from(head: Head, arguments: EvalArguments, request: EvalConfig | WatchConfig) -> Path | None:
    """The checkpoint of a run of this machine that the request is of; None where it is one of the cluster's own."""
    if isinstance(request, WatchConfig) or not request.model_path.startswith(f"{head.cluster.storage}/models/"):
        return None
    if arguments.model_path is None:
        return None
    local = Path(choose_checkpoint(arguments.model_path, folder_of_runs(arguments.fileroot)))
    return local if local.is_dir() and run_of(local) is not None else None


def _data_path(head: Head, typed: str) -> str:
    if typed.startswith(f"{head.cluster.storage}/") or not typed or Path(typed).expanduser().exists():
        return typed
    raise UserError(
        f"--data-path {typed}: there is no such folder on this machine; one of the cluster is below "
        f"{head.cluster.storage}"
    )


async def _own_data(name: str, settings: RunConfig | None, stager: InputStager) -> bool:
    """Whether a run's own data are where its settings say, on the cluster; its data of this machine are put there."""
    task = settings.task if settings is not None else None
    base = name.partition("@")[0]
    if not isinstance(task, FilesConfig) or not task.path or stager.data:
        return False
    if task.name != ("hotpotqa" if base in HOTPOTQA else base):
        return False
    if task.path.startswith(f"{stager.head.cluster.storage}/") and await any_exists(stager.head, [task.path]):
        return True
    place = Path(task.path).expanduser()
    if name == "math" and isinstance(task, MathConfig) and place.exists():
        task.path, task.dataset = (
            stager.file(place / task.dataset if task.dataset and place.is_dir() else place),
            "",
        )
        return True
    stager.own = place
    return False


async def _model(head: Head, arguments: EvalArguments, stager: InputStager) -> tuple[str, RunConfig | None]:
    """The checkpoint's folder there, and the settings of the run that it is of, here or there."""
    storage, typed = head.cluster.storage, arguments.model_path
    if typed is None or _is_run(typed):
        if newest := await _newest_checkpoint(head, typed):
            return newest, await _settings(head, run_by_place(Path(newest)))
        if typed is None:
            raise RunError(
                f"no checkpoint of a run of {user_name()} on cluster {head.cluster.name}: name one with --model-path"
            )
    elif typed.startswith(f"{storage}/"):
        folder = await _checkpoint_in(head, typed.rstrip("/"))
        return folder, await _settings(head, run_by_place(Path(folder)))
    elif "/" not in typed and await any_exists(
        head, (f"{storage}/models/{typed}/{n}" for n in ("config.json", ADAPTER))
    ):
        return f"{storage}/models/{typed}", None
    local = choose_checkpoint(typed, folder_of_runs(arguments.fileroot))
    try:
        asset = asset_of("model", local, head.cluster, "--model-path")
    except Refused as refusal:
        shelf = f"{storage}/models/{typed} is not there, and "
        raise UserError(f"{'' if '/' in typed else shelf}{refusal.message}: {refusal.fix}") from refusal
    if asset.origin is Origin.HUB and arguments.model_path is not None:
        stager.say(f"{typed} is no run here or on the cluster: taken as a repository of the hub")
    settings = None
    if asset.origin is Origin.UPLOAD:
        settings, asset = _of_this_machine(Path(asset.source), asset)
    return await stager.asset(asset), settings


def _of_this_machine(folder: Path, asset: NodeAsset) -> tuple[RunConfig | None, NodeAsset]:
    """Settings of a run of this machine, and its checkpoint under a name that tells it from those of other runs."""
    settings, run = run_settings(str(folder), None), run_of(folder)
    if settings is None or run is None:
        return None, asset
    name = f"{run.experiment}-{run.trial}-{folder.name}"
    settings = settings.model_copy(update={"fileroot": NOWHERE})  # judges of this machine do not answer there
    return settings, replace(asset, name=name, folder=f"{asset.folder.rpartition('/')[0]}/{name}")


def _is_run(typed: str) -> bool:
    """Whether it can be EXPERIMENT/TRIAL."""
    return typed.count("/") == 1 and not typed.startswith(("/", ".", "~")) and not Path(typed).is_dir()


async def _newest_checkpoint(head: Head, run: str | None) -> str:
    """The checkpoint of the highest step of a run (EXPERIMENT/TRIAL, else the one started last); empty without any."""
    root = f"{head.fileroot}/checkpoints/{user_name()}"
    found = await _checkpoints(head, f"{root}/{run}" if run else root)
    if not found:
        return ""
    listed = [] if run else await list_runs(head.session, head.fileroot, user_name())
    starts: dict[tuple[str, ...], float] = {(one.run.experiment, one.run.trial): one.started for one in listed}
    _, newest = max(found, key=lambda one: (starts.get(one[1].relative_to(root).parts[:2], 0.0), one[0]))
    return _of_highest_step(path for _, path in found if path.parent == newest.parent)


async def _checkpoint_in(head: Head, folder: str) -> str:
    """The folder, or the newest checkpoint below it where it is none itself. Raises UserError where there is none."""
    if await any_exists(head, [f"{folder}/config.json", f"{folder}/{ADAPTER}"]):
        return folder
    if not (found := await _checkpoints(head, folder)):
        raise UserError(f"--model-path {folder}: no checkpoint there on cluster {head.cluster.name} (no config.json)")
    return _of_highest_step(path for _, path in found)


async def _checkpoints(head: Head, folder: str) -> list[tuple[float, Path]]:
    """Checkpoints below a folder there, with the time of their last change."""
    below = shlex.quote(folder)
    find = f"find {below} -ignore_readdir_race -name config.json -path '*/epoch*' -printf '%T@ %h\\n'"
    lines = (await run_checked(head, f"[ ! -d {below} ] || {find}")).splitlines()
    found = [(float(moment), Path(path)) for moment, _, path in (line.partition(" ") for line in lines)]
    return [one for one in found if global_step(one[1]) is not None]


def _of_highest_step(checkpoints: Iterable[Path]) -> str:
    return str(max(checkpoints, key=lambda path: global_step(path) or 0))


async def _settings(head: Head, run: RunDirectory | None) -> RunConfig | None:
    """The settings of a run there; None without one."""
    text = await read_from(head.session, run.config, 0) if run is not None else b""
    if run is None or not text:
        return None
    try:
        settings = RunConfig.model_validate(yaml.safe_load(text))
    except (ValueError, yaml.YAMLError):
        return None
    if not settings.judge.url and (url := await _judge_urls(head, run)):
        judge = settings.judge.model_copy(update={"url": url})
        settings = settings.model_copy(update={"judge": judge})
    return settings


async def _judge_urls(head: Head, run: RunDirectory) -> str:
    """Addresses of the servers that answer for a run there, with commas; empty without any."""
    return ",".join(
        urls_of(await remote_servers(head, judges_folder(run.fileroot, run.user, run.experiment, run.trial)))
    )
