"""Where the first host has its image from: a tag that has moved is held by the lock file and let go by --image-refresh,
and an archive on the storage spares the registry. The docker command is a stand-in with a registry of one tag;
tests/cluster/test_image_distribution.py shows the same with a real one.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from localsession import LocalSession
from realparts import require

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.images.archive import Archive
from clusterkit.provision.images.context import CONTENT_LABEL, Recipe
from clusterkit.provision.images.distribute import Distribution, ImageOutcome, Method
from clusterkit.provision.images.identity import Image, ImageError
from clusterkit.provision.images.lock import Lock
from clusterkit.provision.steps.step import DesiredState
from clusterkit.setup.imagestage import ImageRequest, ImageStage
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.setup import Request, Setup

NAME = "registry.example/team/app"
TAG = f"{NAME}:1"
OLD, NEW = (f"{NAME}@sha256:{number * 64}" for number in "12")
DOCKER = """#!/bin/sh
case $1 in
  image) cat "$STORE/here" 2>/dev/null || { echo 'Error: No such image' >&2; exit 1; } ;;
  manifest) printf '{"Descriptor": {"digest": "%s"}}' "$(sed 's/.*@//' "$STORE/means")" ;;
  pull)
    echo "$2" >>"$STORE/pulled"
    [ -e "$STORE/${2##*:}" ] || { echo 'Error: manifest unknown'; exit 1; }
    cp "$STORE/${2##*:}" "$STORE/here"
    ;;
  load) cat >"$STORE/loaded"; grep -q Id "$STORE/loaded" && cp "$STORE/loaded" "$STORE/here" ;;
esac
"""


class Store:
    """What the registry has, what the tag means there, and what the host has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tool = folder / "bin" / "docker"
        tool.parent.mkdir()
        tool.write_text(DOCKER)
        tool.chmod(0o755)
        for digest in (OLD, NEW):
            (folder / digest.rpartition(":")[2]).write_text(record(digest))
        self.means(NEW)
        self.session = LocalSession(environment={"STORE": str(folder), "PATH": f"{tool.parent}:{os.environ['PATH']}"})

    def means(self, digest: str) -> None:
        (self.folder / "means").write_text(digest)

    def has(self, digest: str) -> None:
        (self.folder / "here").write_text(record(digest))

    def loses(self, digest: str) -> None:
        (self.folder / digest.rpartition(":")[2]).unlink()

    def pulled(self) -> list[str]:
        file = self.folder / "pulled"
        return file.read_text().split() if file.exists() else []

    def seed(self, *, refresh: bool, pinned: str = OLD) -> tuple[ImageOutcome, Distribution]:
        lock = Lock.of(Image(TAG, image_id(pinned), pinned))
        wanted = Distribution(TAG, lock=lock, refresh=refresh, storage=str(self.storage))
        return asyncio.run(wanted.seed(self.session)), wanted

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    def keeps(self, digest: str, image: str = "", reference: str = TAG, **changes: object) -> None:
        """Have an archive of an image on the storage, with a record that may differ from it."""
        data = gzip.compress((image or record(digest)).encode())
        path = self.storage / "images" / f"{digest[-64:]}.tar.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        sha = hashlib.sha256(data).hexdigest()
        archive = Archive(str(path), reference, image_id(digest), "", 1, "gzip", len(data), sha)
        path.with_name(f"{digest[-64:]}.json").write_text(json.dumps(asdict(archive) | changes))


def image_id(digest: str) -> str:
    return "sha256:" + digest[-1] * 64


def record(digest: str) -> str:
    layers = {"Layers": [digest]}
    return json.dumps({"Id": image_id(digest), "RepoDigests": [digest], "Size": 1, "RootFS": layers, "Config": {}})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    require(os.geteuid() == 0, "the scripts run as root")
    return Store(tmp_path)


