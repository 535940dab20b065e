"""The supervised start of a run as settings: what it is made with, what may differ later, what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from clusterkit.capacity.plan import RunPlan
from clusterkit.config.resolve import resolve
from clusterkit.runs.trials import choose_trial
from evaluation.steps import checkpoints_in, place_of_run
from trainer.checkpoint.fingerprint import differences, fingerprint
from trainer.checkpoint.slots import RunState, Slot
from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.evaluate import bootstrap_interval
from trainer.launch.supervised import LITTLE, may_start_beside, supervised_model
from trainer.paths import RunPaths
from trainer.sft.start import is_start, require_examples, start_config
from trainer.start_mark import start_facts

PLACES = ("task.path=/questions", "fileroot=/runs")


def read(*overrides: str) -> RunConfig:
    return resolve("135M_read", None, (*PLACES, *overrides)).config


def test_it_is_supervised_learning_with_the_runs_own_model_agent_and_ranks() -> None:
    run = read()
    start = start_config(run)

    assert (start.trainer.type, start.examples.path) == ("sft", "/questions/traces.jsonl")
    assert (start.model, start.agent, start.seed, start.ranks) == (run.model, run.agent, run.seed, run.ranks)
    assert start.engine == "embedded", "no server samples"
    train = start.train
    assert (train.learning_rate, train.schedule, train.min_lr_ratio) == (5e-4, "cosine", 0.1)
    assert (train.total_steps, start.rollout.batch_size) == (600, 32)
    assert train.max_tokens_per_mb == run.train.max_tokens_per_mb
    assert is_start(start)
    assert not is_start(run)


@pytest.mark.parametrize(
    ("override", "lines"),
    [
        ("reward.name=reading", []),
        ("train.learning_rate=1e-6", []),
        ("rollout.group_size=4", []),
        ("supervised.learning_rate=1e-4", ["supervised.learning_rate: 0.0005 -> 0.0001"]),
        ("agent.chunk_tokens=256", ["agent.chunk_tokens: 512 -> 256"]),
    ],
)
def test_only_what_shapes_it_keeps_it_from_going_on(override: str, lines: list[str]) -> None:
    before, now = (fingerprint(start_config(config)) for config in (read(), read(override)))

    assert [line for line in differences(before, now) if not line.startswith("train.")] == lines


def test_a_run_beyond_it_keeps_its_settings_and_one_without_it_goes_on_as_before() -> None:
    assert differences(fingerprint(read()), fingerprint(read("supervised.batch_size=16"))) == [
        "supervised.batch_size: 32 -> 16"
    ]
    now = fingerprint(resolve("135M_cpu", None, ()).config)
    old = {name: value for name, value in now.items() if not name.startswith("supervised.")}
    assert differences(old, now) == []


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("135M_cpu", ["trainer.type=sft", "task.path=/x", "supervised.dataset=a"], "trainer.type is sft: leave it out"),
        ("135M_cpu", ["trainer.type=null", "supervised.dataset=a"], "trainer.type is null: leave it out"),
        ("tiny", ["supervised.dataset=a"], "needs a pretrained model.*set model.path"),
        ("tiny", ["eval.final_documents=[4]"], "is for task.name=hotpotqa, and task.name is recall"),
    ],
)
def test_a_run_that_cannot_have_it_is_refused(preset: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(preset, None, overrides)


def test_it_lies_beside_the_run_and_out_of_the_way_of_its_checkpoints() -> None:
    run = RunPaths.of(read())

    assert run.supervised.logs.parent == run.logs
    assert run.supervised.recover.parent == run.recover
    assert run.supervised.checkpoints.parent == run.checkpoints.parent
    assert run.supervised.checkpoints != run.checkpoints


def test_its_checkpoint_is_scored_with_the_settings_of_its_run_and_is_none_of_its_steps(tmp_path: Path) -> None:
    config = read(f"fileroot={tmp_path}", "experiment_name=reader", "trial_name=one")
    run = RunPaths.of(config)
    own = run.checkpoints / "epoch1epochstep2globalstep2"
    for folder in (own, run.supervised.checkpoints):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    assert place_of_run(run.supervised.checkpoints) == place_of_run(own)
    assert place_of_run(own) is not None
    assert checkpoints_in(run.checkpoints.parent) == [own]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint": {}}'])
def test_without_a_whole_mark_and_its_checkpoint_it_is_not_done(tmp_path: Path, text: str) -> None:
    paths = RunPaths(tmp_path, tmp_path / "none", tmp_path / "recover")
    (tmp_path / "start.json").write_text(text)

    assert start_facts(paths) == {}


def at_step_5_of(run: Path, dataset: str) -> Start:
    state = RunState(global_step=5, next_task=10, optimizer_steps=10, version=5, seconds=1.0)
    return Start(Slot("slot-a", run / "slot-a", state, {"supervised.dataset": dataset}, 1))


def never(*_: object) -> None:
    raise AssertionError("nothing is learned")


@pytest.mark.parametrize("folder", ["b", "copy/of/the/recover", "recover/u/e/t"])
def test_a_run_from_a_recover_checkpoint_without_its_start_takes_the_weights_of_that(
    tmp_path: Path, folder: str
) -> None:
    config = read(f"fileroot={tmp_path / 'runs'}", f"recover_from=/{folder}", "algorithm.kl_coef=0")
    start = at_step_5_of(Path("/", folder), "traces.jsonl")

    assert supervised_model(config, Path("/model"), start, never) == Path("/model")


def test_a_kl_reference_that_would_be_another_model_is_refused(tmp_path: Path) -> None:
    config = read(f"fileroot={tmp_path / 'runs'}", f"recover_from={tmp_path}/copy", "algorithm.kl_coef=0.1")
    with pytest.raises(UserError, match=r"algorithm\.kl_coef=0\.1 holds the policy near the checkpoint of that run's"):
        supervised_model(config, Path("/model"), at_step_5_of(tmp_path / "copy", "traces.jsonl"), never)

    # That run had none: its reference was its model. And the run's own checkpoints come later than this.
    for start in (at_step_5_of(tmp_path / "copy", ""), at_step_5_of(RunPaths.of(config).recover, "traces.jsonl")):
        assert supervised_model(config, Path("/model"), start, never) == Path("/model")


def test_adapters_need_the_supervised_start_that_they_were_trained_on(tmp_path: Path) -> None:
    settings = (f"fileroot={tmp_path / 'runs'}", "algorithm.kl_coef=0", "model.lora.rank=8")
    another = read(*settings, f"recover_from={tmp_path}/copy")
    with pytest.raises(UserError, match="the adapters of that run belong to the checkpoint of its supervised start"):
        supervised_model(another, Path("/model"), at_step_5_of(tmp_path / "copy", "traces.jsonl"), never)

    assert supervised_model(another, Path("/model"), at_step_5_of(tmp_path / "copy", ""), never) == Path("/model")


def test_an_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    values = [0.0] * 60 + [1.0] * 40

    low, high = bootstrap_interval(values)

    # That of a share of 0.4 of 100 by the normal approximation: 0.304 to 0.496.
    assert low == pytest.approx(0.304, abs=0.02)
    assert high == pytest.approx(0.496, abs=0.02)
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval([0.5]) == (0.5, 0.5)


def test_a_plan_tells_it(tmp_path: Path) -> None:
    config = resolve("135M_read_cpu", None, ("task.path=/questions", f"fileroot={tmp_path}")).config
    plan = "\n".join(RunPlan(config, choose_trial(config, named_by_user=False)).lines())

    assert "start       supervised, 4 steps of /questions/traces.jsonl in batches of 2" in plan
    assert "closing table at [4, 8] documents" in plan


@pytest.mark.parametrize(("folder", "said"), [("nowhere", "no such folder"), ("", "there is no file .*/traces.jsonl")])
def test_a_folder_that_is_not_there_is_told_from_one_without_traces(tmp_path: Path, folder: str, said: str) -> None:
    config = resolve("135M_read", None, (f"task.path={tmp_path / folder}",)).config
    with pytest.raises(UserError, match=said):
        require_examples(config)


@pytest.mark.parametrize(
    ("settings", "beside"),
    [
        ((), True),  # they share a GPU, of which so small a training takes little
        (("n_gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1"), True),
        (("n_gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1", "train.offload=true"), True),
        (("n_gpus_per_node=2", "allocation_mode=", "servers.engine=sglang"), False),  # the start trains on theirs
        (("train.offload=true",), False),
        (("model.dtype=float32",), False),
        (("model.lora.rank=8", "weights.adapters=alone"), False),
        (("model.lora.rank=8", "weights.adapters=merged"), True),
    ],
)
def test_servers_start_beside_a_start_where_neither_memory_nor_weights_are_in_the_way(
    settings: tuple[str, ...], beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.zeros(1 << 16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    gpu = SimpleNamespace(memory_mib=round(1 / LITTLE))  # a stand-in: there is none here
    monkeypatch.setattr("trainer.launch.supervised.look_at", lambda gpus: gpu if gpus == (0,) else None)
    config = resolve("135M_read", None, [f"task.path={tmp_path}", *settings]).config

    assert may_start_beside(config, start_config(config), tmp_path) is beside
    gpu.memory_mib -= 1
    shares = config.allocation is not None and config.allocation.colocated
    assert may_start_beside(config, start_config(config), tmp_path) is (beside and not shares)
    (tmp_path / "torn.safetensors").write_bytes(b"")  # nobody could say later what servers were started with
    assert not may_start_beside(config, start_config(config), tmp_path)
