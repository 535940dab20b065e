"""A tag that has moved: the lock file holds it, --image-refresh lets it go. The docker command is a stand-in with a
registry of one tag; tests/cluster/test_image_distribution.py shows the same with a real one.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from localsession import LocalSession
from realparts import require

from clusterkit.provision.images.distribute import Distribution, ImageOutcome, Method
from clusterkit.provision.images.identity import Image, ImageError
from clusterkit.provision.images.lock import Lock

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
        wanted = Distribution(TAG, lock=lock, refresh=refresh)
        return asyncio.run(wanted.seed(self.session)), wanted


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
