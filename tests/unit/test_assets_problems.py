"""`clusterkit assets get` of the problem sets: what is published is what arrives, and evaluations find it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub import FakeHub

from clusterkit.data.assets import get_asset
from clusterkit.data.assets.problems import PUBLISHED
from evaluation.suites import PROBLEMS, Finder
from trainer.errors import RunError, UserError


def quiet(text: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def published(hub: FakeHub, content: bytes) -> None:
    """Have the hub hold the published file of math_500."""
    hub.repositories["HuggingFaceH4/MATH-500"] = {"test.jsonl": content}


def test_every_suite_of_problems_can_be_fetched() -> None:
    assert set(PUBLISHED) == set(PROBLEMS)


@pytest.mark.data
def test_a_set_comes_from_the_hub_and_is_found_by_evaluations(
    shared_data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = (shared_data / "math" / "math_500.jsonl.gz").read_bytes()
    with FakeHub({}) as hub:
        published(hub, gzip.decompress(packed))
        command = [sys.executable, "-m", "clusterkit.cli.main", "assets", "get", "math_500", "--json"]
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "CLUSTERKIT_CACHE": str(cache)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        record = json.loads(done.stdout)
        assert (record["outcome"], record["questions"]) == ("fetched", 500)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert get_asset("math_500", "", str(cache), say=quiet)["outcome"] == "present"
    suite = Finder(cache_dir=str(cache)).suite("math_500")
    assert suite.source == str(cache / "math_500" / "test.jsonl")
    assert len(suite.load(len)) == 500


def test_bytes_other_than_the_published_ones_are_refused_and_nothing_stays(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub({}) as hub:
        published(hub, b'{"problem": "1+1", "solution": "\\\\boxed{2}"}\n')
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(RunError, match="differs from the published one"):
            get_asset("math_500", "", str(cache), say=quiet)
    assert not list(cache.glob("math_500*"))


def test_an_unreachable_hub_is_told_with_the_way_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub({}) as hub:
        url = hub.url
    monkeypatch.setenv("HF_ENDPOINT", url)
    with pytest.raises(RunError, match="download it elsewhere and add --from FILE"):
        get_asset("aime25", "", str(cache), say=quiet)


def test_a_file_of_ones_own_stands_in_when_it_can_be_read(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"problem": "1+1", "answer": "2"}\n')
    assert get_asset("aime25", str(file), str(cache), say=quiet)["questions"] == 1
    assert len(Finder(cache_dir=str(cache)).suite("aime25").load(len)) == 1
    file.write_text('{"problem": "1+1"}\n')
    with pytest.raises(UserError, match=r"test\.jsonl, line 1: there is no true answer in it"):
        get_asset("aime25", str(file), str(cache), force=True, say=quiet)
    with pytest.raises(UserError, match="no such file or folder"):
        get_asset("amc23", str(tmp_path / "nowhere"), str(cache), say=quiet)
