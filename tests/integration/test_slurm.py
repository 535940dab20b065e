"""`clusterkit train --slurm` on a real Slurm (slurmctld, two slurmd, munge) with a real Ray in the allocation."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from realparts import require
from runs import SETTINGS
from slurmcluster import PARTITION, Slurm, slurm

from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.log.metrics import History, read_history

REPOSITORY = Path(__file__).parents[2]
STEPS = 60
DEADLINE_S = 600.0

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def python() -> str:
    """A Python that has Ray, as every node of such a Slurm needs one."""
    require(importlib.util.find_spec("ray") is not None, "needs Ray: pip install 'ray[default]'")
    return sys.executable


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@dataclass
class LoginNode:
    """Where a user types clusterkit's commands. More settings than those of tests/runs.py are added to `train`."""

    cluster: Slurm
    python: str
    fileroot: Path
    cache: Path
    settings: list[str] = field(default_factory=list)

    def command(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.python, "-m", "clusterkit.cli.main", *arguments],
            # A user's own python path stays; the rest is as on any login node.
            env={**self.cluster.environment, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment},
            cwd=self.fileroot.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.command(*arguments, **environment)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    def train(self, *options: str) -> list[str]:
        places = [f"fileroot={self.fileroot}", f"cache_dir={self.cache}", "train.ranks=2", "n_nodes=2"]
        settings = [*overrides(SETTINGS), f"train.total_steps={STEPS}", *places, *self.settings]
        return ["train", "--preset", "tiny", "--slurm", "--partition", PARTITION, "--no-progress", *options, *settings]

    def json(self, *arguments: str) -> Any:
        code, out, err = self.run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    def status(self) -> dict[str, Any]:
        return self.json("status", "--fileroot", str(self.fileroot))

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.fileroot, user_name(), "small", "run1")

    def history(self) -> History:
        return read_history(self.directory.metrics)

    def printed(self) -> str:
        """What the jobs printed."""
        return "\n".join(path.read_text() for path in self.directory.logs.glob("slurm/job_*.log"))

    def situation(self) -> str:
        """What there is to know when the jobs do not do what they should."""
        return "\n".join([self.printed(), *self.cluster.jobs("%i %T %r %S"), self.cluster.state(), self.cluster.logs()])


