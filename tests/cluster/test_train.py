"""`clusterkit setup --preset`: the runtime image is built on the head, goes to all hosts, and the preset trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_training import (
    ALL_STEPS,
    await_end,
    await_status,
    base_of,
    evaluation,
    person,
    preset,
    records,
    run_folder,
    small,
    status,
    train_state,
    weights,
)
from run_writer import RunWriter
from setup_command import Done, Operator
from testbed import PASSWORD, Node

from clusterkit.runs.directory import hold_lock

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

HOLDS = "holds"
"""A run that is longer than the tests look at it."""


def test_image_with_torch_is_built_and_the_preset_trains_on_it(operator: Operator, pair: list[Node]) -> None:
    head, worker = pair
    first = operator.setup(*preset(operator), hosts=pair, timeout=1200)
    assert train_state(first, head) == "changed"
    assert first.row(worker)["steps"]["train"] == "skipped"
    assert first.row(head)["steps"]["image"] == "changed", "not what it did for the others"
    assert first.report["ray"]["ready"] is True
    assert len({node["image_id"] for node in first.report["ray"]["nodes"]}) == 1
    training = first.report["training"]
    assert training["state"] == "started"
    folder = run_folder(operator)
    assert training["run_dir"].endswith(str(folder.relative_to(operator.testbed.storage)))
    end = await_end(folder)
    assert end["status"] == "completed", end
    steps = [record["global_step"] for record in records(folder) if record["kind"] == "step"]
    assert steps == [1, 2]
    assert "task_reward" in (folder / "main.log").read_text()

    again = operator.setup(*preset(operator), hosts=pair)
    assert (again.changes, again.report["training"]["state"]) == (0, "complete")


def test_same_command_attaches_and_another_run_is_refused(operator: Operator, pair: list[Node]) -> None:
    head = pair[0]
    long = ("train.total_steps=100000", f"trial_name={HOLDS}")
    first = operator.setup(*preset(operator, *long), hosts=pair)
    assert train_state(first, head) == "changed"
    job = first.report["training"]["submission_id"]

    same = operator.setup(*preset(operator, *long), hosts=pair)
    assert (train_state(same, head), same.changes) == ("ok", 0)
    assert (same.report["training"]["state"], same.report["training"]["submission_id"]) == ("attached", job)

    other = operator.setup(*preset(operator, *long, "seed=2"), hosts=pair)
    assert other.exit_code == 3
    failure = other.failure(head)
    assert failure["step"] == "train"
    assert f"{HOLDS} is being trained with other settings, as job {job}" in failure["message"]
    assert "trial_name=NEW" in failure["message"]

    # Ray must not be taken from under a job.
    recreated = operator.setup("--shm", "100m", hosts=pair)
    assert recreated.exit_code != 0
    assert job in recreated.failure(head)["fix"]
    assert [record for record in records(run_folder(operator, HOLDS)) if record["kind"] == "finish"] == []
    # What comes next needs the cores that it would keep busy.
    assert operator("stop", "--cluster", "default", "--trial", HOLDS).exit_code == 0


def test_check_looks_from_inside_the_containers(operator: Operator, pair: list[Node]) -> None:
    done = operator.check("--nccl", "--bandwidth", hosts=pair)
    told = {finding["check"]: finding for finding in done.report["cluster"]}
    assert "inside the containers of 2 host(s)" in told["container storage"]["message"]
    assert "all-reduce over 2 hosts: " in told["nccl"]["message"], told
    assert (told["container storage"]["level"], told["nccl"]["level"]) == ("ok", "ok")


# -- two FSDP ranks on two hosts --------------------------------------------------------------------------------------

TOLERANCE = 1e-5
"""Two ranks add their gradients in another order than one; the reference of this machine has two ranks as well."""


@pytest.fixture(scope="module")
def reference(operator: Operator, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights of the same run with two ranks on this machine."""
    root = tmp_path_factory.mktemp("here")
    done = operator(*small("here"), "--no-progress", "--fileroot", str(root), timeout=300)
    assert done.exit_code == 0, done.text
    return weights(root, "here")


def assert_like(reference: dict[str, Any], operator: Operator, trial: str) -> None:
    trained = weights(operator.testbed.storage / "ray/experiments", trial)
    assert trained.keys() == reference.keys()
    assert max(float((trained[name] - reference[name]).abs().max()) for name in trained) <= TOLERANCE


