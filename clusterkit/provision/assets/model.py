"""What a run needs on the cluster's shared storage, and how each part gets there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from clusterkit.data.assets import CATALOGUE
from clusterkit.hosts.model import Cluster
from clusterkit.provision.steps.step import Refused
from trainer.config import RunConfig

_TASK_DATA = {"hotpotqa": "hotpotqa"}
"""Data set by task; the other tasks make their own."""

JUDGE = "judge.model"
"""The setting of a model that another command serves."""


class Origin(StrEnum):
    """How an asset gets to the cluster."""

    HUB = "hub"  # downloaded by the head node from the Hugging Face hub or a mirror
    UPLOAD = "upload"  # copied from a folder of this machine
    CACHE = "cache"  # as UPLOAD, after `clusterkit assets get` has fetched it here
    HOST = "host"  # is there, and only looked at


@dataclass(frozen=True, slots=True)
class NodeAsset:
    """One folder that a run needs on the cluster.

    kind: model or dataset. folder: on the hosts. source: repository, folder of this machine, asset name, or nothing.
    setting: the run's setting that has to name `folder`.
    """

    kind: str
    name: str
    folder: str
    origin: Origin
    source: str = ""
    revision: str = "main"
    setting: str = ""

    @property
    def override(self) -> str:
        """For the run's configuration: model.path=/storage/models/NAME."""
        return f"{self.setting}={self.folder}"


def required_assets(
    config: RunConfig, cluster: Cluster, model_path: str = "", data_path: str = ""
) -> tuple[NodeAsset, ...]:
    """Return what a run needs, from its resolved configuration; the last one may be the model of its judge.

    model_path, data_path: in place of the preset's; a folder of this machine, or an absolute path on the hosts.

    Raises:
        Refused: a path that is neither.

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
    """Whether a name is one to fetch; a judge may also be named as its server has it."""
    return name.lower() in CATALOGUE or (name.count("/") == 1 and not name.startswith(("/", ".", "~")))


def asset_of(kind: str, wanted: str, cluster: Cluster, setting: str) -> NodeAsset:
    """A model or data set by its name as typed. Raises Refused for a path that hosts cannot get at."""
    shelf = f"{cluster.storage}/{kind}s"
    name, local = wanted.rstrip("/").rpartition("/")[2], Path(wanted).expanduser()
    if (asset := wanted.lower()) in CATALOGUE:
        return NodeAsset(kind, asset, f"{shelf}/{asset}", Origin.CACHE, asset, setting=setting)
    if wanted.startswith(f"{cluster.storage}/"):
        return NodeAsset(kind, name, wanted.rstrip("/"), Origin.HOST, setting=setting)
    if local.is_dir():
        name = local.resolve().name
        return NodeAsset(kind, name, f"{shelf}/{name}", Origin.UPLOAD, str(local.resolve()), setting=setting)
    if wanted.startswith(("/", "~", ".")):
        raise Refused(
            f"{setting}={wanted} is no folder of this machine, and the hosts share only {cluster.storage}",
            f"give a folder of this machine, a path below {cluster.storage}, or a repository such as org/name",
        )
    repository, _, revision = wanted.partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise Refused(
            f"{setting}={wanted} is neither a folder, nor an asset ({', '.join(CATALOGUE)}), nor a repository",
            "write a repository as org/name or org/name@revision",
        )
    name = repository.partition("/")[2]
    return NodeAsset(kind, name, f"{shelf}/{name}", Origin.HUB, repository, revision or "main", setting)
