"""Commands that read runs, on runs of a cluster: a real SSH host without Docker or Ray has them on its disk."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard
from run_writer import RunWriter
from slot_writer import write_slot
from sshd import Ssh, Sshd

from clusterkit.backends.ray.mirror import Mirror
from clusterkit.backends.ray.overviews import TAIL_BYTES
from clusterkit.config.resolve import resolve
from clusterkit.hosts.folders import write_private
from clusterkit.provision.ray.token import local_file
from clusterkit.runs.holder import holder_of
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from evaluation.steps import keep_scores

pytest_plugins = ["sshd_fixture"]
CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))
OUT_OF_MEMORY = """\
Traceback (most recent call last):
  File "/codes/trainer/train/learner.py", line 80, in step
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB
error: CUDA out of memory
"""


@dataclass
class World:
    """A cluster of one or more hosts over one disk, and this machine's commands."""

    hosts: list[Sshd]
    root: Path

    def __call__(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [CLUSTERKIT, *words], check=False, capture_output=True, text=True, cwd=self.root.parents[2], timeout=300
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "clusterkit-" not in done.stdout + done.stderr, "the copy's folder is nobody's business"
        return done

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code).stdout)


@pytest.fixture
def world(ssh: Ssh) -> World:
    hosts = [ssh.servers(), ssh.servers()]
    storage = ssh.folder / "storage"
    entries = [{"name": f"h{n}", "address": host.address, "port": host.port} for n, host in enumerate(hosts, 1)]
    values = {"hosts": entries, "storage": str(storage), "login": {"identity_files": [str(ssh.key)]}}
    folder = ssh.folder / "config" / "clusters"
    folder.mkdir(parents=True)
    (folder / "c.yaml").write_text(yaml.safe_dump(values))
    return World(hosts, storage / "ray" / "experiments")


def failed(world: World, trial: str = "run1") -> RunWriter:
    """A run that ran out of memory in its third step; its job has left its mark."""
    place = f"fileroot={world.root}"
    writer = (
        RunWriter(world.root, trial=trial).config(place, "mode=ray", "cache_dir=/c").attempt().steps(1, 3).recover(2)
    )
    (writer.run.logs / "main.log").write_text("log\n")
    writer.run.console(1).write_text(OUT_OF_MEMORY)
    (writer.run.logs / "attempt_1" / "exit.json").write_text(json.dumps({"code": 1, "began": writer.clock - 100}))
    return writer.finish("failed", 3, "CUDA out of memory")


def test_diagnosis_of_a_run_of_a_cluster_and_what_is_applied_lies_beside_it(world: World) -> None:
    writer = failed(world)
    facts = world.json("diagnose", "--cluster", "c")
    (finding,) = [finding for finding in facts["findings"] if finding["id"] == "gpu-memory"]
    assert (facts["state"], finding["phase"]) == ("failed", "train")
    assert finding["evidence"][0]["source"] == str(writer.run.console(1))
    assert "diagnose tiny-recall/run1 --cluster c --apply" in world("diagnose", "--cluster", "c").stdout

    applied = world.json("diagnose", "--cluster", "c", "--apply")
    file = writer.run.logs / "overrides.yaml"
    assert applied["file"] == str(file)
    assert applied["command"] == "clusterkit train --preset tiny --task recall --cluster c"
    assert yaml.safe_load(file.read_text())["train.max_tokens_per_mb"]["now"] == 8192
    assert "is applied already" in world("diagnose", "--cluster", "c").stdout


def scored(writer: RunWriter, step: int, accuracy: float) -> dict[str, Any]:
    """What an evaluation on the cluster says of a checkpoint of the run."""
    checkpoint = writer.run.checkpoints / "actor" / f"epoch1epochstep{step}globalstep{step}"
    row = {"dataset": "recall", "num_questions": 8, "greedy_acc": accuracy}
    return {"status": "complete", "model_path": str(checkpoint), "time": float(step), "engine": "vllm", "rows": [row]}


def test_report_of_runs_of_a_cluster(world: World, tmp_path: Path) -> None:
    failed(world, "run1")
    writer = RunWriter(world.root, trial="run2").config().attempt().steps(1, 5).finish("completed", 5)
    for step, accuracy in ((2, 0.25), (4, 0.75)):
        keep_scores(scored(writer, step, accuracy), Path(f"results-{step}"))
    page = tmp_path / "page.html"
    done = world.json("report", "--cluster", "c", "--trial", "run2", "--compare", "run1", "--out", str(page))
    assert done["runs"] == ["tiny-recall/run2", "tiny-recall/run1"]
    assert "CUDA out of memory" in page.read_text()
    assert "greedy_acc, training steps 4: 75.0" in page.read_text()
    assert "clusterkit-" not in page.read_text()