def test_two_ranks_on_two_hosts_stopped_and_resumed_make_the_run_of_one_machine(
    operator: Operator, pair: list[Node], reference: dict[str, Any]
) -> None:
    begun = operator(*small("both"), "--cluster", "default", "--detach")
    assert begun.exit_code == 0, begun.text
    assert "clusterkit stop tiny-recall/both --cluster default" in begun.stderr
    seen = await_status(operator, lambda seen: seen["progress"]["global_step"] >= 3)
    assert (seen["state"], seen["exit_code"], seen["job"]["status"]) == ("running", 0, "RUNNING")
    assert seen["trial"] == "both"
    stopped = operator("stop", "--cluster", "default")  # at once: it must not come to its end before
    assert stopped.exit_code == 0, stopped.text
    log = run_folder(operator, "both") / "main.log"
    assert f"ranks run on {pair[0].address}, {pair[1].address}" in log.read_text()
    assert operator("logs", "--cluster", "default", "--lines", "0").stdout.startswith(log.read_text()[:1000])
    seen = status(operator)
    done = seen["progress"]["global_step"]
    assert (seen["state"], seen["recover"]["global_step"]) == ("interrupted", done)
    assert 3 <= done < ALL_STEPS

    followed = operator(*small("both"), "--cluster", "default", timeout=400)
    assert followed.exit_code == 0, followed.text
    assert f"going on after step {done}" in followed.stderr
    assert f"step {ALL_STEPS}/{ALL_STEPS}" in followed.stderr
    assert [r["resume_step"] for r in records(run_folder(operator, "both")) if r["kind"] == "attempt"] == [0, done]
    assert_like(reference, operator, "both")
    listed = json.loads(operator("jobs", "--json").stdout)
    assert [job["status"] for job in listed if job["trial"] == "both"] == ["STOPPED", "SUCCEEDED"]


def test_trainer_that_is_killed_is_started_again(
    operator: Operator, pair: list[Node], reference: dict[str, Any]
) -> None:
    assert operator(*small("killed"), "--cluster", "default", "--detach").exit_code == 0
    await_status(operator, lambda seen: seen["progress"]["global_step"] >= 3)
    pair[0].exec("pkill -KILL -f '[-]m trainer /storage'")
    seen = await_status(operator, lambda seen: seen["state"] in ("finished", "failed", "killed"))
    assert (seen["state"], seen["attempts"]) == ("finished", 2)
    mark = json.loads((run_folder(operator, "killed") / "attempt_1" / "exit.json").read_text())
    assert (mark["code"], mark["message"]) == (-9, "ended by SIGKILL")
    assert_like(reference, operator, "killed")


def test_worker_that_dies_and_comes_back(operator: Operator, pair: list[Node], reference: dict[str, Any]) -> None:
    _, worker = pair
    assert operator(*small("lost"), "--cluster", "default", "--detach").exit_code == 0
    await_status(operator, lambda seen: seen["progress"]["global_step"] >= 3)
    worker.kill()
    try:
        # The head goes on alone, and what is not there is told.
        seen = await_status(operator, lambda seen: seen["state"] == "finished")
        assert any(worker.address in text for text in seen["unseen"]), seen["unseen"]
        assert seen["exit_code"] == 3
        mark = json.loads((run_folder(operator, "lost") / "attempt_1" / "exit.json").read_text())
        assert f"the node {worker.address} or its Ray has gone" in mark["message"]
        assert_like(reference, operator, "lost")
    finally:
        worker.start()
    again = operator.setup("--image", "none", "--image-base", base_of(operator.testbed), hosts=pair)
    assert again.exit_code == 0, again.text
    seen = status(operator)
    assert (seen["cluster"]["ready"], seen["unseen"], seen["exit_code"]) == (True, [], 0)


