"""Which Python trains, evaluates and serves where GPUs are taken: that of `make gpu`, which is found by itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from gpuhost import stand_in

from clusterkit.backends.base import Place, RunOutcome, SubmittedRun
from clusterkit.backends.local import backend as local_backend
from clusterkit.backends.local import interpreter
from clusterkit.backends.local.interpreter import FOLDER, VARIABLE, gpu_python, missing_packages, python_here
from clusterkit.backends.local.launch import Ending
from clusterkit.capacity.runnable import refusal, require_engine, require_local_gpus
from clusterkit.config.resolve import resolve
from clusterkit.evaluate import process
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.trials import choose_trial
from trainer.errors import UserError


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `.venv-gpu` beside this one's environment, and two GPUs; its Python is this one under another path."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("CLUSTERKIT_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    python = tmp_path / FOLDER / "bin" / "python"
    python.parent.mkdir(parents=True)
    stand_in(python.parent, "python", f'exec {sys.executable} "$@"')
    for number in range(2):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    monkeypatch.setattr(interpreter, "NVIDIA_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(interpreter, "REPOSITORY", tmp_path / "elsewhere")
    return python


def trainer_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[str]:
    """Command line of the trainer that a run on this machine starts."""
    started: list[Any] = []

    def follow(run: RunDirectory, command: list[str], *_: Any) -> RunOutcome:
        started.append(command)
        return RunOutcome("completed", 0, "", None, 0)

    monkeypatch.setattr(local_backend, "follow", follow)
    with local_backend.LocalBackend(Place(fileroot=str(tmp_path / "runs")), print) as backend:
        request = backend.request("tiny", None, [f"fileroot={tmp_path / 'runs'}", *settings])
        submitted: SubmittedRun = backend.start(backend.plan(request))
        backend.follow(submitted, None, "again")  # type: ignore[arg-type]
    return list(started[0])


GPU = ("n_gpus_per_node=1", "allocation_mode=sglang:d1|fsdp:d1")


def test_a_run_on_gpus_is_trained_there_and_one_without_here(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trainer_of(tmp_path, monkeypatch, *GPU)[:3] == [str(made), "-P", "-m"]
    assert trainer_of(tmp_path, monkeypatch, "trial_name=other")[0] == sys.executable


def test_evaluations_and_servers_go_there_where_there_are_gpus(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def run_trainer(argv: list[str], *_: Any) -> Ending:
        started.append(argv)
        return Ending(0, 0)

    monkeypatch.setattr(process, "run_trainer", run_trainer)
    process.run_node(["evaluation", "request.yaml"], tmp_path / "console", lambda _: None, lambda: None)
    monkeypatch.setattr(interpreter, "NVIDIA_GPUS", tmp_path / "none")
    process.run_node(["evaluation", "request.yaml"], tmp_path / "console", lambda _: None, lambda: None)
    assert [argv[0] for argv in started] == [str(made), sys.executable]


def test_a_variable_names_another(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "mine", "exit 3")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert gpu_python() == python_here() == str(tmp_path / "mine")
    with pytest.raises(UserError, match=r"mine does not run .*: make gpu mends \.venv-gpu"):
        missing_packages(gpu_python(), ["torch"])
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="nothing is no program: name the interpreter that `make gpu` made"):
        gpu_python()


def test_a_python_that_has_an_engine_stays(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site" / "sglang").mkdir(parents=True)
    (tmp_path / "site" / "sglang" / "__init__.py").touch()
    assert gpu_python() == str(made)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert gpu_python() == sys.executable


def test_what_it_lacks_is_found_before_anything_starts(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    config = resolve("tiny", None, GPU).config
    require_local_gpus(config)
    assert missing_packages(str(made), ["torch", "trainer", "no_such_package"]) == ["no_such_package"]
    with pytest.raises(UserError, match=r"SGLang is not installed in .*/\.venv-gpu/bin/python: make gpu"):
        require_engine(config, str(made))
    require_engine(resolve("tiny", None, [*GPU, "servers.python=/of/mine"]).config, str(made))


def test_fewer_gpus_than_a_preset_takes_lead_to_a_plan_with_those(made: Path) -> None:
    with pytest.raises(UserError, match=r"takes 8 GPUs, and 2 are usable .* presets plan 1\.5B_n1 --gpus-per-node 2$"):
        require_local_gpus(resolve("1.5B_n1").config)


def test_sglang_is_missed_before_a_model_is(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make gpu` installs the one and fetches the other."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    settings = [f"fileroot={tmp_path / 'runs'}", f"cache_dir={tmp_path / 'cache'}"]
    config = resolve("135M", None, settings).config

    assert "SGLang is not installed" in str(refusal(config, choose_trial(config, named_by_user=False)))