def overrides(values: dict[str, Any], before: str = "") -> list[str]:
    """Nested settings as a user types them; the trial's name is left to clusterkit."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += overrides(value, f"{before}{name}.")
        elif name != "trial_name":
            found.append(f"{before}{name}={value if isinstance(value, str) else json.dumps(value)}")
    return found


@pytest.fixture
def login(cluster: Slurm, python: str, tmp_path: Path) -> Iterator[LoginNode]:
    yield LoginNode(cluster, python, tmp_path / "store" / "runs", tmp_path / "store" / "cache")
    cluster.cancel_all()


@pytest.fixture(autouse=True)
def _store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()


def wait_for(condition: Callable[[], object], said: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"the condition never came true: {said()}"
        time.sleep(0.1)


@pytest.mark.long
def test_a_run_is_submitted_attached_to_requeued_stopped_and_goes_on_to_its_end(login: LoginNode) -> None:
    command = login.train("--requeue", "--time=60")
    following = login.command(*command)
    script = login.directory.logs / "slurm" / "job.sbatch"
    wait_for(login.cluster.alive, login.situation)
    (job,) = login.cluster.alive()
    assert stat.S_IMODE((script.parent / "ray_token").stat().st_mode) == 0o600

    # The same command attaches; the same run with another setting is told about the one in its way.
    assert login.json(*command, "--detach")["state"] == "attached"
    assert login.cluster.alive() == [job]
    code, _, err = login.run(*command, "--detach", "seed=2")
    assert code == 2
    assert f"as job {job}" in err
    assert "trial_name=NEW" in err

    # The time limit: a recover checkpoint, back into the queue, on from there. (Slurm sends this signal by itself,
    # --signal in the script; here it comes earlier than in an hour.)
    wait_for(lambda: login.history().steps, login.situation)
    assert login.status()["state"] == "running"
    (listed,) = login.json("jobs", "--slurm", "--alive")
    assert (listed["submission_id"], listed["status"]) == (job, "RUNNING")
    assert 0 < time.time() - listed["started"] < DEADLINE_S
    login.cluster.run("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: login.cluster.jobs("%i %T %r") == [f"{job} PENDING BeginTime"], login.situation)
    status = login.status()
    assert status["state"] == "pending"
    assert f"Slurm job {job} waits for nodes: BeginTime" in status["message"]
    reached = login.history().global_step
    assert status["recover"]["global_step"] == reached < STEPS
    assert not list(Path("/tmp").glob(f"clusterkit-*-{job}"))
    # Slurm itself waits two minutes: within a second of the end, a node still refuses the job's new credential.
    login.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    wait_for(lambda: login.history().global_step > reached, login.situation)

    # stop: once more a checkpoint; nobody starts it again.
    code, out, err = login.run("stop", "--fileroot", str(login.fileroot))
    assert code == 0, err
    assert "is stopped" in out
    stopped = login.history().global_step
    assert stopped < STEPS
    assert not login.cluster.alive()
    out, err = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 130, err
    assert "To go on: clusterkit train" in err
    status = login.status()
    assert (status["state"], status["recover"]["global_step"]) == ("interrupted", stopped)

    # The same command goes on, to the end.
    result = login.json(*command)
    assert (result["status"], result["global_step"], result["resume_step"]) == ("completed", STEPS, stopped)
    assert login.status()["state"] == "finished"
    history = login.history()
    assert [step["global_step"] for step in history.steps] == list(range(1, STEPS + 1))
    assert [record["resume_step"] for record in history.attempts] == [0, reached, stopped]
    assert login.printed().count("Ray has 2 of 2 nodes: first, second") == 3
    assert (login.directory.logs / "attempt_3" / "rank_1.log").exists()
    assert not (script.parent / "ray_token").exists()
    assert "nothing is left to train" in login.run(*command, "trial_name=run1")[2]


def test_a_job_that_waits_says_why_and_is_cancelled(login: LoginNode) -> None:
    command = login.train("--detach", "--sbatch-option=--begin=now+1hour")
    started = login.json(*command)
    status = login.status()
    assert status["state"] == "pending"
    assert f"Slurm job {started['submission_id']} waits for nodes: " in status["message"]
    (job,) = login.json("jobs", "--slurm")
    assert (job["submission_id"], job["status"], job["started"]) == (started["submission_id"], "PENDING", None)
    assert (job["user"], job["trial"], job["message"]) == (user_name(), "run1", status["message"])
    assert job["run_dir"] == started["run_dir"]
    assert login.json("jobs", "--slurm", "--fileroot", str(login.fileroot.parent)) == []
    here = ["train", "--preset", "tiny", *overrides(SETTINGS), f"fileroot={login.fileroot}", "trial_name=run1"]
    code, _, err = login.run(*here)
    assert code == 2
    assert f"is being trained now by Slurm job {started['submission_id']}" in err
    code, out, err = login.run("stop", "--fileroot", str(login.fileroot))
    assert code == 0, err
    assert "was waiting for nodes" in out
    assert not login.cluster.alive()


def test_a_sweep_is_a_job_for_each_trial_and_the_same_command_attaches_to_them(login: LoginNode) -> None:
    command = login.train("--detach", "--sbatch-option=--begin=now+1hour", "--sweep", "train.learning_rate=1e-3,2e-3")
    command.remove(f"train.learning_rate={SETTINGS['train']['learning_rate']}")
    names = ["learning_rate-0.001", "learning_rate-0.002"]
    told = login.json(*command)
    assert [(trial["trial"], trial["state"]) for trial in told["trials"]] == [(name, "pending") for name in names]
    assert [job["trial"] for job in login.json("jobs", "--slurm")] == names

    code, out, err = login.run(*command)
    assert code == 0, err
    assert "is being trained already, as job" in err
    assert "2 jobs are at work on Slurm, without this command" in err
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["pending", "pending"]
    assert len(login.cluster.alive()) == 2
    listed = login.json("runs", "--slurm", "--fileroot", str(login.fileroot), "train.learning_rate=0.002")
    assert [(run["trial"], run["state"]) for run in listed] == [(names[1], "pending")]


@pytest.mark.long
def test_a_sweep_is_followed_to_its_end(login: LoginNode) -> None:
    login.settings = ["n_nodes=1", "train.ranks=1", "train.total_steps=2"]
    command = login.train("--sweep", "seed=1,2")
    told = login.json(*command)
    assert [(trial["trial"], trial["state"]) for trial in told["trials"]] == [
        ("seed-1", "finished"),
        ("seed-2", "finished"),
    ]
    code, out, err = login.run(*command)
    assert code == 0, err
    assert err.count("is complete already") == 2
    assert out.count("\tfinished\t") == 2


def test_a_job_that_fails_before_it_trains_is_told_with_its_own_words(login: LoginNode) -> None:
    login.settings = ["n_nodes=1"]
    newest = max((int(line.split()[0]) for line in login.cluster.jobs()), default=0)
    folders = [Path(f"/tmp/clusterkit-{os.getuid()}-{newest + ahead}") for ahead in (1, 2)]
    try:
        for folder in folders:  # somebody else's, where the job's Ray would put its sockets
            folder.mkdir()
            os.chown(folder, 12345, 12345)
        code, _, err = login.run(*login.train())
    finally:
        for folder in folders:
            shutil.rmtree(folder)
    assert code == 1
    assert "ended before the training began" in err
    assert "belongs to another user" in err
    code, out, _ = login.run("status", "--fileroot", str(login.fileroot), "--json")
    status = json.loads(out)
    assert status["state"] == "failed"
    assert "belongs to another user" in status["message"]


def test_sbatchs_own_words_are_passed_on(login: LoginNode) -> None:
    code, _, err = login.run(*login.train("--partition=nowhere"))
    assert code == 2
    assert "invalid partition specified: nowhere" in err
    assert "sinfo" in err
    assert not login.cluster.alive()


def test_a_machine_without_slurm_is_told_so(login: LoginNode) -> None:
    code, _, err = login.run(*login.train(), PATH=str(Path(login.python).parent))
    assert code == 2
    assert "no sbatch on PATH" in err