def test_the_commands_as_a_user_types_them(operator: Operator, pair: list[Node], tmp_path: Path) -> None:
    """After `setup --hostnames` what it printed last works as printed: train, status, logs, eval, stop."""

    def typed(command: str, *more: str) -> Done:
        done = operator(*command.split()[1:], *more, cwd=tmp_path)
        assert done.exit_code == 0, done.text
        return done

    setup = typed("clusterkit setup", "--hostnames", *(node.address for node in pair))
    assert "0 changes" in setup.stdout
    printed = re.findall(r"^  .+?  (clusterkit .+)$", setup.stdout.partition("Next:")[2], re.MULTILINE)
    train, status_, logs, evaluate, stop, ray, down = printed
    assert train == "clusterkit train --preset tiny --cluster default"  # no host has a GPU, and tiny would train here
    assert (status_, logs, stop) == ("clusterkit status", "clusterkit logs -f", "clusterkit stop")
    assert (evaluate, ray) == ("clusterkit eval --model-path tiny-recall/run1", "clusterkit ray-status")
    assert down == "clusterkit down"

    listed = typed("clusterkit use")
    assert listed.stdout == "* default  (the current one)\n"
    long = small("typed", **{"train.total_steps": 100000})[3:]
    typed(train, *long, "--detach")
    await_status(operator, lambda seen: seen["trial"] == "typed" and seen["progress"]["global_step"] >= 3)
    seen = typed(status_)
    assert seen.stderr == "on cluster default (the current one; this machine: --here)\n"
    assert "tiny-recall/typed" in seen.stdout
    assert "2 of 2 nodes" in seen.stdout
    log = (run_folder(operator, "typed") / "main.log").read_text()
    assert typed("clusterkit logs", "-n", "0").stdout.startswith(log[:500])
    scored = typed(evaluate, "--num-questions", "4")
    assert "on cluster default (the current one; this machine: --here)" in scored.stderr
    assert "\nrecall\t4\t" in scored.stdout, scored.stdout
    assert "--- prompt" in typed("clusterkit eval show", "--question", "1").stdout
    assert "typed" in typed("clusterkit jobs").stdout
    assert "tiny-recall/typed" in typed("clusterkit diagnose").stdout
    assert typed("clusterkit report", "--out", "-").stdout.startswith("<!")
    assert "ready" not in typed(ray).stderr
    mine = RunWriter(tmp_path / "runs", trial="mine").config().attempt()
    with hold_lock(mine.run.logs / "run.lock"):
        refused = operator("stop", cwd=tmp_path)
    assert refused.exit_code == 2
    for part in (
        "tiny-recall/mine on this machine (--here)",
        "tiny-recall/typed on cluster default (--cluster default)",
    ):
        assert part in refused.stderr
    assert "is stopped" in typed(stop).stdout
    there = typed("clusterkit recover check", "--trial", "typed")
    assert "on cluster default (the current one; this machine: --here)" in there.stderr


def test_what_cannot_be_stopped_or_shown(operator: Operator) -> None:
    nothing = operator("stop", "--cluster", "default")
    assert nothing.exit_code == 1
    assert "no run is alive on cluster default" in nothing.stderr
    unknown = operator("logs", "--cluster", "default", "--trial", "no-such")
    assert unknown.exit_code == 1
    assert "no run */no-such" in unknown.stderr
    elsewhere = operator("status", "--cluster", "no-such")
    assert elsewhere.exit_code == 2
    assert "no-such" in elsewhere.stderr


def test_engine_servers_of_a_run_on_the_cluster(operator: Operator) -> None:
    """The image has no vLLM; what is shown is the way there and back: the storage, Ray's job, its words."""
    listed = operator("serve", "list", "--cluster", "default", "--trial", "run1")
    assert (listed.exit_code, "the run has no engine servers" in listed.text) == (0, True), listed.text
    added = operator("serve", "add", "--cluster", "default", "--trial", "run1")
    assert (added.exit_code, "has not started engine servers" in added.text) == (2, True), added.text
    folder = run_folder(operator) / "servers"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text((run_folder(operator) / "config.yaml").read_text())
    ended = operator("serve", "stop", "server-3", "--cluster", "default", "--trial", "run1")
    assert ended.exit_code == 1
    assert "the run has no server server-3" in ended.text, ended.text


def test_judge_servers_on_the_cluster(operator: Operator) -> None:
    """The image has no vLLM: they are placed and registered on a node, and their end is told and cleared away."""
    words = ("serve", "judge", "--cluster", "default", "--preset", "memalpha-tiny")
    missing = operator(*words, "--model", "/storage/models/none")
    assert missing.exit_code == 2
    assert "model none is not on the cluster" in missing.stderr
    model = operator.testbed.storage / "models" / "judge"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 2}))
    (model / "model.safetensors").touch()
    started = operator(*words, "--model", "/storage/models/judge", "--engine", "vllm")
    assert started.exit_code == 1, started.text
    assert "judge-0 on " in started.stderr
    assert "did not start: vLLM is not installed" in started.stderr
    listed = operator(*words, "--list")
    assert (listed.exit_code, listed.stdout) == (0, "the run has no judge servers\n"), listed.text
    stopped = operator(*words, "--stop")
    assert (stopped.exit_code, stopped.stdout) == (0, "the run has no judge servers\n"), stopped.text