def test_all_runs_of_a_cluster_are_listed_from_the_ends_of_their_files(world: World) -> None:
    writer = failed(world)
    rate = "train.learning_rate=0.5"
    long = RunWriter(world.root, trial="long").config(f"fileroot={world.root}", "mode=ray", rate).attempt()
    for step in range(1, 3001, 300):
        long.steps(step, step + 299).record("eval", name="heldout", global_step=step + 299, accuracy=step / 10000)
    open_ended = RunWriter(world.root, trial="open").config().attempt().steps(1, 2)
    (world.root / "logs" / writer.run.user / "tiny-recall" / "empty").mkdir()
    (world.root / "logs" / "ada" / "memory" / "run1").mkdir(parents=True)
    assert long.run.metrics.stat().st_size > 3 * TAIL_BYTES

    done = world("runs", "--cluster", "c", "--json")
    listed = {run["trial"]: run for run in json.loads(done.stdout)}

    assert set(listed) == {"run1", "long", "open", "empty"}
    assert (listed["run1"]["state"], listed["run1"]["message"]) == ("failed", "CUDA out of memory")
    assert listed["run1"]["run_dir"] == str(writer.run.logs)
    assert [listed["long"][key] for key in ("global_step", "accuracy", "total_steps")] == [3000, 0.2701, 30]
    assert listed["long"]["settings"]["train.learning_rate"] == 0.5
    # There is no Ray that could tell whether its job is alive.
    assert listed["open"]["state"] == "running"
    assert open_ended.run.attempt_numbers() == [1]
    assert listed["empty"]["state"] == "new"
    assert done.stderr == "of others: ada (1); --user NAME\n"
    assert [run["trial"] for run in world.json("runs", "--cluster", "c", "--user", "ada")] == ["run1"]
    world.hosts[0].stop()
    shown = world("runs", "--cluster", "c", "--sort", "accuracy")
    assert shown.stdout.splitlines()[1].startswith("tiny-recall/long\t")
    assert "clusterkit diagnose tiny-recall/run1 --cluster c" in shown.stderr


def test_a_cluster_without_runs_has_none(world: World) -> None:
    assert world.json("runs", "--cluster", "c") == []
    assert "no runs of" in world("runs", "--cluster", "c").stdout
    world.hosts[0].stop()
    world.hosts[1].stop()
    assert "error: " in world("runs", "--cluster", "c", code=1).stderr


def test_alerts_of_a_run_of_a_cluster_are_sent_once(world: World, tmp_path: Path) -> None:
    writer = failed(world)
    sent = tmp_path / "sent"
    command = ("alerts", "--cluster", "c", "--once", "--command", f"tee -a {sent}")
    assert "delivered: failed, step 3" in world(*command).stderr
    body = json.loads(sent.read_text())
    assert body["run_dir"] == str(writer.run.logs)
    assert any("GPU memory ran out" in line for line in body["diagnosis"])
    assert any("--cluster c" in line for line in body["diagnosis"])
    world(*command)
    assert len(sent.read_text().splitlines()) == 1
    assert not (writer.run.logs / "alerts.json").exists()


