"""What `presets plan` says of the tokens that training computes, and of micro-batches that groups have no room in."""

from __future__ import annotations

import pytest
from plans import level_of, message_of

from clusterkit.capacity.preset_plan import plan_preset
from clusterkit.capacity.sharing import Turn, computed_tokens
from clusterkit.common.finding import Level
from clusterkit.config.resolve import resolve
from trainer.config import RunConfig

SECTION_FIRST = "agent.prompt_order=section_first"


def config_of(*overrides: str) -> RunConfig:
    """MemAgent's task: 128 questions of 16 trajectories in 16 optimizer steps."""
    return resolve("7B_n4", "memagent", overrides).config


def test_a_group_that_has_room_computes_what_it_shares_once() -> None:
    config = config_of("train.max_tokens_per_mb=40960", "train.minibatches=1")

    found = computed_tokens(config, [Turn(6200, 5200, 1000), Turn(1200, 0, 1000)])

    groups, rows = 128, 128 * 16
    assert found.whole == rows * (7200 + 2200)
    assert found.computed == groups * (5200 + 16 * 2000) + rows * 2200
    assert found.group == 5200 + 16 * 2000
    assert found.waited_for == pytest.approx(found.computed, rel=0.1)


def test_each_micro_batch_computes_the_beginning_again() -> None:
    """A micro-batch of 16,384 tokens holds five rows of 2,000 tokens beside the section: four for 16."""
    config = config_of("train.max_tokens_per_mb=16384", "train.minibatches=1")

    found = computed_tokens(config, [Turn(6200, 5200, 1000)])

    assert found.computed == 128 * (4 * 5200 + 16 * 2000)


def test_what_the_busiest_of_many_ranks_computes_is_waited_for() -> None:
    config = resolve("7B_n16", "memagent", ["train.max_tokens_per_mb=40960"]).config

    found = computed_tokens(config, [Turn(6200, 5200, 1000)])

    # Eight groups for 128 ranks: each is divided among 16, and most of these have a single row.
    assert found.waited_for == 16 * 128 * 7200
    assert found.computed == found.whole


@pytest.mark.parametrize("setting", ["train.share_prefixes=false", "rollout.group_size=1"])
def test_nothing_is_shared_where_that_is_off_or_a_group_is_one(setting: str) -> None:
    config = config_of(setting, "control.zero_advantages=true", "rollout.batch_size=2048")

    found = computed_tokens(config, [Turn(6200, 5200, 1000)])

    assert found.computed == found.waited_for == found.whole == config.rollout.group_size * 2048 * 7200
    assert found.group == 0


def test_a_beginning_that_is_too_short_to_bind_rows_together_counts_in_each() -> None:
    tokens = computed_tokens(config_of(), [Turn(5200, 300, 1000)])

    assert tokens.computed == tokens.whole


def test_micro_batches_that_a_group_has_no_room_in_are_told_with_a_size_that_it_has() -> None:
    small = plan_preset("7B_n4", "memagent", [SECTION_FIRST])
    roomy = plan_preset("7B_n4", "memagent", [SECTION_FIRST, "train.max_tokens_per_mb=38912"])

    assert level_of(small, "prefixes") == [Level.WARN]
    assert "up to 38018 tokens" in message_of(small, "prefixes")
    assert "train.max_tokens_per_mb=38912 (42 GiB of a training GPU)" in message_of(small, "prefixes")
    assert level_of(roomy, "prefixes") == [Level.OK]
    low, high = (plan.expected[0].parts["training"] for plan in (roomy, small))
    assert low.high < high.high


def test_a_gpu_without_room_for_larger_micro_batches_is_no_reason_to_warn() -> None:
    plan = plan_preset("7B_n4", "memagent", [SECTION_FIRST], gpu_memory_gib=40)

    assert level_of(plan, "prefixes") == [Level.OK]
    assert "too much" in message_of(plan, "prefixes")


@pytest.mark.parametrize(("preset", "task"), [("7B_n4", "math"), ("tiny", None)])
def test_plans_in_which_little_is_shared_or_no_gpu_trains_say_nothing_of_it(preset: str, task: str | None) -> None:
    assert level_of(plan_preset(preset, task), "prefixes") == []
