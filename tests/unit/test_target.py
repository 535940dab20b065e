"""Where commands go: this machine or which cluster, for every command and every way to say so.

Clusters are kept as `clusterkit setup` leaves them. Their hosts refuse the connection, and that error tells where a
command went.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_writer import RunWriter
from typer.testing import CliRunner

from clusterkit.cli.hostoptions import expand_arguments
from clusterkit.cli.main import HOST_COMMANDS, app
from clusterkit.config.resolve import resolve
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.ray import current
from clusterkit.provision.ray.token import local_file
from clusterkit.setup.command import make_current

HERE = "here"
RUNS = {
    "status": ["status"],
    "logs": ["logs"],
    "stop": ["stop"],
    "diagnose": ["diagnose"],
    "report": ["report", "--out", "-"],
    "recover": ["recover", "check"],
    "alerts": ["alerts", "--once", "--command", "true"],
    "trace": ["trace"],
    "serve list": ["serve", "list"],
    "serve add": ["serve", "add"],
    "serve stop": ["serve", "stop"],
    "eval": ["eval", "--data-names", "recall", "--dry-run"],
    "jobs": ["jobs"],
    "runs": ["runs"],
}
"""Commands about one run, or all of a place."""
STARTS = {
    "train": ["train", "--preset", "1.5B_n1", "--dry-run"],
    "recover of a preset": ["recover", "check", "--preset", "1.5B_n1"],
    "serve judge": ["serve", "judge", "--list"],
}
"""Commands of a preset with GPUs."""
CLUSTERS = {
    "ray-status": ["ray-status"],
    "check": ["check", "--no-probes"],
    "setup": ["setup", "--no-gpus"],
    "down": ["down"],
    "eval stop": ["eval", "stop"],
}
"""Commands that only a cluster can do."""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("CLUSTERKIT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(current.VARIABLE, raising=False)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keep(*names: str, ready: bool = True) -> None:
    for name in names:
        inventory.save(Cluster(name=name, hosts=(Host(name=f"{name}-host", address="127.0.0.1", port=1),)))
        if ready:
            local_file(name).parent.mkdir(parents=True, exist_ok=True)
            local_file(name).write_text("0" * 64)


def said(*words: str) -> str:
    """All that a command prints, its error included."""
    argv = expand_arguments(list(words)) if words and words[0] in HOST_COMMANDS else list(words)
    result = CliRunner().invoke(app, argv)
    error = "" if isinstance(result.exception, SystemExit | None) else f"error: {result.exception}"
    return result.output + error


def went(*words: str) -> str:
    """The cluster whose host was asked, `here`, or what was answered instead."""
    text = said(*words)
    asked = [name for name in inventory.cluster_names() if f"{name}-host" in text or f"on cluster {name} (noth" in text]
    if asked:
        assert len(asked) == 1, text
        return asked[0]
    here = ["no runs found", "is alive (--fileroot", "no checkpoint of a run", "GPUs, and none", "no judge", "no jobs"]
    here.append("no runs of")
    return HERE if any(part in text for part in here) or "preset: 1.5B_n1" in text else text


@pytest.mark.parametrize("words", [*RUNS.values(), *STARTS.values()], ids=[*RUNS, *STARTS])
def test_commands_that_may_go_to_either(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert went(*words) == HERE

    keep("lab")
    assert went(*words) == "lab"
    assert went(*words, "--here") == HERE
    assert "choose one" in said(*words, "--here", "--cluster", "lab")

    keep("sea")
    several = went(*words)
    for part in ("several clusters (lab, sea)", "clusterkit use NAME", "--cluster NAME", "--here"):
        assert part in several
    assert went(*words, "--here") == HERE
    assert went(*words, "--cluster", "sea") == "sea"

    said("use", "sea")
    assert went(*words) == "sea"
    assert "on cluster sea (the current one; this machine: --here)" in said(*words)
    assert went(*words, "--cluster", "lab") == "lab"
    assert "the current one" not in said(*words, "--cluster", "lab")

    monkeypatch.setenv(current.VARIABLE, "lab")
    assert went(*words) == "lab"
    assert "on cluster lab (from $CLUSTERKIT_CLUSTER" in said(*words)
    assert went(*words, "--cluster", "sea") == "sea"
    assert went(*words, "--here") == HERE
    monkeypatch.setenv(current.VARIABLE, "lob")
    assert "$CLUSTERKIT_CLUSTER is 'lob', and there is no such cluster. Did you mean lab?" in said(*words)
    assert went(*words, "--here") == HERE


@pytest.mark.parametrize("words", CLUSTERS.values(), ids=CLUSTERS)
def test_commands_of_clusters(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    none = said(*words)
    assert "there is no cluster on this machine yet" in none
    assert "--hostnames" in none
    keep("lab")
    assert went(*words) == "lab"
    keep("sea")
    assert "several clusters (lab, sea)" in went(*words)
    said("use", "sea")
    assert went(*words) == "sea"
    assert "on cluster sea (the current one" in said(*words)
    monkeypatch.setenv(current.VARIABLE, "lab")
    assert went(*words) == "lab"
    assert went(*words, "--cluster", "sea") == "sea"


def test_dashboard_goes_to_the_cluster() -> None:
    """What it does here, and that it does not end, is in test_report_dashboard.py."""
    keep("lab")
    assert went("dashboard", "--port", "0") == "lab"


def test_default_is_meant_by_commands_of_clusters_as_before_there_was_a_choice() -> None:
    keep("default", "lab")
    assert went("ray-status") == "default"
    assert "several clusters" in went("status")


@pytest.mark.parametrize("preset", ["tiny", "memalpha-tiny", "135M_cpu"])
def test_a_preset_without_gpus_trains_here(preset: str) -> None:
    keep("lab")
    words = ("train", "--preset", preset, "--dry-run")
    there = said(*words)
    assert "nothing has been written)" in there
    assert f"on this machine: preset {preset} needs no GPU (on the cluster: --cluster lab)" in there
    assert "The plan, on cluster lab" in said(*words, "--cluster", "lab")
    assert "The plan, on cluster lab" in said(*words, "mode=ray")
    assert "cluster lab has 1" in said(*words, "n_nodes=2")  # hosts are what it asks for


def test_a_preset_with_gpus_trains_here_when_told_so() -> None:
    keep("lab")
    for more in (["--here"], ["mode=local"], ["--fileroot", "elsewhere"]):
        assert "The plan, on cluster" not in said("train", "--preset", "1.5B_n1", "--dry-run", *more)
    refused = said("train", "--preset", "1.5B_n1", "--here", "--slurm")
    assert "--here and --slurm (mode=slurm) are two places" in refused


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rank", "0", "--console"], "--console and --rank"),
        (["--engine", "0", "--rank", "1"], "--rank and --engine"),
        (["--engine", "0", "--console"], "--console and --engine"),
    ],
)
def test_logs_prints_one_log(options: list[str], named: str) -> None:
    assert f"{named} are different logs: choose one" in said("logs", *options)


def test_jobs_of_slurm_are_of_no_other_place() -> None:
    for words in (["--here"], ["--cluster", "lab"], ["--hostnames", "h1"]):
        assert "and --slurm (mode=slurm) are two places: choose one" in said("jobs", "--slurm", *words)
    for words in (["--here"], ["--cluster", "lab"]):
        assert "and --slurm (mode=slurm) are two places: choose one" in said("runs", "--slurm", *words)


@pytest.mark.parametrize("typed", ["stop", "logs", "status", "jobs", "runs", "serve list", "serve stop"])
def test_a_folder_of_runs_on_a_cluster_is_an_absolute_path(typed: str) -> None:
    keep("lab")
    assert "a path that begins with /" in said(*typed.split(), "--cluster", "lab", "--fileroot", "mine")


def test_none_and_no_gpu_here_names_both_ways_on() -> None:
    refused = said("train", "--preset", "7B_n4")
    assert "clusterkit setup --hostnames" in refused
    assert "clusterkit presets plan 7B_n4 --nodes 1" in refused


def test_a_run_that_is_unfinished_here_is_not_started_anew_on_the_cluster(machine: Path) -> None:
    writer = RunWriter(machine / "runs", experiment="1.5B_n1-math").config().attempt().steps(1, 5).recover(4)
    writer.run.config.write_text(json.dumps(resolve("1.5B_n1").config.model_dump()))
    keep("lab")
    refused = said("train", "--preset", "1.5B_n1", "--dry-run")
    assert "1.5B_n1-math/run1 is unfinished on this machine" in refused
    assert "--here" in refused
    assert "--cluster lab" in refused
    assert "The plan, on cluster lab" in said("train", "--preset", "1.5B_n1", "--dry-run", "--cluster", "lab")


def test_runs_here_and_a_cluster_that_does_not_answer(machine: Path) -> None:
    """Which run was started last cannot be told; nothing is hidden."""
    RunWriter(machine / "runs").config().attempt().steps(1, 5).finish("completed", 5)
    keep("lab")
    for words in (["status"], ["logs"], ["diagnose"], ["report", "--out", "-"], ["eval", "--dry-run"]):
        text = said(*words)
        assert "cluster lab (the only one) cannot be looked at: lab-host" in text
        assert "For the runs of this machine (tiny-recall/run1 is one) add --here" in text
    assert "finished" in said("status", "--here")
    assert "finished" in said("status", "--fileroot", "runs")


def test_a_checkpoint_of_a_run_here_is_scored_here(machine: Path) -> None:
    run = RunWriter(machine / "runs").config().attempt().run
    folder = run.checkpoints / "actor" / "epoch1epochstep1globalstep1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    keep("lab")
    text = said("eval", "--model-path", str(folder), "--dry-run")
    assert "on this machine: its run is of this machine (on the cluster: --cluster lab)" in text
    assert f"model_path={folder}" in text
    elsewhere = machine / "weights"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    for typed in (str(elsewhere), "/storage/models/x", "org/name", "smollm2-135m"):
        assert went("eval", "--model-path", typed, "--data-names", "recall", "--dry-run") == "lab"
    words = ("eval", "--model-path", "org/name", "--data-names", "aime24", "--dry-run")
    assert "on cluster" not in said(*words, "--server-url", "http://localhost:1")


def test_what_the_user_chose_is_kept(machine: Path) -> None:
    assert "there is no cluster" in said("use")
    keep("lab", "sea")
    keep("new", ready=False)
    assert "none is the current one: clusterkit use NAME" in said("use")
    assert "Did you mean lab?" in said("use", "lob")
    said("use", "lab")
    listed = said("use").splitlines()
    assert listed == ["* lab  (the current one)", "  new  not set up: clusterkit setup --cluster new", "  sea"]
    assert json.loads(said("use", "--json"))["current"] == "lab"
    assert (machine / "config" / "current").read_text() == "lab\n"
    assert (machine / "config" / "current").stat().st_mode & 0o777 == 0o600
    assert "knows no Ray of it yet" in said("use", "new")
    assert current.current().name == "new"


@pytest.mark.parametrize("names", [("lab",), ("lab", "sea")])
def test_this_machine_can_be_chosen_although_there_are_clusters(
    machine: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    keep(*names)
    said("use", "lab")
    assert went("status") == "lab"

    assert said("use", "--here") == "commands go to this machine now\n"

    for words in (*RUNS.values(), *STARTS.values()):
        assert went(*words) == HERE
    assert f"on this machine (clusters: {', '.join(names)}; clusterkit use NAME chooses one)" in said("status")
    assert went("status", "--cluster", "lab") == "lab"
    assert "commands go to this machine; to a cluster: clusterkit use NAME" in said("use")
    assert json.loads(CliRunner().invoke(app, ["use", "--json"]).stdout)["current"] is None
    assert "; commands go to this machine; to one of them: clusterkit use NAME" in said()
    assert make_current("lab", is_new=False) == "", "a set-up that is repeated changes no choice"

    monkeypatch.setenv(current.VARIABLE, "lab")
    assert "in this shell they still go to lab, until: unset CLUSTERKIT_CLUSTER" in said("use", "--here")
    assert went("status") == "lab"
    monkeypatch.delenv(current.VARIABLE)
    said("use", "lab")
    assert went("status") == "lab"
    assert (machine / "config" / "current").read_text() == "lab\n"


def test_a_command_that_only_a_cluster_can_do_needs_no_choice_while_there_is_one() -> None:
    keep("lab")
    said("use", "--here")
    assert went("ray-status") == "lab"
    keep("sea")
    assert "several clusters (lab, sea)" in went("ray-status")
    assert "--here and NAME are two places: choose one" in said("use", "lab", "--here")


def test_a_cluster_that_is_gone_is_no_longer_current() -> None:
    keep("lab", "sea", "tau")
    said("use", "lab")
    assert not current.forget("sea")
    assert current.forget("lab")
    assert "several clusters (lab, sea, tau)" in went("status")
    said("use", "lab")
    inventory.path_of("lab").unlink()
    assert "several clusters (sea, tau)" in went("status")
    local_file("tau").unlink()
    assert went("status") == "sea"


@pytest.mark.parametrize("content", [b"", b"no name!\n", b"lab\nsea\n", b"\xff\xfe"])
def test_a_damaged_choice_is_one_clear_error(machine: Path, content: bytes) -> None:
    keep("lab")
    (machine / "config" / "current").write_bytes(content)
    text = said("status")
    assert str(machine / "config" / "current") in text
    assert "clusterkit use NAME" in text
    assert str(machine / "config" / "current") in said("use")
    assert went("status", "--here") == HERE
    assert went("status", "--cluster", "lab") == "lab"
    said("use", "lab")
    assert went("status") == "lab"


def test_a_choice_that_cannot_be_written_is_told(machine: Path) -> None:
    keep("lab")
    (machine / "config" / "current").mkdir()
    assert "cannot be written" in said("use", "lab")


def test_down_of_one_of_several_is_named_where_nobody_is_asked() -> None:
    keep("lab", "sea")
    said("use", "lab")
    assert "-y asks no questions, and there are several clusters (lab, sea): add --cluster NAME" in said("down", "-y")
    assert went("down", "-y", "--cluster", "sea") == "sea"


def test_a_folder_of_runs_means_this_machine_unless_it_is_on_the_cluster(machine: Path) -> None:
    keep("lab")
    RunWriter(machine / "other").config().attempt().steps(1, 2).finish("completed", 2)
    assert "finished" in said("status", "--fileroot", "other")
    assert went("status", "--fileroot", "/storage/ray/experiments") == "lab"
