"""`train --sweep`: its grammar, the trials' names, and what is refused before anything starts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import Result
from run_writer import RunWriter
from slot_writer import write_slot
from typer.testing import CliRunner

from clusterkit.backends.base import Backend, Job, Place, PlannedRun, RunOutcome, RunRequest, StoredInput, SubmittedRun
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.backends.records import Runs
from clusterkit.cli.actions import sweep, sweep_trials
from clusterkit.cli.actions.sweep_trials import SweptRun, jobs_at_once, submit_all, train_in_turn
from clusterkit.cli.main import app
from clusterkit.config.resolve import resolve
from clusterkit.config.sweep import combinations, split_values
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.assets.model import NodeAsset, Origin
from clusterkit.provision.ray.token import local_file
from clusterkit.runs.directory import hold_lock
from clusterkit.runs.trials import run_directory
from trainer.errors import NoAnswerError, RunError, UserError


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def train(*words: str) -> Result:
    return CliRunner().invoke(app, ["train", "--preset", "tiny", "--dry-run", *words])


def refused(*words: str) -> str:
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, ["train", "--preset", "tiny", *words], catch_exceptions=False)
    assert error.value.exit_code == 2
    return str(error.value)


def plans(*words: str) -> list[dict[str, Any]]:
    done = train("--json", *words)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["trials"]
    return found


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,2e-5", ["1e-5", "2e-5"]),
        ("[4,8],[16,32]", ["[4,8]", "[16,32]"]),
        ("{a: 1, b: 2},{a: 3}", ["{a: 1, b: 2}", "{a: 3}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("it's,b", ["it's", "b"]),
        ("1", ["1"]),
        ("1,,2", ["1", "", "2"]),
    ],
)
def test_values_are_split_at_the_commas_between_them(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize(
    ("sweeps", "settings", "names"),
    [
        (["train.learning_rate=1e-5,0.00002"], [], ["learning_rate-1e-05", "learning_rate-2e-05"]),
        (["seed=1,2", "train.threads=1,2"], [], [f"seed-{s}_threads-{t}" for s in (1, 2) for t in (1, 2)]),
        (
            ["rollout.batch_size=4,8", "warmup.batch_size=16"],
            [],
            [f"rollout.batch_size-{size}_warmup.batch_size-16" for size in (4, 8)],
        ),
        (["eval.final_chunks=[4,8],[]"], [], ["final_chunks-4-8", "final_chunks-empty"]),
        (["actor.optimizer.lr=1e-5,3e-5"], [], ["learning_rate-1e-05", "learning_rate-3e-05"]),
        (["seed=1,2"], ["trial_name=again"], ["again_seed-1", "again_seed-2"]),
    ],
)
def test_a_trials_name_tells_its_values(sweeps: list[str], settings: list[str], names: list[str]) -> None:
    assert [one.trial for one in combinations(sweeps, settings)] == names


def test_names_of_values_that_look_alike_or_are_long_differ() -> None:
    alike = [one.trial for one in combinations(["task.path=/a/b,/a-b"], [])]
    assert len(set(alike)) == 2
    assert all(name.startswith("path-a-b-") for name in alike)
    (long,) = combinations([f"task.path=/{'x' * 300}"], [])
    assert len(long.trial) < 140
    assert [long] == combinations([f"task.path=/{'x' * 300}"], []), "the same command goes on with it"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sweep", "seed"], "write KEY=V1,V2"),
        (["--sweep", "seed=1,,2"], "a value is missing"),
        (["--sweep", "seed=1,1"], "are the same value"),
        (["--sweep", "train.learning_rate=1e-5,0.00001"], "are the same value"),
        (["--sweep", "seed=1", "--sweep", "seed=2"], "seed is given twice"),
        (["--sweep", "seed=1,2", "seed=3"], "seed is swept and also set to 3"),
        (["--sweep", "trial_name=a,b"], "every trial gets a name of its own"),
        (["--sweep", "cluster.fileroot=a,b"], "every trial gets a name of its own"),
        (["--sweep", "sed=1,2"], "unknown key sed"),
        (["--sweep", "train.learning_rate=1e-5,-1"], "must be a number above 0"),
        (["--sweep", "train.ranks=1,64", "train.threads=1000000"], "No trial was started"),
        (["--sweep", "seed=1,2", "--detach"], "--detach is for runs of a cluster"),
        (["--sweep", "seed=1,2", "--partition", "p"], "options for Slurm"),
    ],
)
def test_all_is_checked_before_the_first_trial_starts(machine: Path, words: list[str], says: str) -> None:
    assert says in refused(*words)
    assert not machine.exists()


def test_two_ways_to_write_one_path_are_one_run(tmp_path: Path) -> None:
    examples = (json.dumps({"prompt": f"question {n}", "answer": "b"}) for n in range(40))
    (tmp_path / "a.jsonl").write_text("\n".join(examples))

    message = refused("trainer.type=sft", "--sweep", "task.path=a.jsonl,./a.jsonl")

    assert "would be the same run: leave one of the values out" in message


def test_what_is_wrong_with_one_combination_names_it() -> None:
    message = refused("--sweep", "train.learning_rate=1e-5,-1")

    assert message.startswith("train.learning_rate=-1: ")
    assert message.endswith("No trial was started")


def test_the_dry_run_lists_the_trials_with_what_each_would_do(machine: Path) -> None:
    RunWriter(machine, trial="seed-1").config("seed=1").attempt(total_steps=60).steps(1, 60).finish(step=60)
    RunWriter(machine, trial="seed-2").config("seed=2").attempt().steps(1, 10).recover(8)

    shown = train("--sweep", "seed=1,2,3").stdout.splitlines()

    assert shown[0] == "3 trials, one after another on this machine (nothing has been written or started)"
    assert "  tiny-recall/seed-1 is complete already, nothing would be trained" in shown
    assert "  tiny-recall/seed-2 goes on after step 8" in shown
    assert "  tiny-recall/seed-3 starts from the beginning" in shown
    assert sum("256 trajectories" in line for line in shown) == 1, "what all have is said once"
    assert [(plan["trial"], plan["settings"], plan["plan"]["course"]) for plan in plans("--sweep", "seed=1,2,3")] == [
        ("seed-1", ["seed=1"], "complete"),
        ("seed-2", ["seed=2"], "resume"),
        ("seed-3", ["seed=3"], "new"),
    ]
    assert not (machine / "logs" / RunWriter(machine, trial="x").run.user / "tiny-recall" / "seed-3").exists()


def test_the_storage_is_asked_before_any_trial_starts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage of this machine stands in for a cluster's."""
    looks = list[str]()

    class Stored(LocalBackend):
        def plan(self, request: RunRequest) -> PlannedRun:
            model = NodeAsset("model", f"of {request.config.train.threads}", "/storage/models/m", Origin.HOST)

            def look() -> list[StoredInput]:
                looks.append(request.config.trial_name)
                gone = "model m is not on the cluster" if request.config.train.threads == 3 else ""
                return [StoredInput("model m is there"), StoredInput("dataset d is there", gone)]

            planned = super().plan(request)
            return replace(planned, request=replace(planned.request, assets=(model,)), look=look)

    monkeypatch.setattr(sweep, "open_backend", Stored)

    shown = train("--sweep", "seed=1,2", "--sweep", "train.threads=1,2").stdout.splitlines()

    assert shown.count("  storage     model m is there") == shown.count("  storage     dataset d is there") == 1
    assert looks == ["seed-1_threads-1", "seed-1_threads-2"], "once for all with the same models and data"
    assert [one["storage"] for one in plans("--sweep", "seed=1,2")] == [["model m is there", "dataset d is there"]] * 2
    told = "seed-1_threads-3, seed-2_threads-3: model m is not on the cluster\nNo trial was started"
    for more in ((), ("--dry-run",)):
        assert refused("--sweep", "seed=1,2", "--sweep", "train.threads=1,3", *more) == told


