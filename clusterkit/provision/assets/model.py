"""Which models and data sets a run needs on the shared storage, and where each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from clusterkit.data.assets import CATALOGUE
from clusterkit.hosts.model import Cluster
from clusterkit.provision.steps.step import Refused
from trainer.adapter_folder import CONFIG as ADAPTER
from trainer.adapter_folder import is_adapter_folder
from trainer.config import RunConfig

_TASK_DATA = {"hotpotqa": "hotpotqa"}
"""Data set by task; the other tasks generate their own."""

JUDGE = "judge.model"
"""The setting whose model is served by another command."""


class Origin(StrEnum):
    """Where an asset comes from."""

    HUB = "hub"  # downloaded by the head node from the Hugging Face hub or a mirror
    UPLOAD = "upload"  # copied from a folder of this machine
    CACHE = "cache"  # fetched into this machine's cache by `clusterkit assets get`, then copied
    HOST = "host"  # already on the storage; only checked


@dataclass(frozen=True, slots=True)
class NodeAsset:
    """One folder that a run needs on the cluster."""

    kind: str  # model or dataset
    name: str
    folder: str  # on the hosts
    origin: Origin
    source: str = ""  # repository, folder of this machine, asset name, or nothing
    revision: str = "main"
    setting: str = ""  # the run's setting that names `folder`

    @property
    def override(self) -> str:
        """The override of the run's configuration: model.path=/storage/models/NAME."""
        return f"{self.setting}={self.folder}"


def required_assets(
    config: RunConfig, cluster: Cluster, model_path: str = "", data_path: str = ""
) -> tuple[NodeAsset, ...]:
    """Return the models and data sets of a run. The last one may be the model of its judge.

    Args:
        cluster: whose storage holds them.
        model_path: in place of the preset's: a folder of this machine, or an absolute path on the hosts.
        data_path: in place of the preset's, likewise.

    Raises:
        Refused: a path is neither.
    """
    assets = []
    if model := model_path or config.model.path:
        assets.append(asset_of("model", model, cluster, "model.path"))
    if data := data_path or config.data_path or _TASK_DATA.get(config.task.name, ""):
        assets.append(asset_of("dataset", data, cluster, "task.path"))
    judge = config.judge
    if judge.reader == "server" and not judge.url and _can_be_fetched(judge.model):
        assets.append(asset_of("model", judge.model, cluster, JUDGE))
    return tuple(assets)


def _can_be_fetched(name: str) -> bool:
    """Return whether a name can be fetched; a judge may also have the name that its server knows."""
    return name.lower() in CATALOGUE or (name.count("/") == 1 and not name.startswith(("/", ".", "~")))


def asset_of(kind: str, typed: str, cluster: Cluster, setting: str) -> NodeAsset:
    """Return the model or data set that a typed name stands for. Raises Refused for a path that hosts cannot reach."""
    shelf = f"{cluster.storage}/{kind}s"
    name, local = typed.rstrip("/").rpartition("/")[2], Path(typed).expanduser()
    if (asset := typed.lower()) in CATALOGUE:
        return NodeAsset(kind, asset, f"{shelf}/{asset}", Origin.CACHE, asset, setting=setting)
    if typed.startswith(f"{cluster.storage}/"):
        return NodeAsset(kind, name, typed.rstrip("/"), Origin.HOST, setting=setting)
    if local.is_dir():
        if kind == "model" and is_adapter_folder(local):
            raise Refused(
                f"{setting}={typed} is a low-rank adapter, which is merged on the cluster, where its base is to be",
                f"copy it and its base below {cluster.storage}, name the base's folder there as "
                f"base_model_name_or_path in its {ADAPTER}, and give {setting}={cluster.storage}/FOLDER; or give the "
                "folder of a whole model, as checkpoint.merged=true saves",
            )
        name = local.resolve().name
        return NodeAsset(kind, name, f"{shelf}/{name}", Origin.UPLOAD, str(local.resolve()), setting=setting)
    if typed.startswith(("/", "~", ".")):
        raise Refused(
            f"{setting}={typed} is no folder of this machine, and the hosts share only {cluster.storage}",
            f"give a folder of this machine, a path below {cluster.storage}, or a repository such as org/name",
        )
    repository, _, revision = typed.partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise Refused(
            f"{setting}={typed} is neither a folder, nor an asset ({', '.join(CATALOGUE)}), nor a repository",
            "write a repository as org/name or org/name@revision",
        )
    name = repository.partition("/")[2]
    return NodeAsset(kind, name, f"{shelf}/{name}", Origin.HUB, repository, revision or "main", setting)