def test_commands_that_read_runs_and_what_is_applied(operator: Operator) -> None:
    """A dispatched run that failed for want of memory, as its console says, goes on with what diagnose applied."""
    there = ("--cluster", "default", "--trial", "advised")
    assert (
        operator(*small("advised", **{"train.total_steps": 100000}), "--cluster", "default", "--detach").exit_code == 0
    )
    await_status(operator, lambda seen: seen["progress"]["global_step"] >= 3)
    busy = operator("diagnose", *there, "--apply")
    assert busy.exit_code == 1
    assert "clusterkit stop tiny-recall/advised --cluster default" in busy.stderr
    assert operator("stop", "--cluster", "default").exit_code == 0
    folder = run_folder(operator, "advised")
    with (folder / "attempt_1" / "console.log").open("a") as console:
        console.write(
            'Traceback (most recent call last):\n  File "/codes/trainer/train/learner.py", line 80, in step\n'
        )
        console.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")

    found = operator("diagnose", *there, "--json")
    assert "gpu-memory" in [finding["id"] for finding in json.loads(found.stdout)["findings"]]
    applied = operator("diagnose", *there, "--apply", "--json")
    assert applied.exit_code == 0, applied.text
    (change, *_) = json.loads(applied.stdout)["overrides"]
    assert (folder / "overrides.yaml").exists()

    checked = operator("recover", "check", *there, "--json")
    assert checked.exit_code == 0, checked.text
    step = json.loads(checked.stdout)["resume"]["global_step"]
    assert step >= 3
    other = operator("recover", "check", *there, "seed=77", "--json")
    assert (other.exit_code, json.loads(other.stdout)["differences"]) == (1, [{"key": "seed", "was": 1, "now": 77}])

    again = operator(*small("advised", **{"train.total_steps": 100000}), "--cluster", "default", "--detach")
    assert again.exit_code == 0, again.text
    assert f"{change['key']}={change['now']} instead of {change['was']}" in again.stderr
    await_status(operator, lambda seen: seen["progress"]["global_step"] > step)
    assert f"{change['now']}" in (folder / "config.yaml").read_text()
    assert operator("stop", "--cluster", "default").exit_code == 0

    done = operator("report", *there, "--out", "-")
    assert (done.exit_code, "advised" in done.stdout) == (0, True), done.stderr


def test_a_new_run_from_the_checkpoint_of_another(operator: Operator) -> None:
    words = small("child", **{"train.learning_rate": 5e-4, "train.total_steps": ALL_STEPS + 5})
    done = operator(*words, "--cluster", "default", "--recover-from", "tiny-recall/both", timeout=400)
    assert done.exit_code == 0, done.text
    (first, *_) = [record for record in records(run_folder(operator, "child")) if record["kind"] == "attempt"]
    assert first["resume_step"] == ALL_STEPS
    refused = operator(
        *small("bad", **{"task.num_keys": 9}), "--cluster", "default", "--recover-from", "tiny-recall/both"
    )
    assert refused.exit_code == 2
    assert "task.num_keys" in refused.stderr


def test_an_evaluation_is_a_job_whose_results_come_here(operator: Operator, tmp_path: Path) -> None:
    words = evaluation("--data-names", "recall@4", "--num-questions", "64", "--n-sampling", "8")
    begun = operator(*words, "--detach", "--json", cwd=tmp_path)
    assert begun.exit_code == 0, begun.text
    assert "clusterkit eval stop --cluster default --out scores" in begun.stderr

    followed = operator(*words, cwd=tmp_path)
    assert followed.exit_code == 0, followed.text
    assert f"it runs already, as job {begun.report['submission_id']}" in followed.stderr
    assert "576/576 answers" in followed.stderr
    assert "\nrecall@4\t" in followed.stdout
    copies = tmp_path / "scores" / "default"
    (place,) = [path.parent for path in copies.glob("*/results.json")]
    assert (place / "index.html").exists()
    results = json.loads((place / "results.json").read_text())
    assert results["model_path"].startswith("/storage/ray/experiments/checkpoints/")
    assert results["config"]["agent"]["chunk_tokens"] == 10  # of the run, not the default
    shown = operator("eval", "show", str(copies), "--question", "2", "--sample", "1")
    assert (shown.exit_code, "--- prompt\n<u> question" in shown.stdout) == (0, True), shown.text

    again = operator(*words, "--json", cwd=tmp_path)
    assert "every answer is in the record" in again.stderr, again.text
    assert json.loads(again.stdout)["rows"] == results["rows"]
    there = operator("eval", "show", "scores", "--cluster", "default", "--question", "2", "--json", cwd=tmp_path)
    assert json.loads(there.stdout)["number"] == 2, there.text