def test_a_plan_that_differs_between_trials_is_told_for_each() -> None:
    shown = train("--sweep", "rollout.batch_size=4,8").stdout

    assert "4 tasks x 8 = 32 trajectories" in shown
    assert "8 tasks x 8 = 64 trajectories" in shown


@pytest.mark.parametrize("complete", [True, False])
def test_a_trial_of_that_name_with_other_settings_is_refused(machine: Path, complete: bool) -> None:
    writer = RunWriter(machine, trial="seed-1").config("seed=1", "train.learning_rate=1e-3").attempt(total_steps=60)
    writer.steps(1, 60).recover(60)
    if complete:
        writer.finish(step=60)

    message = refused("--sweep", "seed=1,2")

    assert "tiny-recall/seed-1" in message
    assert "train.learning_rate: 0.001 \u2192 " in message
    assert "add trial_name=NEW" in message
    assert not writer.run.logs.with_name("seed-2").exists()


def test_a_trial_that_is_being_trained_is_refused(machine: Path) -> None:
    writer = RunWriter(machine, trial="seed-1").config("seed=1").attempt().steps(1, 2)
    with hold_lock(writer.run.logs / "run.lock"):
        message = refused("--sweep", "seed=1,2")
    assert "seed-1 is being trained now by process" in message
    assert "leave its value out, or wait until it has ended" in message
    assert "trial_name=NEW" not in message  # which would train all of them anew


