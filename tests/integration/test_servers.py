"""A run with real engine servers (vLLM on the CPU): asynchronous, kept over attempts, one more, killed, all gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import coin
import psutil
import pytest
from commandline import run_clusterkit
from runs import ENVIRONMENT, REPOSITORY, Trial, command, wait_for
from vllmserver import START_SECONDS, vllm_python

from trainer.serving import registry

SERVE = [sys.executable, "-m", "clusterkit.cli.main", "serve"]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    folder = tmp_path_factory.mktemp("servers")
    made = Trial(folder / "runs", folder / "cache", **coin.SETTINGS)
    made.change(**{"servers.python": vllm_python()})
    yield made
    for one in registered(made):
        if registry.process_runs(one.pid):
            os.kill(one.pid, signal.SIGTERM)
    wait_for(lambda: not any(registry.process_runs(one.pid) for one in registered(made)))


def registered(trial: Trial) -> list[registry.Registration]:
    return registry.read(registry.folder_of(trial.paths.logs))


def train(trial: Trial, **settings: Any) -> None:
    """Run the trainer to its end."""
    trial.change(**settings)
    done = command(trial, env={**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})
    said = done.communicate(timeout=600)
    assert done.returncode == 0, said


def serve(trial: Trial, *words: str) -> str:
    """`clusterkit serve …` for the run."""
    run = ["--fileroot", trial.config.fileroot, "--experiment", trial.config.experiment_name]
    environment = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [*SERVE, *words, *run],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=REPOSITORY,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(trial: Trial) -> list[dict[str, Any]]:
    return trial.records("step")


def servers_process(host: int) -> psutil.Process:
    """The server itself, below its host and the guard."""
    (guard,) = psutil.Process(host).children()
    (server,) = guard.children()
    return server


@pytest.fixture(scope="module")
def begun(trial: Trial) -> Trial:
    """The run after three steps; its server stays."""
    train(trial, **{"train.total_steps": 3})
    return trial


def test_a_run_samples_ahead_on_a_server_that_stays(begun: Trial) -> None:
    trial = begun
    numbers = [step["stats"] for step in steps(trial)]
    assert [n["staleness_max"] for n in numbers] == [0, 1, 1]  # the first step's rollouts had nothing to be ahead of
    # What the server said of its tokens is what the trainer computes for the same weights; later ones differ.
    kl = [n["mismatch_kl"] for n in numbers]
    assert kl[0] < 1e-6 < kl[2] < 0.1, kl
    assert all(n["failed_trajectories"] == 0 for n in numbers)
    (one,) = registered(trial)
    assert (one.state, one.kept, registry.process_runs(one.pid)) == ("ready", True, True)


@pytest.mark.long
def test_the_next_attempt_takes_the_server_over(begun: Trial) -> None:
    trial = begun
    before = registered(trial)
    train(trial, **{"train.total_steps": 5})
    assert registered(trial) == before, "it was started again"
    assert [step["global_step"] for step in steps(trial)] == [1, 2, 3, 4, 5]
    first = steps(trial)[3]["stats"]
    assert (first["staleness_max"], first["mismatch_kl"] < 1e-6) == (0, True)  # it was given the recovered weights


@pytest.mark.long
def test_a_server_whose_engine_is_stopped_is_killed_and_started_again(begun: Trial) -> None:
    """Its health endpoint answers all the time."""
    trial = begun
    before, starts = len(steps(trial)), registered(trial)[0].starts
    trial.change(**{"train.total_steps": before + 6, "servers.hang_seconds": 10.0})
    running = command(trial, env={**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})
    wait_for(lambda: len(steps(trial)) > before or running.poll() is not None, START_SECONDS)
    server = servers_process(registered(trial)[0].pid)
    family = [server, *server.children(recursive=True)]
    (core,) = [one for one in family if "EngineCore" in one.name()]
    core.suspend()
    said = running.communicate(timeout=600)
    assert running.returncode == 0, said
    assert len(steps(trial)) == before + 6
    assert all(step["stats"]["failed_trajectories"] == 0 for step in steps(trial))
    assert "engine server server-0 hangs: its host is asked to kill it and to start it again" in trial.log()
    assert registered(trial)[0].starts == starts + 1
    assert not any(one.is_running() for one in family)


@pytest.mark.long
def test_a_server_is_added_and_killing_servers_and_hosts_loses_nothing(trial: Trial) -> None:
    assert "server-1 answers at http://127.0.0.1:" in serve(trial, "add")
    listed = json.loads(serve(trial, "list", "--json"))["servers"]
    assert [(one["name"], one["state"]) for one in listed] == [("server-0", "ready"), ("server-1", "ready")]
    before = len(steps(trial))
    trial.change(**{"train.total_steps": before + 9, "servers.min_required": 1})
    running = command(trial, env={**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})
    wait_for(lambda: len(steps(trial)) > before + 1 or running.poll() is not None, START_SECONDS)
    first, added = registered(trial)
    servers_process(added.pid).send_signal(signal.SIGKILL)
    os.kill(first.pid, signal.SIGKILL)  # a host: its server ends with it, and the trainer's process starts both again
    said = running.communicate(timeout=600)
    assert running.returncode == 0, said
    assert all(step["stats"]["failed_trajectories"] == 0 for step in steps(trial))
    assert "engine server server-1 joins" in trial.log()
    assert "the host of engine server server-0 was killed: it is started again" in trial.log()
    wait_for(lambda: [one.state for one in registered(trial)] == ["ready", "ready"], START_SECONDS)
    again, restarted = registered(trial)
    assert again.pid != first.pid
    assert (restarted.pid, restarted.starts) == (added.pid, 2)  # by its host


@pytest.mark.long
def test_what_a_server_printed_is_shown(trial: Trial) -> None:
    done = run_clusterkit("logs", "--engine", "0", "--fileroot", trial.config.fileroot, cwd=REPOSITORY)
    assert "EngineCore" in done.stdout, done.stderr


@pytest.mark.long
def test_servers_end_when_they_are_told_to_and_the_run_says_that_none_is_left(trial: Trial) -> None:
    before = len(steps(trial))
    trial.change(**{"train.total_steps": 1000, "servers.patience_seconds": 1.0})
    running = command(trial, env={**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})
    wait_for(lambda: len(steps(trial)) > before or running.poll() is not None, START_SECONDS)
    pids = [one.pid for one in registered(trial)]
    assert serve(trial, "stop").startswith("ended: server-0, server-1")
    assert registered(trial) == []
    assert not any(registry.process_runs(pid) for pid in pids)
    assert serve(trial, "list").strip() == "the run has no engine servers"
    said = running.communicate(timeout=300)[1]
    assert running.returncode == 1, said  # the run's job starts it again, and that its servers
    assert "no engine server came back within 1 s: 0 of 1 engine servers answer (server-0" in said
    assert all(step["stats"]["failed_trajectories"] == 0 for step in steps(trial))


@pytest.mark.long
def test_a_run_that_waits_for_servers_ends_in_order_when_it_is_asked_to(trial: Trial) -> None:
    before = len(steps(trial))
    trial.change(**{"train.total_steps": 1000, "servers.patience_seconds": 600.0})
    running = command(trial, env={**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})
    wait_for(lambda: len(steps(trial)) > before or running.poll() is not None, START_SECONDS)
    asked = trial.log().count("requests wait up to 600 s")
    serve(trial, "stop")
    wait_for(lambda: trial.log().count("requests wait up to 600 s") > asked or running.poll() is not None, 60.0)
    running.send_signal(signal.SIGTERM)
    said = running.communicate(timeout=300)[1]
    assert running.returncode == 130, said
    assert f"interrupted after step {len(steps(trial))}: a recover checkpoint of step {len(steps(trial))}" in said


@pytest.mark.long
def test_an_unknown_server_is_named_with_those_that_are_there(trial: Trial) -> None:
    run = ["--fileroot", trial.config.fileroot]
    done = subprocess.run(
        [*SERVE, "stop", "server-7", *run], capture_output=True, text=True, timeout=300, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 2
    assert "no server server-7 (there: none)" in done.stderr
