"""What a run on Slurm is told: the batch script, the ports of its Ray, and options that cannot be passed on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clusterkit.backends.slurm.script import APPTAINER, PYXIS, SlurmContainer, SlurmOptions, sbatch_options, script
from clusterkit.runs.directory import RunDirectory
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.launch.slurm import PORTS, SLOTS, Place, interface, own_address, ray_command

RUN = RunDirectory(Path("/shared/my runs"), "ada", "memory", "run1")
CODE = "/shared/codes/0123"


def text(wishes: SlurmOptions, **settings: object) -> str:
    config = RunConfig.model_validate(
        {"fileroot": str(RUN.fileroot), "mode": "ray", "train": {"ranks": 4}, "n_nodes": 2, **settings}
    )
    options = sbatch_options(RUN, config, "feedbeef", wishes)
    return script(RUN, config, options, wishes, code=CODE, shared=["/shared", "/cache"])


def step(written: str) -> str:
    return next(line for line in written.splitlines() if line.startswith("srun "))


ALL = [
    SlurmOptions(),
    SlurmOptions(
        "gpu", "lab", "1-00:00:00", ("--mem=0", "--constraint=a b"), requeue=True, python="/shared/my venv/python"
    ),
    SlurmOptions(container=SlurmContainer("docker://runtime:1", PYXIS, ("/data:/mnt",))),
    SlurmOptions(container=SlurmContainer("/shared/runtime.sif", APPTAINER), requeue=True),
]


def rendered() -> dict[str, str]:
    """Batch scripts by title, for shellcheck (scripts/lint_shell.py)."""
    return {f"slurm: {wishes}": text(wishes, n_gpus_per_node=8) for wishes in ALL}


def test_what_is_asked_for_is_in_the_script_and_the_users_words_come_last() -> None:
    written = text(SlurmOptions("gpu", "lab", "10:00", ("--cpus-per-task=32",)), n_gpus_per_node=8)
    asked = [line.removeprefix("#SBATCH ") for line in written.splitlines() if line.startswith("#SBATCH ")]
    assert asked[0] == "--job-name=clusterkit:memory:run1:feedbeef"
    assert {"--nodes=2", "--gres=gpu:8", "--partition=gpu", "--account=lab", "--time=10:00"} <= set(asked)
    assert asked.index("--cpus-per-task=2") < asked.index("--cpus-per-task=32") == len(asked) - 1


def test_without_gpus_none_are_asked_for() -> None:
    assert "--gres" not in text(SlurmOptions())


def test_a_container_sees_the_storage_through_pyxis() -> None:
    line = step(text(SlurmOptions(container=SlurmContainer("registry#runtime:1", PYXIS, ("/data:/mnt",)))))
    assert "'--container-image=registry#runtime:1'" in line
    assert "--container-mounts=/shared:/shared,/cache:/cache,/data:/mnt python3 -m trainer.launch.slurm" in line


@pytest.mark.parametrize(
    ("image", "told"),
    [("/shared/runtime.sif", "/shared/runtime.sif"), ("runtime:1", "docker://runtime:1"), ("oras://x/y", "oras://x/y")],
)
def test_a_container_through_apptainer(image: str, told: str) -> None:
    wishes = SlurmOptions(container=SlurmContainer(image, APPTAINER, ("/data",)))
    assert f"apptainer exec --bind /shared,/cache,/data {told} python3 -m" in step(text(wishes))
    assert f"apptainer exec --nv --bind /shared,/cache,/data {told}" in step(text(wishes, n_gpus_per_node=8))


def test_only_a_job_that_may_be_requeued_goes_back_into_the_queue() -> None:
    assert "scontrol requeue" not in text(SlurmOptions())
    assert "#SBATCH --no-requeue" in text(SlurmOptions())
    assert "scontrol requeue" in text(SlurmOptions(requeue=True))


@pytest.mark.parametrize("wishes", [SlurmOptions(requeue=True), SlurmOptions(options=("--requeue",))])
def test_a_job_that_comes_back_from_the_queue_may_not_start_afresh_there(wishes: SlurmOptions) -> None:
    with pytest.raises(UserError, match="each return from the queue would start afresh"):
        text(wishes, recover_mode="disabled")


@pytest.mark.parametrize("option", ["mem=0", "--mem=0\nrm -rf /", ""])
def test_an_option_that_sbatch_would_not_take(option: str) -> None:
    with pytest.raises(UserError, match="as sbatch takes it"):
        SlurmOptions(options=(option,))


@pytest.mark.parametrize("option", ["--nodes=4", "-N4", "--job-name=mine", "-o out", "--array=1-3"])
def test_an_option_that_is_ours(option: str) -> None:
    with pytest.raises(UserError, match="clusterkit's own to set"):
        SlurmOptions(options=(option,))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "gpu"], "add --slurm"),
        (["--requeue"], "add --slurm"),
        (["--slurm", "--cluster", "lab"], "choose one"),
        (["mode=slurm", "--cluster", "lab"], "choose one"),
        (["--detach"], "--detach is for runs of a cluster or Slurm"),
        (["--detach", "--here", "--dry-run"], "--detach is for runs of a cluster or Slurm"),
    ],
)
def test_options_that_belong_to_another_place(options: list[str], said: str, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("clusterkit")), "train", "--preset", "tiny", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_rays_ports_differ_between_jobs_and_are_below_those_of_outgoing_connections() -> None:
    first = Place(1, "192.0.2.1", 0, 2, "a", 8, 4, Path("/state"))
    ports = [replace(first, job=number).port for number in range(5 * SLOTS, 6 * SLOTS)]
    assert len(set(ports)) == SLOTS
    assert all(b - a >= PORTS for a, b in zip(sorted(ports), sorted(ports)[1:], strict=False))
    assert min(ports) >= 20000
    assert max(ports) + PORTS <= 32768


def test_only_the_first_node_is_rays_head_and_its_dashboard_is_on_localhost() -> None:
    first = Place(7, "192.0.2.1", 0, 2, "a", 8, 4, Path("/state"))
    head = ray_command(first, "192.0.2.1")
    worker = ray_command(replace(first, number=1, name="b"), "192.0.2.2")
    assert {"--head", "--dashboard-host=127.0.0.1", "--num-cpus=8", "--num-gpus=4", "--node-name=a"} <= set(head)
    assert {f"--address=192.0.2.1:{first.port}", "--node-ip-address=192.0.2.2", "--node-name=b"} <= set(worker)
    assert "--head" not in worker


def test_outside_of_an_allocation_it_says_who_starts_it() -> None:
    with pytest.raises(UserError, match="batch script of clusterkit train --slurm"):
        Place.of({}, 0, Path("/state"))


def test_the_interface_of_an_address() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface("127.0.0.1") == "lo"
    assert interface("192.0.2.99") == ""
