"""The expected time of a step, against steps that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clusterkit.capacity.expected import ExpectedStep, expected_steps, why_unknown
from clusterkit.capacity.preset_plan import plan_lines, plan_preset
from clusterkit.capacity.shapes import SHAPES
from clusterkit.capacity.speed import GPUS, decode_seconds, prefill_seconds
from clusterkit.cli.main import app
from clusterkit.common.finding import Level
from clusterkit.config import presets
from clusterkit.config.resolve import resolve
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.rollout.roofline import BANDWIDTH
from trainer.train.flops import peak_of

ON_GPUS = [
    (name, task)
    for name in presets.size_names()
    if presets.load_size(name).gpu_memory_gib
    for task in presets.load_size(name).tasks
]
WITH_TIMES = [(name, task) for name, task in ON_GPUS if task in presets.load_size(name).measured]


@pytest.mark.parametrize(
    ("cached", "tokens_per_s"), [(0.238, 15_340), (0.758, 20_521)], ids=["paper order", "section_first"]
)
def test_the_rates_give_back_the_rounds_that_they_were_taken_from(cached: float, tokens_per_s: float) -> None:
    """docs/performance.md, shared prefixes, sampling: 1,280 requests of 256 trajectories, 256 tokens of memory."""
    shape, gpu = SHAPES["qwen2.5-1.5b-instruct"], GPUS["H200"]
    weights, of_context = decode_seconds(shape, gpu, 2.0e6 / 1280 + 128)

    seconds = prefill_seconds(shape, gpu, (1 - cached) * 2.0e6, 800) + 0.33e6 * (weights / 256 + of_context)

    assert 0.33e6 / seconds == pytest.approx(tokens_per_s, rel=0.03)


def memory_step(tmp_path: Path, **more: object) -> RunConfig:
    """The workload of benchmarks/memory_step.py."""
    folder = tmp_path / "Qwen2.5-1.5B-Instruct"
    return RunConfig.model_validate(
        {
            "n_gpus_per_node": 2, "allocation_mode": "sglang:d1+fsdp:d1",
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "task": {"name": "needles", "min_chunks": 4, "max_chunks": 4},
            "agent": {
                "name": "memagent", "template": "memagent", "chunk_tokens": 1200, "max_question_tokens": 30,
                "max_memory_tokens": 256, "max_final_tokens": 256,
            },
            "rollout": {"batch_size": 32, "group_size": 8, "share_prefixes": False},
            "train": {"share_prefixes": False, "max_tokens_per_mb": 32768},
        }
        | more
    )  # fmt: skip


def test_the_measured_step_of_the_memory_workload_lies_in_the_range(tmp_path: Path) -> None:
    """docs/performance.md: 21.7 s of rollouts and 40.5 s of training; all responses were at their limit."""
    (step,) = expected_steps(memory_step(tmp_path), ["H200"], lengths=(1.0, 1.0))

    assert step.parts["sampling"].low * 0.95 <= 21.7 <= step.parts["sampling"].high * 1.05, step
    assert step.parts["training"].low * 0.95 <= 40.5 <= step.parts["training"].high * 1.05, step
    assert step.taken_over == ()
    assert "measured on this GPU" in step.sure


@pytest.mark.parametrize(
    ("allocation", "gpus", "sampling", "training", "publishing"),
    [
        ("sglang:d1|fsdp:d1", 1, 14.5, 17.9, 0.52),
        ("sglang:d2|fsdp:d2", 2, 9.6, 9.9, 0.66),
        ("sglang:d4|fsdp:d4", 4, 6.5, 5.6, 0.48),
        ("sglang:t2|fsdp:d2", 2, 15.9, 9.9, 0.58),
    ],
)
def test_measured_steps_on_shared_gpus_lie_in_the_range(
    tmp_path: Path, allocation: str, gpus: int, sampling: float, training: float, publishing: float
) -> None:
    """docs/performance.md, one, two and four GPUs of one host: sections first, shared prefixes, memory handed over.

    Within 6 % of its ends: the range is of the rates of one GPU.
    """
    config = memory_step(
        tmp_path, n_gpus_per_node=gpus, allocation_mode=allocation, rollout={"batch_size": 32, "group_size": 8},
        train={"max_tokens_per_mb": 32768, "offload": True},
    )  # fmt: skip
    config.agent.prompt_order = "section_first"

    (step,) = expected_steps(config, ["H200"], lengths=(1.0, 1.0))

    for part, seconds in {"sampling": sampling, "training": training, "publishing": publishing}.items():
        assert step.parts[part].low * 0.94 <= seconds <= step.parts[part].high * 1.06, (part, step)


def math_step(tmp_path: Path, limit: int) -> RunConfig:
    """benchmarks/memory_step.py --workload math, on two GPUs that do both."""
    return memory_step(
        tmp_path, allocation_mode="sglang:d2|fsdp:d2", task={"name": "math", "path": "problems.jsonl"},
        agent={"name": "single_turn", "max_question_tokens": 256, "max_final_tokens": limit},
        rollout={"batch_size": 32, "group_size": 8}, train={"max_tokens_per_mb": 32768, "offload": True},
    )  # fmt: skip


def test_the_measured_step_of_mathematics_lies_in_the_range(tmp_path: Path) -> None:
    """docs/performance.md, mathematics on two GPUs: all responses had 2,048 tokens, their limit."""
    (step,) = expected_steps(math_step(tmp_path, 2048), ["H200"], lengths=(1.0, 1.0))

    for part, seconds in {"sampling": 8.2, "training": 6.85, "publishing": 0.455}.items():
        assert step.parts[part].low <= seconds <= step.parts[part].high, (part, step)
    assert step.taken_over == ()
    (longer,) = expected_steps(math_step(tmp_path, 27_648), ["H200"])
    assert longer.taken_over == ("responses of up to 27,648 tokens (2,048 were measured)",)


def test_layers_that_training_gpus_share_are_slower_and_said_to_be(tmp_path: Path) -> None:
    """docs/performance.md, 7B width: 0.73 (over the t2 run's single GPU) and 0.79 on each of four and of two GPUs."""
    alone, shared = (
        parts_of(memory_step(tmp_path, n_gpus_per_node=4, allocation_mode=f"sglang:d4|fsdp:{layout}"))
        for layout in ("d4", "d2t2")
    )

    ratio = alone.parts["training"].low / shared.parts["training"].low
    assert ratio == pytest.approx(0.79)
    assert not alone.taken_over
    (said,) = shared.taken_over
    assert said.endswith("(73% to 79% of their speed: compiled and two GPUs each, which this run's are not)")


def test_a_wording_with_the_section_before_the_memory_is_planned_as_that_order(tmp_path: Path) -> None:
    file = tmp_path / "wording.yaml"
    texts = {"final": "{problem} {memory}"}
    given, trained = {"rollout": {"batch_size": 32, "group_size": 8}, "train": {"max_tokens_per_mb": 32768}}, {}
    for order in ("{memory} {section}", "{section} {memory}"):
        file.write_text(json.dumps({**texts, "update": f"{{problem}} {order}"}))
        config = memory_step(tmp_path, **given)
        agent = config.agent.model_dump() | {"template_file": str(file)}
        trained[order] = parts_of(config.model_validate(config.model_dump() | {"agent": agent})).parts["training"]

    assert trained["{section} {memory}"].high < 0.7 * trained["{memory} {section}"].high


def test_more_sharing_than_was_measured_is_said_to_be(tmp_path: Path) -> None:
    config = memory_step(tmp_path, rollout={"batch_size": 32, "group_size": 64}, train={"max_tokens_per_mb": 32768})
    config.agent.prompt_order = "section_first"

    (found,) = parts_of(config).taken_over
    assert "(one in 3 was measured)" in found


def test_pieces_take_the_time_of_recomputed_layers_and_the_way_to_the_host_more(tmp_path: Path) -> None:
    none, full, chunked, offloaded = (
        expected_steps(
            memory_step(tmp_path, model={**memory_step(tmp_path).model.model_dump(), "gradient_checkpointing": kind}),
            ["H200"],
        )[0].parts["training"].low
        for kind in ("none", "full", "chunked", "offloaded")
    )  # fmt: skip

    assert none < full == chunked < offloaded < 1.2 * full


@pytest.mark.parametrize(("preset", "task"), WITH_TIMES)
def test_published_times_lie_in_the_range(preset: str, task: str) -> None:
    """Of other people's software on H800, which compute as H100s do: with AReaL and MemAgent no step is far off."""
    seconds = presets.load_size(preset).measured[task].step_seconds

    expected = {one.gpu: one.whole for one in expected_steps(resolve(preset, task).config)}

    assert expected["H100"].low < seconds < expected["H100"].high


@pytest.mark.parametrize(("preset", "task"), ON_GPUS)
def test_every_gpu_preset_has_an_expected_time_for_each_gpu_or_says_why_not(preset: str, task: str) -> None:
    plan = plan_preset(preset, task)
    text = "\n".join(plan_lines(plan))

    if why := why_unknown(plan.config):
        assert plan.expected == ()
        assert why.split()[0] in text
        assert plan.as_dict()["expected_unknown"] == why
        return
    assert [one.gpu for one in plan.expected] == ["H200", "H100", "A100"]
    wholes = [one.whole for one in plan.expected]
    assert wholes == sorted(wholes, key=lambda whole: whole.high), "an H200 is the fastest, an A100 the slowest"
    for one in plan.expected:
        assert 0 < one.whole.low < one.whole.high
        assert set(one.parts) == {"sampling", "training", "publishing"}
        assert f"  {one.gpu}" in text
    assert "How sure: " in text


def parts_of(config: RunConfig) -> ExpectedStep:
    return expected_steps(config, ["H200"])[0]


def test_sampling_beside_training_counts_as_the_longer_one() -> None:
    """With staleness the two go on beside one another."""
    in_turns, beside = (parts_of(resolve("1.5B_n4", "math", [f"rollout.max_staleness={n}"]).config) for n in (0, 1))

    assert in_turns.whole.low == pytest.approx(sum(part.low for part in in_turns.parts.values()))
    longer = max(beside.parts["sampling"].low, beside.parts["training"].low)
    assert beside.whole.low == pytest.approx(longer + beside.parts["publishing"].low)


def test_a_cache_that_holds_fewer_sequences_makes_sampling_longer() -> None:
    shares = (parts_of(resolve("7B_n4", "math", [f"rollout.gpu_memory_fraction={f}"]).config) for f in (0.9, 0.3))
    much, little = (step.parts["sampling"].high for step in shares)

    assert little > 1.2 * much


def test_a_smaller_gpu_than_the_kind_has_takes_longer_to_sample() -> None:
    usual, small = (plan_preset("7B_n4", gpu="A100", gpu_memory_gib=size).expected[0] for size in (80, 40))

    assert small.parts["sampling"].high > 1.2 * usual.parts["sampling"].high
    assert plan_preset("7B_n4", gpu="A100", gpu_memory_gib=800).expected[0].parts["sampling"] == usual.parts["sampling"]


def test_adapters_save_less_time_than_computation_and_nobody_has_told_when_they_converge() -> None:
    """docs/lora.md: a step of the 1.5B shape takes 0.602 s in place of 0.659."""
    settings = ["algorithm.kl_coef=0", "train.offload=false"]
    whole, adapted = (plan_preset("1.5B_n1", "memagent", [*settings, f"model.lora.rank={n}"]) for n in (0, 64))

    ratio = adapted.expected[0].parts["training"].low / whole.expected[0].parts["training"].low
    assert ratio == pytest.approx(0.602 / 0.659, abs=0.03)
    assert adapted.as_dict()["convergence_steps"] is None


def test_adapters_are_told_with_their_size_and_want_a_learning_rate_of_their_own() -> None:
    def told(*settings: str) -> tuple[str, Level]:
        plan = plan_preset("7B_n4", "memagent", ["model.lora.rank=32", *settings])
        (one,) = (finding for finding in plan.findings if finding.check == "adapters")
        return f"{one.message} -> {one.fix}", one.level

    text, level = told()
    assert "80.7 M of 7.62 G parameters" in text
    assert "-> train.learning_rate=1e-05" in text
    assert level is Level.WARN
    assert told("train.learning_rate=1e-5")[1] is Level.OK
    assert "no linear layer foo: choose among down_proj" in told("model.lora.targets=[q_proj,foo]")[0]
    assert not [finding for finding in plan_preset("7B_n4").findings if finding.check == "adapters"]


def test_half_the_hosts_take_about_twice_as_long_to_train() -> None:
    sixteen, four = (parts_of(resolve(name, "memagent").config).parts["training"] for name in ("7B_n16", "7B_n4"))

    assert 3.5 < four.low / sixteen.low < 4.5


def test_controllers_are_proposed_where_requests_take_rank_0_most_of_the_sampling() -> None:
    small, large = plan_preset("1.5B_n16", "memagent"), plan_preset("7B_n4", "memagent")
    wanted = small.as_dict()["controllers_wanted"]

    assert wanted > 1
    assert f"of the time that sampling takes: rollout.controllers={wanted}" in "\n".join(plan_lines(small))
    assert large.as_dict()["controllers_wanted"] == 0
    more = plan_preset("1.5B_n16", "memagent", [f"rollout.controllers={wanted}"])
    assert more.as_dict()["controllers_wanted"] == 0
    assert more.expected[0].parts["sampling"].low <= small.expected[0].parts["sampling"].low


def test_data_sheets_are_those_that_the_trainer_counts_with() -> None:
    names = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3", "A100": "NVIDIA A100-SXM4-80GB"}
    for gpu in GPUS.values():
        assert gpu.flops == peak_of(names[gpu.name])
        assert gpu.bandwidth == next(value for part, value in BANDWIDTH if part in names[gpu.name])


def test_a_plan_for_one_kind_of_gpu_has_its_memory() -> None:
    run = CliRunner().invoke(app, ["presets", "plan", "1.5B_n16", "--gpu", "h200", "--json"])

    assert run.exit_code == 0, run.output
    told = json.loads(run.output)
    assert (told["gpu_memory_gib"], [one["gpu"] for one in told["expected"]]) == (141, ["H200"])
    assert told["expected"][0]["parts"]["sampling"]["low_s"] > 0


def test_a_kind_of_gpu_without_rates_is_refused() -> None:
    with pytest.raises(UserError, match="H200, H100, A100"):
        plan_preset("1.5B_n16", gpu="B200")
