"""A `train` command that gets Ctrl-C before there is a trainer: the run says so afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterkit.backends.base import Place
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.backends.local.train import prepared
from clusterkit.config.resolve import resolve
from clusterkit.runs.status import observe
from clusterkit.runs.trials import run_directory


def test_a_run_that_is_interrupted_before_its_trainer_is_started_says_so_afterwards(tmp_path: Path) -> None:
    config = resolve("tiny", None, [f"fileroot={tmp_path}"]).config
    run = run_directory(config, "run1")

    with pytest.raises(KeyboardInterrupt), prepared(run, config):
        raise KeyboardInterrupt

    assert (observe(run, time.time()).state, run.has_ended) == ("interrupted", True)
    with prepared(run, config) as attempt:
        assert attempt == 2


def test_a_command_that_is_interrupted_between_its_start_and_the_trainers_says_so_afterwards(tmp_path: Path) -> None:
    backend = LocalBackend(Place(fileroot=str(tmp_path)), lambda _: None)
    submitted = backend.start(backend.plan(backend.request("tiny", None, [f"fileroot={tmp_path}"])))

    with pytest.raises(KeyboardInterrupt), backend:
        raise KeyboardInterrupt

    assert (observe(submitted.run, time.time()).state, submitted.run.has_ended) == ("interrupted", True)
