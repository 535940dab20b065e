"""Fixtures of the tests that train for real: a cached warm-up, cheap processes, and a run that nothing disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import DESKTOP, Screen, running_browser
from runs import Forks, NewTrial, Trial, command


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache folder that all runs share, so that the warm-up is trained once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Where attempts are forked from."""
    server = Forks()
    yield server
    server.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, warm_cache: Path) -> Trial:
    """A run that nothing disturbed, started as a user starts it."""
    trial = Trial(tmp_path_factory.mktemp("reference"), warm_cache)
    process = command(trial)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (0, "", "")
    return trial


@pytest.fixture
def new_trial(tmp_path: Path, warm_cache: Path, reference: Trial) -> NewTrial:
    """Makes a trial in a folder of its own; the warm-up is in the cache already."""

    def make(name: str = "trial", **settings: Any) -> Trial:
        return Trial(tmp_path / name, warm_cache, **settings)

    return make


@pytest.fixture(scope="module")  # its event loop runs as long as it does
def browser() -> Iterator[Any]:
    """A browser of the system, driven by Playwright."""
    with running_browser() as running:
        yield running


@pytest.fixture
def screen(browser: Any) -> Iterator[Any]:
    """Opens pages, and closes them at the end."""
    opened: list[Screen] = []

    def show(address: str, viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> Screen:
        opened.append(Screen(browser, address, viewport, scheme))
        return opened[-1]

    yield show
    for one in opened:
        one.page.close()
