"""Plans of models that are sharded within hosts and replicated over them."""

from __future__ import annotations

import pytest
from plans import level_of, message_of

from clusterkit.capacity.memory import GIB, training_usage
from clusterkit.capacity.preset_plan import plan_preset
from clusterkit.capacity.shapes import SHAPES
from clusterkit.capacity.shards import between_hosts, check_shards
from clusterkit.common.finding import Level
from trainer.allocation import Layout
from trainer.allocation_text import parse
from trainer.config import RunConfig


@pytest.mark.parametrize(
    ("preset", "task", "written", "proposed", "replicas"),
    [
        # Both passes of a micro-batch bring 2 bytes of 7.6 or 32.8 billion weights, less what the host has: 15/16, 7/8.
        ("7B_n16", "memagent", "26.6 GiB of layers", "sglang[rollout]:d128|fsdp[actor]:d128s8", "16 replicas of 8"),
        ("7B_n16", "math", "24.8 GiB of layers", "sglang:d64+fsdp:d64s8", "8 replicas of 8"),
        ("32B_n16", "math", "106.8 GiB of layers", "sglang:d8t8+fsdp:d16s4t4", "4 replicas of 16"),
    ],
)
def test_replicas_are_proposed_where_shards_cross_hosts_needlessly(
    preset: str, task: str, written: str, proposed: str, replicas: str
) -> None:
    plan = plan_preset(preset, task)

    assert level_of(plan, "shards") == [Level.WARN]
    said = message_of(plan, "shards")
    assert said.startswith("one replica over ")
    assert written in said
    assert f"{replicas} GPUs over" in said
    assert said.endswith(f"allocation_mode={proposed!r}")
    taken = plan_preset(preset, task, [f"allocation_mode={proposed}"])
    assert taken.fits
    assert level_of(taken, "shards") == [Level.OK]
    assert message_of(taken, "shards").partition(" over ")[0] == f"{replicas} GPUs"
    assert all(new.whole.high < old.whole.high for new, old in zip(taken.expected, plan.expected, strict=True))


@pytest.mark.parametrize(
    ("nodes", "written"),
    [(8, "sglang[rollout]:d64|fsdp[actor]:d64s8"), (1, "sglang[rollout]:d8|fsdp[actor]:d8")],
)
def test_replicas_stay_on_other_hosts(nodes: int, written: str) -> None:
    mode = "allocation_mode=sglang:d128|fsdp:d128s8"
    plan = plan_preset("7B_n16", "memagent", [mode], nodes=nodes)

    assert plan.config.allocation_mode == written
    assert set(level_of(plan, "memory")) == {Level.OK}


def test_replicas_without_room_are_told_to_be_larger() -> None:
    plan = plan_preset("32B_n16", "memagent", ["allocation_mode=sglang:d32t4|fsdp:d128s8"])

    assert level_of(plan, "memory")[0] is Level.FAIL
    assert "or raise s of the training layout" in message_of(plan, "memory")
    assert "replicas of 8 GPUs over 1 host each" in message_of(plan, "shards")


def test_replicas_that_hosts_would_tear_are_not_proposed_and_counted_as_torn() -> None:
    settings = {"n_nodes": 3, "n_gpus_per_node": 8, "model": {"dtype": "bfloat16"}, "servers": {"engine": "sglang"}}
    shape = SHAPES["qwen2.5-1.5b-instruct"]

    def told(allocation: str) -> str:
        config = RunConfig.model_validate({**settings, "allocation_mode": allocation})
        return "".join(f"{one.message} {one.fix}" for one in check_shards(config, shape, 80 * GIB))

    assert "'sglang:d4+fsdp:d20s4'" in told("sglang:d4+fsdp:d20")
    assert "4 replicas of 5 GPUs over 2 hosts each" in told("sglang:d4+fsdp:d20s5")


def test_what_replicas_cost_and_spare() -> None:
    shape = SHAPES["qwen2.5-7b"]
    config = RunConfig.model_validate({"n_nodes": 4, "n_gpus_per_node": 8, "model": {"dtype": "bfloat16"}})

    def moved(text: str) -> tuple[float, float]:
        layout = parse(text).parts[0].layout
        each, once = between_hosts(config, shape, layout)
        return each / shape.parameters, once / shape.parameters

    assert moved("fsdp:d32") == (2 * 2 * 3 / 4, 4 * 3 / 4)
    assert moved("fsdp:d32s8") == (0, 2 * 4 * 3 / 4)
    assert moved("fsdp:d32s4") == (0, 2 * 4 * 7 / 8)  # a host has two of the eight
    assert moved("fsdp:d32s16") == (2 * 2 / 2, 4 / 2 + 2 * 4 / 2 / 2)
    assert moved("fsdp:d8s4") == moved("fsdp:d8") == (0, 0)
    whole, part = (training_usage(config, shape, Layout(32, shard=shard)).parts for shard in (0, 8))
    assert part["state"] == 16 * shape.parameters // 8 == pytest.approx(4 * whole["state"], abs=4)