def test_the_trial_to_follow_is_one_that_is_at_work(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command begins the second one between the check and its turn."""
    done = RunWriter(machine, trial="seed-1").config("seed=1").attempt(total_steps=60).steps(1, 60).recover(60)
    done.finish(step=60)
    writer = RunWriter(machine, trial="seed-2").config("seed=2").attempt().steps(1, 2)
    with ExitStack() as held:

        def begun(*_: object, **__: object) -> str:
            held.enter_context(hold_lock(writer.run.logs / "run.lock"))
            return ""

        monkeypatch.setattr(sweep, "train_in_turn", begun)
        found = CliRunner().invoke(app, ["train", "--preset", "tiny", "--sweep", "seed=1,2"])

    assert found.exit_code == 3
    assert "clusterkit status --watch tiny-recall/seed-2" in found.stderr


def test_trials_that_have_ended_are_compared_on_a_page(
    machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Where their folders are those of another machine, the command that makes the page is named in its place."""
    for seed in (1, 2):
        done = RunWriter(machine, trial=f"seed-{seed}").config(f"seed={seed}").attempt(total_steps=60)
        done.steps(1, 60).recover(60).finish(step=60)
    command = ["train", "--preset", "tiny", "--sweep", "seed=1,2"]
    page = done.run.logs.parent / "sweep.html"
    found = CliRunner().invoke(app, command)

    assert found.exit_code == 0, found.output
    assert f"compare them      {page}" in found.stderr
    assert "seed-1 against tiny-recall/seed-2" in page.read_text()
    assert str(page) not in found.stdout, "the table alone"
    page.unlink()

    elsewhere = tmp_path_factory.mktemp("storage")
    with monkeypatch.context() as patched:
        patched.setattr(Runs, "original", lambda _, run: replace(run, fileroot=elsewhere))
        said = CliRunner().invoke(app, command).stderr
    words = f"tiny-recall/seed-1 --fileroot {elsewhere} --compare tiny-recall/seed-2 --out tiny-recall.html"
    assert f"compare them      clusterkit report {words}\n" in said
    assert not page.exists()
    typed = words.replace(str(elsewhere), str(machine)).split()
    assert CliRunner().invoke(app, ["report", *typed]).exit_code == 0
    assert "seed-1 against tiny-recall/seed-2" in Path("tiny-recall.html").read_text()


@pytest.mark.parametrize(("key", "values"), [("reward.name", "boxed,f1"), ("seed", "1,2")])
def test_of_trials_with_different_rewards_none_is_called_the_best(machine: Path, key: str, values: str) -> None:
    for value, accuracy in zip(values.split(","), (0.2, 0.9), strict=True):
        setting = f"{key}={value}"
        done = RunWriter(machine, trial=f"{key.rpartition('.')[2]}-{value}").config(setting).attempt(total_steps=60)
        done.steps(1, 60).record("eval", name="heldout", global_step=60, chunks=0, num_tasks=8, accuracy=accuracy)
        done.recover(60).finish(step=60)
    found = CliRunner().invoke(app, ["train", "--preset", "tiny", "--sweep", f"{key}={values}"])

    assert found.exit_code == 0, found.output
    alike = key == "seed"
    assert ("reward.name differs, so rewards and scores of these trials do not compare" in found.stderr) is not alike
    assert ("the best one      clusterkit status tiny-recall/seed-2" in found.stderr) is alike
    assert ("the best" in found.stderr.replace("none is the best", "")) is alike
    assert f"--sort {'accuracy' if alike else 'name'}\n" in found.stderr


DONE = "interrupted when tiny-recall/run1 was trained\nTo go on: clusterkit train"


@pytest.mark.parametrize(
    ("status", "stopped", "left", "trained"),
    [
        ("killed", True, "it was killed", 1),
        ("killed", False, "", 2),
        ("completed", True, DONE, 1),
        ("completed", False, "", 2),
    ],
)
def test_no_trial_is_trained_after_one_in_which_the_sweep_was_told_to_end(
    status: str, stopped: bool, left: str, trained: int
) -> None:
    followed = []

    class Ending:
        def plan(self, request: object) -> object:
            return request

        start = plan

        def follow(self, submitted: object, *_: object) -> RunOutcome:
            followed.append(submitted)
            return RunOutcome(status, int(status == "killed"), "it was killed", None, 3, stopped)

    run = SweptRun(cast("Any", SimpleNamespace(config=resolve("tiny").config)), "it starts", complete=False)

    assert train_in_turn(cast("Any", Ending()), [run, run], "clusterkit train", shown=False) == left
    assert len(followed) == trained


def test_trials_that_go_to_different_places_are_refused() -> None:
    inventory.save(Cluster(name="lab", hosts=(Host(name="h1", address="127.0.0.1", port=1),)))
    local_file("lab").parent.mkdir(parents=True)
    local_file("lab").write_text("0" * 64)

    assert "some of these runs would go to this machine and some to the cluster" in refused("--sweep", "mode=local,ray")


def test_all_trials_start_from_another_runs_checkpoint(machine: Path) -> None:
    base = RunWriter(machine, trial="base").config().attempt().steps(1, 8).recover(8)
    write_slot(base.run.recover, "slot-a", 1, 8, resolve("tiny").config)

    found = train("--sweep", "train.learning_rate=1e-5,2e-5", "--recover-from", "tiny-recall/base").stdout

    assert found.count(f"starts from {base.run.recover}") == 2
    message = refused("--sweep", "model.tiny.hidden_size=64,128", "--recover-from", "tiny-recall/base")
    assert "model.tiny.hidden_size: 256 \u2192 64" in message
    assert "No trial was started" in message


def test_jobs_whose_ranks_and_servers_are_placed_apart_wait_for_each_other() -> None:
    apart, together = (resolve(name).config for name in ("7B_n4", "tiny"))

    assert jobs_at_once("ray", [apart, apart]) == 1
    assert jobs_at_once("ray", [together] * 3) > 3
    assert jobs_at_once("slurm", [apart] * 40) == 40


class JobsPlace:
    """Stands for a cluster whose jobs end when the test says so: no real one ends them at a chosen look."""

    where = "on cluster c"

    def __init__(self, mode: str, looks: list[list[str]]) -> None:
        self.place, self.looks, self.started = Place(mode), looks, list[str]()

    silent = 0
    """Submissions of the trial of that name that get no answer."""
    broken = 0
    """Jobs of the trial of that name, each of which ends at once."""

    def attach(self, request: RunRequest) -> None:
        """None of them runs yet."""

    def plan(self, request: RunRequest) -> PlannedRun:
        return PlannedRun(request)

    def start(self, planned: PlannedRun) -> SubmittedRun:
        config = planned.request.config
        if config.trial_name == "refused":
            raise UserError("Ray refused the job")
        if self.silent and config.trial_name == "silent":
            self.silent -= 1
            raise NoAnswerError("the head does not answer\nIs it up?")
        if config.trial_name == "broken":
            self.broken += 1
            raise RunError("job broken-1 ended at once (FAILED): no module named x")
        self.started.append(config.trial_name)
        return SubmittedRun("started", run_directory(config, config.trial_name), config.trial_name)

    def jobs(self) -> list[Job]:
        if not self.looks:
            raise KeyboardInterrupt
        if not (alive := self.looks.pop(0)):
            raise RunError("the head does not answer")
        return [Job(name, "RUNNING") for name in alive]


def swept(*trials: str, preset: str = "tiny") -> list[SweptRun]:
    config = resolve(preset).config
    requests = (RunRequest(config.model_copy(update={"trial_name": name}), named=True) for name in trials)
    return [SweptRun(request, "is complete already", request.config.trial_name == "done") for request in requests]


def submitted(place: JobsPlace, runs: list[SweptRun], *, detach: bool = False) -> str:
    return submit_all(cast("Backend", place), runs, "clusterkit train …", detach=detach)


def test_jobs_are_waited_for_and_one_that_is_refused_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_trials, "POLL_SECONDS", 0.0)
    place = JobsPlace("ray", [["a", "b"], [], ["b"], ["x"]])

    assert submitted(place, swept("done", "a", "refused", "b")) == ""

    assert place.started == ["a", "b"]
    said = capsys.readouterr().err
    assert "error: tiny-recall/refused: Ray refused the job" in said
    assert "cannot see the jobs for now (the head does not answer); trying again" in said
    assert said.index("tiny-recall/a has ended; 1 of the trials are left") < said.index("tiny-recall/b has ended; 0 of")