@pytest.mark.parametrize("there", [None, OLD, NEW])
def test_the_lock_holds_and_a_refresh_lets_go(store: Store, there: str | None) -> None:
    if there:
        store.has(there)
    outcome, _ = store.seed(refresh=False)
    assert outcome.image is not None
    assert outcome.image.repo_digest == OLD

    outcome, _ = store.seed(refresh=True)
    assert outcome.image is not None
    assert (outcome.image.repo_digest, outcome.method) == (NEW, Method.PULL)

    before = store.pulled()
    again, _ = store.seed(refresh=True, pinned=NEW)
    assert (again.method, store.pulled()) == (Method.PRESENT, before)


def test_a_pinned_image_that_is_gone_says_how_to_get_another(store: Store) -> None:
    store.loses(OLD)
    with pytest.raises(ImageError, match=r"the lock file pins registry\.example/team/app:1 to this digest") as caught:
        store.seed(refresh=False)
    assert caught.value.fix.startswith("--image-refresh takes what the tag means now")

    store.has(NEW)
    outcome, wanted = store.seed(refresh=False)
    assert outcome.method is Method.PRESENT
    assert "--image-refresh" in " ".join(wanted.notes)


def test_a_refresh_that_cannot_be_had_is_no_success(store: Store) -> None:
    store.has(OLD)
    store.loses(NEW)
    with pytest.raises(ImageError, match="cannot be pulled"):
        store.seed(refresh=True)


def test_an_archive_on_the_storage_spares_the_registry(store: Store) -> None:
    store.keeps(OLD)
    outcome, _ = store.seed(refresh=False)
    assert (outcome.method, outcome.image.image_id) == (Method.STORAGE, image_id(OLD))
    assert store.pulled() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sha256": "0" * 64}, "it is damaged: size or SHA-256 are not those of its record"),
        ({"size": 5}, "it is damaged"),
        ({"content": "another"}, "the lock file pins another image of that name"),
        ({"image": record(NEW)}, "it holds another image"),
        ({"image": "{}"}, "cannot be loaded"),
    ],
)
def test_an_archive_of_no_use_is_named_with_the_reason(store: Store, changes: dict[str, str], why: str) -> None:
    store.keeps(OLD, **changes)  # type: ignore[arg-type]
    outcome, wanted = store.seed(refresh=False)
    assert (outcome.method, outcome.image.repo_digest) == (Method.PULL, OLD)
    assert f"{OLD[-64:]}.tar.gz is not used: {why}" in " ".join(wanted.notes)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"CLUSTERKIT_{name}", str(tmp_path / name))


def run_stage(store: Store, request: ImageRequest, tmp_path: Path) -> HostRunner:
    """The stage of a cluster of one host, whose session is this machine."""
    cluster = Cluster(hosts=(Host(name="here"),), storage=str(store.storage))
    stage = ImageStage(request)
    setup = Setup(
        Request(cluster, cluster.hosts, DesiredState(cluster), Needs(), tmp_path, stages=(stage,)),
        lambda _: None,  # type: ignore[arg-type,return-value]
        lambda _: None,
    )
    runner = setup.head_runner
    runner.session = store.session
    asyncio.run(stage.run(setup, runner))
    return runner


def test_a_cluster_of_one_host_has_its_image_from_the_storage_too(store: Store, tmp_path: Path) -> None:
    store.keeps(OLD)
    runner = run_stage(store, ImageRequest(TAG), tmp_path)
    assert runner.report.changes == [f"get the runtime image {TAG} (storage)"]
    assert store.pulled() == []


def test_an_image_that_was_built_from_the_same_recipe_is_not_built_again(store: Store, tmp_path: Path) -> None:
    recipe = Recipe("cpu")
    built = json.loads(record(OLD)) | {"Config": {"Labels": {CONTENT_LABEL: recipe.content}}, "RepoDigests": []}
    store.keeps(OLD, json.dumps(built), recipe.reference)
    runner = run_stage(store, ImageRequest(), tmp_path)
    assert runner.report.changes == [f"get the runtime image {recipe.reference} (storage)"]