def test_dashboard_shows_what_the_run_writes_meanwhile(world: World) -> None:
    writer = RunWriter(world.root).config().attempt().steps(1, 5)
    process = subprocess.Popen(
        [CLUSTERKIT, "dashboard", "--cluster", "c", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        def page() -> str:
            with urllib.request.urlopen(url.replace("/?", "/page?"), timeout=30) as answer:
                return str(answer.read().decode())

        assert "5 of 30" in page()
        writer.steps(6, 9)
        assert "9 of 30" in page()
        assert "clusterkit-" not in page()
        world.hosts[0].kill_connections()
        world.hosts[0].stop()
        writer.steps(10, 10)
        assert "10 of 30" in page(), "another host shows the same storage"
    finally:
        process.terminate()
        process.wait(timeout=300)


def test_only_what_is_new_is_fetched_and_another_run_of_the_name_is_read_anew(world: World, tmp_path: Path) -> None:
    writer = failed(world)
    mirror = Mirror(select(HostOptions(cluster="c")), tmp_path / "copy", str(world.root))
    try:
        run = mirror.find(None, None, logs=True)
        before = {path: path.stat().st_ino for path in run.logs.rglob("*") if path.is_file()}
        writer.attempt(resume_step=2).steps(3, 4)
        mirror.fetch(run, logs=True)
        assert run.metrics.read_bytes() == writer.run.metrics.read_bytes()
        assert run.metrics.stat().st_ino == before[run.metrics]
        assert holder_of(run) == "a job that Ray was not asked about"
        assert run.has_recover_checkpoint

        writer.run.metrics.write_text("")
        writer.number = 0
        writer.record("attempt", resume_step=0, total_steps=7)
        (writer.run.logs / "attempt_2").rmdir()
        mirror.fetch(run)
        assert run.metrics.read_bytes() == writer.run.metrics.read_bytes()
        assert run.attempt_numbers() == [1]
        assert holder_of(run) is None
    finally:
        mirror.close()
    assert not (tmp_path / "copy").exists()


def test_a_dry_run_asks_the_storage_for_the_model_and_data(world: World) -> None:
    shelf = world.root.parents[1] / "models"
    words = ["train", "--preset", "135M_cpu", "--dry-run", "--cluster", "c", f"model.path={shelf}/mine"]
    told = "storage     was not asked for models and data: this machine knows no Ray of cluster c"
    assert told in world(*words).stdout

    write_private(local_file("c"), "0" * 64)
    refused = world(*words, code=2)
    assert f"storage     model: {shelf}/mine is not there" in refused.stdout
    assert f"model mine is not on the cluster: {shelf}/mine is not there" in refused.stderr
    (shelf / "mine").mkdir(parents=True)
    (shelf / "mine" / "config.json").write_text("{}")
    first, second = world.json(*words)["storage"]
    assert first == f"model {shelf}/mine is there"
    assert second.startswith(f"dataset hotpotqa would be copied from this machine: {shelf.parent}/datasets/hotpotqa is")
    for host in world.hosts:
        host.stop()
    assert "storage     was not asked for models and data: h1: " in world(*words).stdout


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that becomes full while a file is written, as far as this process can tell."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_held_out_questions_of_a_run_of_a_cluster(world: World, tmp_path: Path) -> None:
    writer = RunWriter(world.root).config().attempt().steps(1, 2)
    folder = writer.run.logs / "rollouts"
    assert "no record of held-out tasks" in world("trace", "--heldout", "--cluster", "c", code=1).stderr
    folder.mkdir()

    def write(name: str, memory: str) -> None:
        record = {"task_id": "t1", "turns": [], "question": "Where?", "answers": ["Arnby"], "answer": memory}
        record["sections"] = [{"text": "Ada lives in Arnby", "memory": memory}]
        data = zstandard.compress(json.dumps(record).encode() + b"\n")
        (folder / f"eval_{name}.jsonl.zst").write_bytes(data)

    write("before", "nothing")
    found = world.json("trace", "--heldout", "--cluster", "c")
    assert (found["run"], found["task"], found["after"]) == ("tiny-recall/run1", "t1", None)
    assert "Ada lives in Arnby" in world("report", "--cluster", "c", "--out", "-").stdout

    mirror = Mirror(select(HostOptions(cluster="c")), tmp_path / "copy", str(world.root))
    try:
        run = mirror.find(None, None)
        assert not (run.logs / "rollouts").exists(), "only those who show it have it brought"
        mirror.fetch_heldout(run)
        (brought,) = (run.logs / "rollouts").iterdir()
        changed = brought.stat().st_mtime_ns
        write("after", "Arnby")
        mirror.fetch(run)
        mirror.fetch_heldout(run)
        assert brought.stat().st_mtime_ns == changed, "what has not changed is not fetched again"
        whole = (run.logs / "rollouts" / "eval_after.jsonl.zst").read_bytes()
        assert whole
        write("after", random.Random(1).randbytes(200_000).hex())
        mirror.fetch(run)
        with files_of_at_most(100_000), pytest.raises(OSError, match="File too large"):
            mirror.fetch_heldout(run)
        assert (run.logs / "rollouts" / "eval_after.jsonl.zst").read_bytes() == whole, "never half a file"
        mirror.fetch_heldout(run)
        assert (run.logs / "rollouts" / "eval_after.jsonl.zst").stat().st_size > 200_000
        (folder / "eval_after.jsonl.zst").unlink()
        mirror.fetch(run)
        mirror.fetch_heldout(run)
        assert list((run.logs / "rollouts").iterdir()) == [brought]
    finally:
        mirror.close()


def test_a_trajectory_of_a_run_of_a_cluster(world: World) -> None:
    writer = RunWriter(world.root).config().attempt().steps(1, 2)
    folder = writer.run.logs / "rollouts"
    missing = world("trace", "--cluster", "c", code=1)
    assert f"{folder} holds no trajectories" in missing.stderr
    folder.mkdir()
    turn = {"kind": "update", "response": "Ada lives in Arnby", "response_ids": [1, 2]}
    for step in (1, 2):
        record = {"task_id": f"t{step}", "reward": 1.0, "turns": [turn], "question": "Where?", "answers": ["Arnby"]}
        data = zstandard.compress(json.dumps({**record, "answer": "Arnby"}).encode() + b"\n")
        (folder / f"step_{step}.jsonl.zst").write_bytes(data)
    found = world.json("trace", "--cluster", "c")
    assert (found["run"], found["step"], found["task"]) == ("tiny-recall/run1", 2, "t2")
    older = world("trace", "run1", "--cluster", "c", "--task", "t1")
    assert "wrote  Ada lives in Arnby" in older.stdout
    assert "step 9 is not recorded" in world("trace", "--cluster", "c", "--step", "9", code=2).stderr
    page = world("report", "--cluster", "c", "--out", "-").stdout
    assert '{"step":2,"tasks":[[{"task":"t2"' in page
    assert '{"step":1,' not in page  # of a run elsewhere only the newest step is brought


def test_status_of_a_cluster_says_why_its_run_failed(world: World) -> None:
    writer = failed(world)
    (writer.run.logs / "attempt_1" / "rank_1.log").write_text("Fatal: NCCL error in x.cpp:1, invalid argument\n")
    facts = world.json("status", "--cluster", "c", code=1)
    assert (facts["state"], facts["run_dir"]) == ("failed", str(writer.run.logs))
    assert "gpu-memory" in [finding["id"] for finding in facts["diagnosis"]]
    assert any(item["source"].startswith(str(writer.run.logs)) for item in facts["diagnosis"][0]["evidence"])
    assert "more: clusterkit diagnose tiny-recall/run1 --cluster c" in world("status", "--cluster", "c", code=1).stdout


def test_status_of_a_run_that_is_not_there_says_so(world: World) -> None:
    failed(world)
    facts = world.json("status", "--cluster", "c", "--trial", "nope", code=3)
    assert any("there is no run */nope" in text for text in facts["unseen"]), facts["unseen"]
    assert "no run was found" not in world("status", "--cluster", "c", code=1).stdout


def test_status_looks_into_the_folder_that_is_named(world: World) -> None:
    failed(world)
    mine = world.root.parent / "my runs"
    RunWriter(mine, trial="other").config(f"fileroot={mine}", "mode=ray").attempt().steps(1, 2)
    facts = world.json("status", "--cluster", "c", "--fileroot", str(mine), code=3)
    assert facts["run_dir"].startswith(f"{mine}/logs/")
    assert facts["trial"] == "other"
    assert world.json("status", "--cluster", "c", code=1)["trial"] == "run1"
    wrong = world("status", "--cluster", "c", "--fileroot", "mine", code=2)
    assert "a path that begins with /" in wrong.stderr


def test_what_a_run_of_a_cluster_would_go_on_from_is_looked_at_there(world: World) -> None:
    writer = failed(world)
    config = resolve("tiny").config
    write_slot(writer.run.recover, "slot-a", 1, 2, config)
    slot = write_slot(writer.run.recover, "slot-b", 2, 3, config)
    found = world.json("recover", "check", "--cluster", "c")
    assert (found["resume"]["slot"], found["resume"]["global_step"]) == ("slot-b", 3)
    assert found["folder"] == str(writer.run.recover)
    differing = world.json("recover", "check", "--cluster", "c", "--preset", "tiny", "seed=9", code=1)
    assert differing["differences"] == [{"key": "seed", "was": 1, "now": 9}]
    (slot / "__0_0.distcp").unlink()
    assert world.json("recover", "check", "--cluster", "c", "--preset", "tiny")["resume"]["slot"] == "slot-a"


def test_a_new_run_from_a_checkpoint_of_the_cluster(world: World) -> None:
    writer = failed(world)
    write_slot(writer.run.recover, "slot-a", 1, 2, resolve("tiny").config)
    words = ("train", "--preset", "tiny", "--cluster", "c", "--dry-run", "--recover-from")
    for source in ("tiny-recall/run1", str(writer.run.recover)):
        planned = world.json(*words, source, "train.learning_rate=0.5")["config"]
        assert planned["recover_from"] == str(writer.run.recover)
    refused = world(*words, "tiny-recall/run1", "model.tiny.hidden_size=64", code=2).stderr
    assert "model.tiny.hidden_size: 256 → 64" in refused
    assert "is not below" in world(*words, "/elsewhere/weights", code=2).stderr


@pytest.mark.parametrize("command", [["diagnose"], ["report", "--out", "-"], ["alerts", "--command", "true", "--once"]])
def test_unknown_runs_and_clusters_are_one_clear_error(world: World, command: list[str]) -> None:
    none = world(*command, "--cluster", "c", code=1)
    assert "cluster c has no run of" in none.stderr
    assert "clusterkit train --cluster c" in none.stderr
    failed(world)
    other = world(*command, "--cluster", "c", "--trial", "nope", code=1)
    assert "no run */nope" in other.stderr
    assert "tiny-recall/run1" in other.stderr
    elsewhere = world(*command, "--cluster", "d", code=2)
    assert "there is no cluster 'd'" in elsewhere.stderr
    for said in (none, other, elsewhere):
        assert said.stderr.count("error: ") == 1
        assert "Traceback" not in said.stderr


def test_a_second_file_of_the_same_cluster_name_is_refused(world: World, ssh: Ssh) -> None:
    failed(world)
    folder = ssh.folder / "config" / "clusters"
    (folder / "copy.yaml").write_text("name: c\n" + (folder / "c.yaml").read_text())
    said = world("diagnose", "--cluster", "copy", code=2).stderr
    assert "describes cluster 'c', not 'copy'" in said
    assert "name: copy" in said


def test_no_host_answers(world: World) -> None:
    for host in world.hosts:
        host.stop()
    began = time.monotonic()
    said = world("diagnose", "--cluster", "c", code=1).stderr
    assert "h1" in said
    assert "h2" in said
    assert time.monotonic() - began < 60


# -- without --cluster ------------------------------------------------------------------------------------------------


def started(writer: RunWriter, seconds_ago: float) -> None:
    moment = time.time() - seconds_ago
    os.utime(writer.run.config, (moment, moment))


def test_commands_go_to_the_current_cluster(world: World, tmp_path: Path) -> None:
    writer = failed(world)
    world("use", "c")
    done = world("status", code=1)
    assert f"folder       {writer.run.logs}" in done.stdout
    assert done.stderr == "on cluster c (the current one; this machine: --here)\n"
    assert world.json("status", code=1)["run_dir"] == str(writer.run.logs)
    assert "gpu-memory" in [finding["id"] for finding in world.json("diagnose")["findings"]]
    page = tmp_path / "page.html"
    assert world.json("report", "--out", str(page))["runs"] == ["tiny-recall/run1"]
    delivered = world("alerts", "--once", "--command", "true")
    assert "delivered: failed, step 3" in delivered.stderr
    config = resolve("tiny").config
    write_slot(writer.run.recover, "slot-a", 1, 2, config)
    assert world.json("recover", "check")["folder"] == str(writer.run.recover)
    assert "no runs found under" in world("status", "--here", code=1).stderr


def test_the_run_that_was_started_last_is_shown_and_the_other_named(world: World) -> None:
    there = failed(world)
    here = RunWriter(world.root.parents[2] / "runs", trial="mine").config().attempt().steps(1, 4).finish("completed", 4)
    world("use", "c")

    started(there, 50)
    started(here, 500)
    started(failed(world, "older"), 900)  # what is written to it now makes it no newer
    assert world.json("report", "--out", "page.html")["runs"] == ["tiny-recall/run1"]
    done = world("status", code=1)
    assert "tiny-recall/run1" in done.stdout
    assert "where tiny-recall/run1 was started last; of this machine: tiny-recall/mine (--here)" in done.stderr

    started(here, 5)
    done = world("status")
    assert "tiny-recall/mine" in done.stdout
    assert "where tiny-recall/mine was started last; on cluster c: tiny-recall/run1 (--cluster c)" in done.stderr

    named = world("diagnose", "--trial", "run1")
    assert "GPU memory ran out" in named.stdout
    only_here = world("status", "--trial", "mine")
    assert "on this machine (cluster c has no such run of yours)" in only_here.stderr

    world.hosts[0].stop()  # the other host shows the same storage
    assert "tiny-recall/mine" in world("status").stdout
    world.hosts[1].stop()
    silent = world("status", code=1)
    assert silent.stdout == ""
    assert "cluster c (the current one) cannot be looked at: h1: " in silent.stderr
    assert "add --here" in silent.stderr
    assert "tiny-recall/mine" in world("status", "--here").stdout