@pytest.mark.parametrize(("silent", "started"), [(3, ["silent", "b"]), (4, ["b"])])
def test_a_submission_without_an_answer_is_tried_again_a_few_times(
    silent: int, started: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_trials, "RETRY_SECONDS", 0.0)
    place = JobsPlace("ray", [])
    place.silent = silent
    submitted(place, swept("silent", "b"), detach=True)

    said = capsys.readouterr().err
    assert place.started == started
    assert said.count("tiny-recall/silent is not submitted (the head does not answer); trying again in 0 s") == 3
    assert ("It was tried 4 times; the same command tries it again" in said) == ("silent" not in started)


def test_a_job_that_ends_at_once_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    place = JobsPlace("ray", [])
    submitted(place, swept("broken", "b"), detach=True)

    assert (place.broken, place.started) == (1, ["b"])
    assert "error: tiny-recall/broken: job broken-1 ended at once" in capsys.readouterr().err


def test_ctrl_c_leaves_jobs_at_work_and_says_what_is_not_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_trials, "POLL_SECONDS", 0.0)
    place = JobsPlace("ray", [["a"], ["x"]])

    left = submitted(place, swept("a", "b", "c", preset="7B_n4"))

    assert place.started == ["a", "b"], "one after the other"
    assert left.startswith("1 job is at work on cluster c, without this command; not submitted yet: 7B_n4-math/c\n")
    assert left.endswith("clusterkit train …")


def test_detached_all_are_submitted_and_none_is_waited_for() -> None:
    place = JobsPlace("slurm", [])

    assert submitted(place, swept("a", "b"), detach=True).startswith("2 jobs are at work on cluster c")
    assert place.started == ["a", "b"]
