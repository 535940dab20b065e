"""The arithmetic of a plan, against numbers worked out by hand, and presets on other hosts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from plans import level_of, message_of

from clusterkit.capacity import timing
from clusterkit.capacity.memory import GIB, cache_of, disk_usage, host_usage, training_usage, waiting_usage
from clusterkit.capacity.needs import needs_of_preset
from clusterkit.capacity.plan import RunPlan, largest_micro_batch, remote_plan
from clusterkit.capacity.preset_plan import gibibytes, plan_lines, plan_preset
from clusterkit.capacity.runnable import require_runnable
from clusterkit.capacity.shapes import SHAPES, shape_named, shape_of
from clusterkit.common.finding import Level
from clusterkit.config import presets
from clusterkit.config.resolve import resolve
from trainer.allocation import Layout
from trainer.allocation_text import parse
from trainer.config import RunConfig, flatten
from trainer.errors import UserError
from trainer.evaluate import table_specs
from trainer.tasks.size import evaluates

GPU_PRESETS = [
    (name, task)
    for name in presets.size_names()
    if presets.load_size(name).gpu_memory_gib
    for task in presets.load_size(name).tasks
]


@pytest.mark.parametrize(("preset", "task"), GPU_PRESETS)
def test_every_preset_fits_the_hosts_that_it_is_for(preset: str, task: str) -> None:
    plan = plan_preset(preset, task)

    assert plan.fits
    assert plan.changes == ()
    assert set(level_of(plan, "gpus") + level_of(plan, "tokens") + level_of(plan, "batch")) == {Level.OK}
    assert set(level_of(plan, "memory")) == {Level.OK}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m-instruct", 134_515_008),
        ("qwen2.5-0.5b-instruct", 494_032_768),
        ("qwen2.5-1.5b-instruct", 1_543_714_304),
        ("deepseek-r1-distill-qwen-1.5b", 1_777_088_000),
        ("qwen2.5-7b", 7_615_616_512),
        ("deepseek-r1-distill-qwen-32b", 32_763_876_352),
        ("qwen3-4b", 4_022_468_096),
    ],
)
def test_shapes_have_the_parameters_that_their_models_publish(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == parameters


def test_the_shape_of_a_folder_is_read_from_its_config(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12}
    config |= {"num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))

    shape = shape_of(RunConfig.model_validate({"model": {"path": str(tmp_path)}, "task": {"name": "hotpotqa"}}))

    assert shape == SHAPES["deepseek-r1-distill-qwen-1.5b"]


def test_memory_of_a_training_gpu() -> None:
    config, shape = resolve("1.5B_n1").config, SHAPES["deepseek-r1-distill-qwen-1.5b"]

    usage = training_usage(config, shape, Layout(2, pipeline=2))

    assert usage.parts["state"] == 16 * 1_777_088_000 // 4
    assert usage.parts["reference"] == 0
    # Two layers of 46,797,824 parameters and two matrices of 151936 x 1536, 2 bytes each.
    assert usage.parts["gathered"] == 2 * (2 * 46_797_824 + 2 * 151_936 * 1536)
    # 30720 tokens: 28 inputs of 1536 numbers, and one layer of 6 x 1536 + 2 x 256 + 4 x 8960 = 45568 numbers twice.
    assert usage.parts["activations"] == 2 * 30720 * (28 * 1536 + 2 * 45568)
    assert usage.parts["logits"] == 3 * 4 * 4096 * 151_936
    assert usage.total == sum(usage.parts.values())


def test_a_row_that_is_longer_than_a_micro_batch_is_what_counts_and_pieces_are_small() -> None:
    shape, layout = SHAPES["deepseek-r1-distill-qwen-7b"], Layout(8)

    def parts(kind: str, packed: int) -> dict[str, int]:
        settings = [f"model.gradient_checkpointing={kind}", f"train.max_tokens_per_mb={packed}"]
        return training_usage(resolve("7B_n4", None, settings).config, shape, layout).parts

    assert parts("full", 8192) == parts("full", 28672)  # 1024 of a question and 27648 of a response
    # 28672 tokens: one layer of 6 x 3584 + 2 x 512 numbers twice, and of 4096 tokens 4 x 18944 twice.
    at_work = 2 * (28672 * 2 * 22528 + 4096 * 2 * 4 * 18944)
    assert parts("full", 8192)["activations"] == 2 * 28672 * (28 * 3584 + 2 * (22528 + 4 * 18944))
    assert parts("chunked", 8192)["activations"] == 2 * 28672 * 28 * 3584 + at_work
    assert parts("offloaded", 8192)["activations"] == 2 * 28672 * 2 * 3584 + at_work
    assert parts("chunked", 8192)["pieces"] == 6 * 3 * 3584 * 18944


def test_tensor_parallel_splits_activations_and_a_kl_term_needs_a_reference() -> None:
    config, shape = resolve("7B_n4", "memagent").config, SHAPES["qwen2.5-7b-instruct"]

    whole, split = (training_usage(config, shape, layout) for layout in (Layout(8), Layout(4, 2)))

    assert split.parts["activations"] == whole.parts["activations"] // 2
    assert split.parts["state"] == whole.parts["state"]
    assert whole.parts["reference"] == 2 * 7_615_616_512 // 8
    assert waiting_usage(config, shape, Layout(8)) == 0  # offloaded
    config = resolve("7B_n4", "memagent", ["train.offload=false"]).config
    assert waiting_usage(config, shape, Layout(8)) == 12 * 7_615_616_512 // 8


def test_adapters_have_the_state_and_the_base_is_the_reference() -> None:
    settings = ["model.lora.rank=32", "train.offload=false"]
    config, shape = resolve("7B_n4", "memagent", settings).config, SHAPES["qwen2.5-7b-instruct"]
    # 28 layers of 2 x (3584 + 3584), 2 x (3584 + 512), 3 x (3584 + 18944), rank 32: PEFT counts as many.
    adapters = 28 * 32 * (2 * 7168 + 2 * 4096 + 3 * 22528)

    usage = training_usage(config, shape, Layout(1))

    assert shape.adapter_parameters(config.model.lora) == adapters == 80_740_352
    assert usage.parts["state"] == 16 * adapters
    assert usage.parts["base"] == 2 * 7_615_616_512
    assert usage.parts["reference"] == 0
    assert waiting_usage(config, shape, Layout(1)) == 12 * adapters + 2 * 7_615_616_512
    assert disk_usage(config, shape, 5).parts["recover"] == 3 * 12 * adapters
    assert disk_usage(config, shape, 5).parts["checkpoints"] == 5 * (2 * 7_615_616_512 + 4 * adapters)


def test_hosts_have_room_for_what_ranks_put_away_and_for_copies_of_checkpoints() -> None:
    config, shape = resolve("7B_n4", "memagent").config, SHAPES["qwen2.5-7b-instruct"]
    # PyTorch pins powers of two. Of 4-byte weights 32 ranks have 65 MiB of embedding and head each, and of each layer
    # 1.5 MiB of two matrices, 0.2 of two and 8.1 of three; 2-byte weights have half of each.
    mib = 2 * 128 + 28 * (2 * 2 + 2 * 0.25 + 3 * 16)
    assert host_usage(config, shape, Layout(32)).total == 8 * (3 + 3 + 0.5) * mib * 2**20
    assert host_usage(config, shape, Layout(4)).total == 4 * (3 + 3 + 0.5) * 8 * mib * 2**20
    waits = resolve("7B_n4", "memagent", ["checkpoint.async_recover=false", "train.offload=false"]).config
    assert host_usage(waits, shape, Layout(32)).total == 0
    moved = waits.model_copy(update={"model": waits.model.model_copy(update={"gradient_checkpointing": "offloaded"})})
    each = 2 * largest_micro_batch(moved) * 3584
    total = host_usage(moved, shape, Layout(32)).total
    assert total == 8 * 28 * 2 ** math.ceil(math.log2(each))
    adapted = resolve("7B_n4", "memagent", ["model.lora.rank=32", "train.offload=false"]).config
    adapters = shape.adapter_parameters(adapted.model.lora)
    pinned = host_usage(adapted, shape, Layout(8)).parts
    assert 12 * adapters <= pinned["copy for recover checkpoints"] < 2 * 12 * adapters
    assert pinned["copy for persistent checkpoints"] == 2 * 8 * 4 * mib / 2 * 2**20
    plan = plan_preset("7B_n4", "memagent", ["n_nodes=4"])
    assert any("a host that trains keeps 87.6 GiB in its own memory" in finding.message for finding in plan.findings)


def test_adapters_are_proposed_where_all_weights_do_not_fit() -> None:
    settings = ["n_nodes=1", "n_gpus_per_node=2", "allocation_mode=sglang:d1+fsdp:d1"]

    plan = plan_preset("7B_n4", "memagent", settings)
    instead = plan_preset("7B_n4", "memagent", [*settings, "model.lora.rank=32"])

    fix = next(one.fix for one in plan.findings if one.check == "memory" and "training" in one.message)
    assert not plan.fits
    assert "model.lora.rank=32 (docs/lora.md)" in fix
    message = next(one.message for one in instead.findings if "a training GPU needs" in one.message)
    assert "base 14.2 GiB" in message
    assert "a GPU of 48 GB is enough" in message


def test_the_kv_cache_of_a_server() -> None:
    config, shape = resolve("1.5B_n1").config, SHAPES["deepseek-r1-distill-qwen-1.5b"]

    cache = cache_of(config, shape, Layout(4), 80 * GIB, 28672)

    assert shape.kv_bytes_per_token == 2 * 2 * 28 * 2 * 128
    assert cache.space == 68_719_476_736 - 2 * 1_777_088_000
    assert cache.tokens == cache.space // 28672
    assert 79 < cache.sequences < 80
    # Two key/value heads cannot be shared by four GPUs: each is kept twice.
    wide = cache_of(config, shape, Layout(1, 4), 80 * GIB, 28672)
    assert wide.tokens == (4 * 68_719_476_736 - 2 * 1_777_088_000) // (2 * 28672)


def test_versions_of_an_adapter_on_a_server_take_the_place_of_its_cache() -> None:
    shape = SHAPES["qwen2.5-7b-instruct"]

    def space(*settings: str) -> int:
        config = resolve("7B_n4", "memagent", ["model.lora.rank=32", "train.offload=false", *settings]).config
        return cache_of(config, shape, Layout(1), 80 * GIB, 8192).space

    merged = space("weights.adapters=merged", "rollout.max_staleness=1")
    assert space("weights.adapters=alone", "rollout.max_staleness=1") == merged - 2 * 2 * 80_740_352
    assert space("weights.adapters=alone") == merged - 2 * 80_740_352


def test_disk_of_a_run() -> None:
    config, shape = resolve("1.5B_n1").config, SHAPES["deepseek-r1-distill-qwen-1.5b"]

    assert timing.saves(config, 3461) == 5
    assert disk_usage(config, shape, 5).total == (2 + 3 * 12 + 5 * 2) * 1_777_088_000
    assert timing.saves(resolve("1.5B_n1", None, ["checkpoint.save_freq_secs=14400"]).config, 3461) == 1035 // 5


@pytest.mark.parametrize(
    ("preset", "hours_to_save", "hours_to_converge"),
    [("1.5B_n1", 199, 240), ("1.5B_n4", 57.3, 69), ("1.5B_n16", 22.5, 27), ("7B_n4", 130.8, 252), ("7B_n16", 46.9, 90)],
)
def test_hours_are_those_of_the_published_table(preset: str, hours_to_save: float, hours_to_converge: float) -> None:
    plan = plan_preset(preset).as_dict()

    assert plan["first_save_seconds"] / 3600 == pytest.approx(hours_to_save, rel=0.005)
    assert plan["convergence_hours"] == pytest.approx(hours_to_converge, rel=0.01)
    measured = presets.load_size(preset).measured["math"]
    assert (plan["step_seconds"], plan["convergence_steps"]) == (measured.step_seconds, measured.steps)


def test_the_time_of_a_whole_run_is_told_with_its_conditions() -> None:
    plan = plan_preset("135M_read")
    said = message_of(plan, "hours")

    assert "it took 13 min 08 s to 26 min 32 s from the command to the end" in said
    assert "an earlier one with rollout.max_staleness=0 on a host whose cores were slower" in said
    assert plan.as_dict()["whole_run"]["high_s"] == 26 * 60 + 32
    assert "nobody has published" not in said + message_of(plan, "checkpoint")
    assert plan_preset("135M").as_dict()["whole_run"] is None


def test_a_late_checkpoint_is_warned_of_and_the_way_out_works() -> None:
    late, soon = plan_preset("1.5B_n1"), plan_preset("1.5B_n1", None, ["checkpoint.save_freq_secs=3600"])

    assert level_of(late, "checkpoint") == [Level.WARN]
    assert "after step 207, in about 199 hours" in message_of(late, "checkpoint")
    assert "checkpoint.save_freq_secs=" in message_of(late, "checkpoint")
    assert soon.as_dict()["first_save_seconds"] == 2 * 3461  # the first step that ends after an hour
    assert level_of(soon, "checkpoint") == [Level.OK]


def test_a_step_between_two_published_sizes_takes_the_time_on_the_line_between_them() -> None:
    config = resolve("1.5B_n4").config

    middle, beyond = timing.step_time(config, "math", 16), timing.step_time(config, "math", 512)

    assert middle is not None
    assert middle.seconds == pytest.approx((3461 * 997) ** 0.5)
    assert beyond is not None
    assert beyond.seconds == pytest.approx(391 * 391 / 997)
    assert timing.step_time(resolve("4B").config, "memagent", 8) is None
    half = resolve("1.5B_n4", None, ["rollout.group_size=8"]).config
    assert timing.step_time(half, "math", 32).seconds == 997 / 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "check", "level", "says"),
    [
        (["agent.max_final_tokens=30000"], "tokens", Level.OK, "over 30720 it is a micro-batch of its own"),
        (["model.context_window=28671"], "tokens", None, "context window is 28671"),
        (["rollout.group_size=1", "train.minibatches=512"], "batch", Level.FAIL, "leaves some of 4"),
        (["rollout.group_size=3", "rollout.batch_size=6", "train.minibatches=2"], "batch", Level.WARN, "evenly"),
        (["allocation_mode=sglang:d1t5+fsdp:d3"], "gpus", Level.FAIL, "does not divide the 12 attention heads"),
        (
            ["allocation_mode=sglang:d1t4+fsdp:d1t4"],
            "gpus",
            Level.FAIL,
            "t4 of fsdp does not divide the 2 key",
        ),
        (["allocation_mode=sglang:d1t4+fsdp:d2t2"], "gpus", Level.OK, "4 generate (d1 x t4)"),
        (["allocation_mode=sglang:d4|fsdp:d4", "n_gpus_per_node=4"], "memory", Level.OK, "the engine's rest"),
        (
            ["allocation_mode=sglang:d8|fsdp:d8", "rollout.gpu_memory_fraction=0.97"],
            "memory",
            Level.FAIL,
            "train.offload",
        ),
        (["model.path=someone/unknown"], "memory", Level.WARN, "not known"),
        (["checkpoint.save_freq_steps=1"], "disk", Level.WARN, "931 GiB"),
    ],
)
def test_what_does_not_work_out_is_told(overrides: list[str], check: str, level: Level | None, says: str) -> None:
    if level is None:
        with pytest.raises(UserError, match=says):
            plan_preset("1.5B_n1", None, overrides)
        return
    plan = plan_preset("1.5B_n1", None, overrides)

    assert level in level_of(plan, check)
    assert says in message_of(plan, check)
    assert plan.fits is (level is not Level.FAIL)


def test_half_the_hosts_halve_both_sides() -> None:
    plan = plan_preset("1.5B_n4", nodes=2)

    assert [(c.key, c.before, c.after) for c in plan.changes] == [
        ("n_nodes", 4, 2),
        ("allocation_mode", "sglang.d16p1m1+d8p2m1", "sglang.d8p1m1+d4p2m1"),
    ]
    assert plan.fits
    changed = "n_nodes=2 allocation_mode=sglang.d8p1m1+d4p2m1"
    assert plan.command == f"clusterkit train --preset 1.5B_n4 --cluster default {changed}"
    assert resolve("1.5B_n4", None, [change.override for change in plan.changes]).config == plan.config


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 16])
@pytest.mark.parametrize(("preset", "task"), GPU_PRESETS)
def test_a_rescaled_preset_uses_its_hosts_and_learns_the_same(preset: str, task: str, nodes: int) -> None:
    plan = plan_preset(preset, task, nodes=nodes)
    before, after = flatten(resolve(preset, task).config), flatten(plan.config)

    allocation = parse(plan.config.allocation_mode)
    assert allocation.gpus == plan.config.gpus == nodes * before["n_gpus_per_node"]
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {change.key for change in plan.changes}
    assert changed <= {
        *("n_nodes", "allocation_mode", "train.max_tokens_per_mb", "train.logprob_chunk"),
        *("train.offload", "rollout.gpu_memory_fraction", "model.gradient_checkpointing"),
    }
    assert all(change.why for change in plan.changes)
    assert plan.config.train.max_tokens_per_mb >= min(before["train.max_tokens_per_mb"], 5000)
    again = resolve(preset, task, [change.override for change in plan.changes]).config
    assert again == plan.config


def test_smaller_gpus_get_smaller_pieces_before_anything_else() -> None:
    plan = plan_preset("1.5B_n1", gpu_memory_gib=24)

    assert [change.key for change in plan.changes] == ["train.logprob_chunk"]
    assert plan.fits


def test_engines_that_are_too_large_get_more_tensor_parallelism() -> None:
    server = plan_preset("7B_n16", "memagent", gpu_memory_gib=20)

    assert server.fits
    assert server.config.allocation_mode == "sglang[rollout]:d64t2|fsdp[actor]:d128"


def test_activations_that_are_too_large_are_cut_before_layers_are() -> None:
    chunked, offloaded, split = (plan_preset("7B_n16", gpu_memory_gib=gib) for gib in (24, 20, 16))

    kept = "model.gradient_checkpointing"
    assert [(change.key, change.after) for change in chunked.changes if change.key == kept] == [(kept, "chunked")]
    assert [(change.key, change.after) for change in offloaded.changes if change.key == kept] == [(kept, "offloaded")]
    assert chunked.fits
    assert offloaded.fits
    assert chunked.config.allocation_mode.endswith("+d32p2m1")  # all of the preset's GPUs, no layer split
    assert offloaded.config.allocation_mode.endswith("+d32p2m1")
    assert "t2 of the training so that activations fit" in "".join(change.why for change in split.changes)


def test_one_gpu_is_shared_in_turns() -> None:
    plan = plan_preset("1.5B_n1", nodes=1, gpus_per_node=1)

    assert plan.config.allocation is not None
    assert plan.config.allocation.colocated
    assert plan.config.train.offload
    assert plan.fits


def test_what_fits_nowhere_is_said_to_fit_nowhere() -> None:
    plan = plan_preset("32B_n16", nodes=1, gpus_per_node=2)

    assert not plan.fits
    assert "It does not fit" in plan_lines(plan)[-1]


def test_a_preset_without_gpus_is_not_spread() -> None:
    assert plan_preset("tiny").fits
    assert plan_preset("tiny", gpu_memory_gib=24).changes == ()
    with pytest.raises(UserError, match="takes no GPUs"):
        plan_preset("tiny", nodes=2)


@pytest.mark.parametrize(("text", "gib"), [("80", 80), ("80GB", 80), ("141GiB", 141), ("23.5 g", 23.5)])
def test_gpu_memory_as_people_type_it(text: str, gib: float) -> None:
    assert gibibytes(text) == gib
    for wrong in ("", "0", "-1", "many", "80MB"):
        with pytest.raises(UserError, match="--gpu-memory"):
            gibibytes(wrong)


def test_hosts_and_space_of_a_preset_come_from_its_values() -> None:
    needs = {name: needs_of_preset(name) for name in presets.size_names()}

    assert {name: (need.hosts, need.gpus_per_host) for name, need in needs.items()} == {
        **{
            "tiny": (1, 0),
            "135M_cpu": (1, 0),
            "135M_read_cpu": (1, 0),
            "135M": (1, 1),
            "135M_read": (1, 1),
            "0.5B": (1, 4),
            "4B": (1, 8),
        },
        **{"1.5B_n1": (1, 8), "1.5B_n4": (4, 8), "1.5B_n16": (16, 8)},
        **{"7B_n4": (4, 8), "7B_n16": (16, 8), "7B-zero_n16": (16, 8), "32B_n16": (16, 8)},
        **{"memalpha-tiny": (1, 0), "memalpha-4B": (1, 2), "memalpha-4B_n4": (4, 8)},
    }
    assert needs["7B_n4"].data_space == (2 + 3 * 12 + 5 * 2) * 7_615_616_512


@pytest.mark.parametrize(
    ("preset", "settings", "level", "words"),
    [
        ("memalpha-4B", (), Level.OK, "Qwen/Qwen3-14B on GPUs beside these"),
        ("memalpha-4B", ("judge.url=http://10.0.0.5:1",), Level.OK, "asked at http://10.0.0.5:1"),
        ("memalpha-4B_n4", (), Level.WARN, "weights are 61 GiB of a GPU's 79.2 GiB"),
    ],
)
def test_the_judge_is_planned_beside_the_run(preset: str, settings: tuple[str, ...], level: Level, words: str) -> None:
    (found,) = (finding for finding in plan_preset(preset, None, settings).findings if finding.check == "judge")
    assert found.level is level
    assert words in found.message
    assert not [one for one in plan_preset("memalpha-tiny").findings if one.check == "judge"]


@pytest.mark.parametrize(("preset", "task"), [("tiny", "recall"), ("135M_cpu", "hotpotqa")])
def test_what_the_embedded_engine_trains_may_start(preset: str, task: str) -> None:
    require_runnable(resolve(preset, task).config)


@pytest.mark.parametrize(("preset", "task"), GPU_PRESETS)
def test_every_gpu_preset_may_start(preset: str, task: str) -> None:
    require_runnable(resolve(preset, task).config)


def test_what_no_part_can_do_is_refused_with_the_way_out() -> None:
    config = resolve("1.5B_n1", "memagent", ["allocation_mode=sglang:d4p2|fsdp:d8"]).config
    with pytest.raises(UserError, match=r"pipeline parallel servers.*tensor parallel"):
        require_runnable(config)


def test_a_repeated_problem_takes_its_room() -> None:
    once, twice = (plan_preset("135M", overrides=[f"agent.repeat_problem={value}"]) for value in ("false", "true"))

    # Chunk 304, memory 40 read and 40 written, the prompt's words 220: 604, and the question of at most 32 tokens.
    assert "question 32 + chunk 304 + 2 x memory 40 + prompt 220 = 636 ≤ 640" in message_of(once, "tokens")
    assert "2 x question 32 + chunk 304 + 2 x memory 40 + prompt 220 = 668, and the context" in message_of(
        twice, "tokens"
    )
    assert level_of(twice, "tokens") == [Level.FAIL]


def test_what_a_group_begins_with_alike_is_planned_once() -> None:
    def plan(*settings: str) -> RunPlan:
        config = resolve("7B_n4", "memagent", ("train.total_steps=1", *settings)).config
        return remote_plan(config)

    whole = plan("train.share_prefixes=false")
    paper, first = plan("agent.prompt_order=paper"), plan("agent.prompt_order=section_first")

    assert whole.computed_tokens_per_step == whole.tokens_per_step == first.tokens_per_step
    assert first.computed_tokens_per_step < paper.computed_tokens_per_step < paper.tokens_per_step
    assert first.as_dict()["computed_tokens_per_step"] == first.computed_tokens_per_step
    assert "shared prefixes once" in first._one_step()
    assert "shared prefixes once" not in whole._one_step()


@pytest.mark.parametrize(("preset", "task"), [*GPU_PRESETS, ("tiny", "recall"), ("135M_read_cpu", "hotpotqa")])
def test_held_out_trajectories_are_those_of_the_trainer(preset: str, task: str) -> None:
    config = resolve(preset, task, ("train.total_steps=40",)).config
    assert config.eval.every_steps != 40, "none after the last step"
    between = 39 // config.eval.every_steps if config.eval.every_steps else 0
    passes = 2 * (1 + len(table_specs(config))) + between  # the first line is sampled, too
    wanted = passes * config.eval.num_tasks if config.trainer.type == "grpo" and evaluates(config) else 0
    assert remote_plan(config).evaluation_trajectories == wanted


def test_a_plan_of_the_whole_run_counts_its_evaluations() -> None:
    read = plan_preset(
        "135M_read", None, ["task.num_documents=12", "eval.final_documents=8,16,32,64", "eval.final_methods=[]"]
    )
    plan = remote_plan(read.config)
    # Among 12 documents greedy, sampled and with a blank memory 4 chunks each; then 3, 5, 10 and 19; once on the way.
    turns = 2 * (3 * 4 + 3 + 5 + 10 + 19) + 4
    assert plan.evaluation_trajectories == 128 * (2 * 7 + 1)
    assert plan.evaluation_tokens / plan.tokens_per_step == pytest.approx(128 * turns / (256 * 4), rel=0.05)
    assert plan.as_dict()["evaluation_tokens"] == plan.evaluation_tokens
    assert "in all 1920 trajectories, as much as 12 steps sample" in plan._evaluation()
    assert "32 steps, and held-out evaluations on top, as much as 12 steps sample" in message_of(read, "hours")
    assert "evaluations" not in message_of(plan_preset("7B_n4"), "hours"), "nothing is held out"
    assert "hours, and held-out evaluations on top" in message_of(plan_preset("7B_n4", "memagent"), "hours")


def test_keys_of_prefixes_take_memory_of_one_layer_or_of_all() -> None:
    def keys(*settings: str) -> int:
        config = resolve("7B_n4", "memagent", settings).config
        shape, wanted = shape_named("Qwen2.5-7B-Instruct"), config.allocation
        assert shape is not None
        assert wanted is not None
        assert wanted.training is not None
        return training_usage(config, shape, wanted.training.layout).parts["prefix keys"]

    every, one = keys("model.gradient_checkpointing=none"), keys("model.gradient_checkpointing=full")
    layer = (every - one) / 27
    assert layer > 0
    # In bfloat16 a layer keeps four keys and four values a token; four keys and the one they come from are in float32.
    assert one == layer * (1 + (4 + 1) * 4 / (2 * 4 * 2))
    assert keys("train.share_prefixes=false") == 0
