"""What an evaluation on a cluster means: checkpoint, data and folders by the places of the cluster's storage."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from clusterkit.dispatch.files import said
from clusterkit.dispatch.head import Head
from clusterkit.dispatch.storage import cache_of, read_from
from clusterkit.evaluating.request import default_names, global_step, make_request, run_by_place, run_settings
from clusterkit.node_assets.hub import Hub
from clusterkit.node_assets.model import NodeAsset, Origin, needed
from clusterkit.node_assets.provide import provide
from clusterkit.node_assets.view import look, wrong
from clusterkit.rundir import RunDirectory, user_name
from clusterkit.serving import there
from clusterkit.steps.api import Refused
from evaluation.config import EvalConfig
from evaluation.suites import PROBLEMS
from evaluation.suites.problems import places_of
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.judge.registry import judges_folder, urls_of

Say = Callable[[str], None]
_NEEDS_HOTPOTQA = ("ruler_hqa", "ruler_qa")
_FILES = (".jsonl", ".jsonl.gz", ".json")


@dataclass(frozen=True)
class Wanted:
    """What was typed. values: fields of EvalConfig that need no translation. output_path: a name, or a path there."""

    model_path: str | None
    output_path: str
    data_names: tuple[str, ...]
    data_path: str
    preset: str | None
    compare: tuple[str, ...]
    settings: tuple[str, ...]
    values: dict[str, Any]


def output_folder(head: Head, typed: str) -> str:
    """Where the answers lie there: below the runs' place, for a name. Raises UserError for a place that is not shared.

    typed: --output-path.
    """
    storage = head.cluster.storage
    if typed.startswith(f"{storage}/"):
        return typed.rstrip("/")
    name = PurePosixPath(typed)
    if name.is_absolute() or ".." in name.parts or typed.startswith("~") or not name.parts:
        raise UserError(
            f"--output-path {typed}: with --cluster it is a name, such as eval, or a folder below {storage}, which is "
            "all that the hosts share"
        )
    return f"{head.fileroot}/eval/{user_name()}/{name}"


async def request_there(head: Head, wanted: Wanted, say: Say, *, change: bool = True) -> EvalConfig:
    """The evaluation in the cluster's places; what is missing there is copied to it.

    change: off for a look at what would be asked.

    Raises:
        UserError: a checkpoint or data that are neither there nor here, or a setting that is not allowed.
        RunError, HostError: a download or a copy failed.

    """
    storage = head.cluster.storage
    bring = _Bringer(head, say, change)
    output = output_folder(head, wanted.output_path)
    if wanted.data_path and not wanted.data_path.startswith(f"{storage}/"):
        raise UserError(
            f"--data-path {wanted.data_path}: with --cluster it is a folder below {storage}; files of this machine can "
            "be named in --data-names"
        )
    data_path = wanted.data_path or f"{storage}/datasets"
    model = await _model(head, wanted.model_path, bring)
    settings = run_settings(model, wanted.preset) if wanted.preset else await _settings(head, model)
    names = [await _data(head, name, data_path, output, bring) for name in wanted.data_names or default_names(settings)]
    values = {
        **wanted.values,
        "model_path": model,
        "output_path": output,
        "data_names": names,
        "data_path": data_path,
        "cache_dir": cache_of(head.cluster),
        "compare": [output_folder(head, folder) for folder in wanted.compare],
    }
    return make_request(values, settings, wanted.settings)


class _Bringer:
    """Has on the storage what an evaluation needs of it."""

    def __init__(self, head: Head, say: Say, change: bool) -> None:
        self.head, self.say, self.change = head, say, change

    async def asset(self, asset: NodeAsset) -> str:
        """Its folder there. Raises UserError where only a download by the head node could bring it."""
        problem = wrong(asset, await look(self.head.session, asset))
        if not problem:
            return asset.folder
        if asset.origin is Origin.HOST:
            raise UserError(f"{problem}: name a folder that the hosts have, or one of this machine")
        if asset.origin is Origin.HUB:
            raise UserError(
                f"{asset.kind} {asset.name} is not on the cluster ({problem}): fetch it with clusterkit setup "
                f"--cluster {self.head.cluster.name} --preset tiny --no-train --model-path {asset.source}"
            )
        if self.change:
            self.say(f"copying {asset.kind} {asset.name} to {asset.folder}")
            await self._provide(asset)
        return asset.folder

    async def file(self, source: Path, target: str) -> None:
        """Copy one file of this machine."""
        if self.change:
            self.say(f"copying {source} to {target}")
            await said(self.head, f"umask 022; mkdir -p {shlex.quote(str(PurePosixPath(target).parent))}")
            await self.head.session.put(source, target, root=True)

    async def _provide(self, asset: NodeAsset) -> None:
        async def nothing(_: object) -> None:
            raise AssertionError("only the hub's assets take actions")

        try:
            await provide(self.head.session, asset, self.head.cluster, Hub(image=""), nothing, say=self.say)
        except Refused as refusal:
            raise UserError(f"{refusal.message}: {refusal.fix}") from refusal


async def _model(head: Head, typed: str | None, bring: _Bringer) -> str:
    storage = head.cluster.storage
    if typed is None or _is_run(typed):
        if newest := await _newest_checkpoint(head, typed):
            return newest
        if typed is None:
            raise UserError(
                f"no checkpoint of a run of {user_name()} on cluster {head.cluster.name}: name one with --model-path"
            )
    elif typed.startswith(f"{storage}/"):
        return await _inside(head, typed.rstrip("/"))
    elif "/" not in typed and await _there(head, f"{storage}/models/{typed}/config.json"):
        return f"{storage}/models/{typed}"
    try:
        (asset, *_) = needed(RunConfig(), head.cluster, model_path=typed)
    except Refused as refusal:
        shelf = f"{storage}/models/{typed} is not there, and "
        raise UserError(
            f"{'' if '/' in typed else shelf}{refusal.message.replace('model.path=', '--model-path ')}: {refusal.fix}"
        ) from refusal
    return await bring.asset(asset)


def _is_run(typed: str) -> bool:
    """Whether it can be EXPERIMENT/TRIAL."""
    return typed.count("/") == 1 and not typed.startswith(("/", ".", "~")) and not Path(typed).is_dir()


async def _newest_checkpoint(head: Head, run: str | None) -> str:
    """The checkpoint of the highest step of a run (EXPERIMENT/TRIAL, else the run written to last); empty without."""
    root = f"{head.fileroot}/checkpoints/{user_name()}"
    below = shlex.quote(f"{root}/{run}" if run else root)
    script = f"find {below} -name config.json -path '*/epoch*' -printf '%T@ %h\\n' 2>/dev/null; true"
    found = [line.partition(" ")[::2] for line in (await said(head, script)).splitlines()]
    checkpoints = [(float(moment), Path(path)) for moment, path in found if global_step(Path(path)) is not None]
    if not checkpoints:
        return ""
    _, newest = max(checkpoints)
    of_its_run = [path for _, path in checkpoints if path.parent == newest.parent]
    return str(max(of_its_run, key=lambda path: global_step(path) or 0))


async def _inside(head: Head, folder: str) -> str:
    """The folder, or the newest checkpoint below it where it is none itself. Raises UserError where there is none."""
    if await _there(head, f"{folder}/config.json"):
        return folder
    script = f"find {shlex.quote(folder)} -name config.json -path '*/epoch*' -printf '%h\\n' 2>/dev/null; true"
    paths = [Path(line) for line in (await said(head, script)).splitlines() if global_step(Path(line)) is not None]
    if not paths:
        raise UserError(f"--model-path {folder}: no checkpoint there on cluster {head.cluster.name} (no config.json)")
    return str(max(paths, key=lambda path: global_step(path) or 0))


async def _settings(head: Head, model: str) -> RunConfig | None:
    """The settings that a checkpoint there was trained with; None for one from elsewhere."""
    run = run_by_place(Path(model))
    text = await read_from(head.session, run.config, 0) if run is not None else b""
    if run is None or not text:
        return None
    try:
        settings = RunConfig.model_validate(yaml.safe_load(text))
    except (ValueError, yaml.YAMLError):
        return None
    if not settings.judge.url and (url := await _judge(head, run)):
        judge = settings.judge.model_copy(update={"url": url})
        settings = settings.model_copy(update={"judge": judge})
    return settings


async def _judge(head: Head, run: RunDirectory) -> str:
    """Addresses of the servers that answer for a run there, with commas; empty without any."""
    return ",".join(urls_of(await there(head, judges_folder(run.fileroot, run.user, run.experiment, run.trial))))


async def _data(head: Head, name: str, data_path: str, output: str, bring: _Bringer) -> str:
    """A data set by the name or path that it has there."""
    if name.startswith(f"{head.cluster.storage}/"):
        return name
    if "/" in name or name.endswith(_FILES):
        return await _file(Path(name).expanduser(), output, bring)
    base = name.partition("@")[0]
    data = "hotpotqa" if base in _NEEDS_HOTPOTQA else base if base in PROBLEMS else ""
    if data:
        shapes = ["hotpotqa/questions.jsonl", "questions.jsonl"] if data == "hotpotqa" else places_of(data)
        if not await _any_there(head, [f"{data_path}/{shape}{end}" for shape in shapes for end in ("", ".gz")]):
            folder = f"{head.cluster.storage}/datasets/{data}"
            await bring.asset(NodeAsset("dataset", data, folder, Origin.CACHE, data))
    return name


async def _file(path: Path, output: str, bring: _Bringer) -> str:
    """A file of this machine, copied beside the answers under a name that its content has a part in."""
    source = next((file for file in (path / "test.jsonl", path / "test.jsonl.gz") if file.is_file()), path)
    if not source.is_file():
        raise UserError(f"{path}: there is no such file on this machine: name one, or a file on the cluster's storage")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    target = f"{output}/data/{digest}/{source.absolute().parent.name}/{source.name}"
    await bring.file(source, target)
    return target


async def _there(head: Head, path: str) -> bool:
    return await _any_there(head, [path])


async def _any_there(head: Head, paths: Sequence[str]) -> bool:
    listed = " ".join(shlex.quote(path) for path in paths)
    script = f'for path in {listed}; do [ ! -e "$path" ] || {{ echo yes; break; }}; done'
    return bool((await said(head, script)).strip())