def test_an_evaluation_on_the_cluster_tells_what_it_lacks_and_can_be_stopped(
    operator: Operator, tmp_path: Path
) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text('{"problem": "1+1", "answer": "2"}\n')
    words = evaluation("--data-names", str(data))
    sent = operator(*words, cwd=tmp_path)
    assert sent.exit_code == 2
    assert "sums: the checkpoint's tokenizer has no chat template" in sent.stderr, sent.text
    unknown = operator(*evaluation("--data-names", "recall"), "--model-path", "no-such", cwd=tmp_path)
    assert unknown.exit_code == 2
    assert "/storage/models/no-such is not there" in unknown.stderr

    long = ("--data-names", "recall@64", "--num-questions", "2000")
    assert operator(*evaluation(*long), "--detach", cwd=tmp_path).exit_code == 0
    other = operator(*evaluation(*long, "--seed", "1"), cwd=tmp_path)
    assert (other.exit_code, "another evaluation writes into /storage/" in other.stderr) == (2, True), other.text
    stopped = operator("eval", "stop", "--cluster", "default", "--output-path", "scores")
    assert (stopped.exit_code, "is stopped" in stopped.stdout) == (0, True), stopped.text


def test_two_unprivileged_users_touch_only_their_own_runs(operator: Operator, pair: list[Node], tmp_path: Path) -> None:
    alice = person(operator, pair, tmp_path, "alice", "admin", PASSWORD)
    bob = person(operator, pair, tmp_path, "bob", "deploy")
    there, long = ("--cluster", "default"), {"train.total_steps": 100000, "train.ranks": 1}

    # Two submissions of one trial at the same moment: one trains, with its own settings, and the other is refused.
    both = {seed: alice.start(*small("mine", seed=seed, **long), *there, "--detach") for seed in (11, 12)}
    said = {seed: one.communicate(timeout=300)[1] for seed, one in both.items()}
    codes = {both[seed].returncode: seed for seed in both}
    assert sorted(codes) == [0, 2], said
    assert "/mine is being trained with other settings, as job alice-" in said[codes[2]]
    (folder,) = operator.testbed.storage.glob("ray/experiments/logs/alice/*/mine")
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == codes[0]
    await_status(alice, lambda seen: seen["progress"]["global_step"] >= 3)

    begun = bob(*small("mine", **long), *there, "--detach")
    assert begun.exit_code == 0, begun.text
    seen = await_status(bob, lambda seen: seen["progress"]["global_step"] >= 3)
    assert "/logs/bob/" in seen["run_dir"]
    listed = bob("jobs", *there, "--json")
    assert {job["user"] for job in json.loads(listed.stdout)} == {"bob"}
    assert "alice (1)" in listed.stderr
    (log,) = operator.testbed.storage.glob("ray/experiments/logs/bob/*/mine/main.log")
    assert bob("logs", *there, "--lines", "0").stdout.startswith(log.read_text()[:200])
    stopped = bob("stop", *there)
    assert stopped.exit_code == 0, stopped.text
    before = status(alice)["progress"]["global_step"]
    assert status(bob)["state"] == "interrupted"

    for words in (("stop", *there), ("stop", *there, "--force", "--trial", "mine")):
        refused = bob(*words)
        assert refused.exit_code == 1, refused.text
        assert "of others: alice's" in refused.stderr
        assert "(--user alice)" in refused.stderr
    down = bob("down", *there, "-y")
    assert (down.exit_code, "of alice. Nothing was removed" in down.stderr) == (2, True), down.text
    assert "--user alice" in down.stderr
    recreated = bob.setup("--shm", "100m", "--recreate", hosts=pair)
    assert recreated.exit_code != 0
    assert "of alice" in recreated.failure(pair[0])["message"]
    seen = await_status(alice, lambda seen: seen["progress"]["global_step"] > before + 1)
    assert (seen["state"], seen["attempts"]) == ("running", 1)

    assert "/logs/alice/" in status(bob, "--user", "alice")["run_dir"]
    named = bob("stop", *there, "--user", "alice")
    assert named.exit_code == 0, named.text
    assert "alice's " in named.stdout
    assert status(alice)["state"] == "interrupted"


def test_status_without_ray_and_without_the_head(operator: Operator, pair: list[Node]) -> None:
    """The last test of this file: it takes the head away."""
    head, _ = pair
    head.exec("docker kill clusterkit-default-head")
    seen = status(operator, "--trial", "both")
    assert (seen["state"], seen["trial"]) == ("finished", "both")
    assert seen["exit_code"] == 3
    assert any("job API does not answer" in text for text in seen["unseen"])
    head.kill()
    seen = status(operator, "--trial", "both")
    assert (seen["state"], seen["progress"]["global_step"]) == ("finished", ALL_STEPS)
    assert any(head.address in text for text in seen["unseen"])
    assert seen["exit_code"] == 3
    head.start()
