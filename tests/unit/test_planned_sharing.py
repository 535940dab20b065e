"""What `presets plan` says of the tokens that training computes, and of micro-batches that groups have no room in."""

from __future__ import annotations

import re

import pytest
from plans import level_of, message_of

from clusterkit.capacity.plan import remote_plan
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
    assert found.waited_for == pytest.approx(found.computed, rel=0.1)


def test_each_micro_batch_computes_the_beginning_again() -> None:
    """A micro-batch of 16,384 tokens holds five rows of 2,000 tokens beside the section: four for 16."""
    config = config_of("train.max_tokens_per_mb=16384", "train.minibatches=1")

    found = computed_tokens(config, [Turn(6200, 5200, 1000)])

    assert found.computed == 128 * (4 * 5200 + 16 * 2000)


def test_what_the_busiest_of_many_ranks_computes_is_waited_for() -> None:
    """48 groups for 128 ranks: most are divided in two, and some ranks have the answers alone."""
    config = resolve("7B_n16", "memagent", ["train.max_tokens_per_mb=40960"]).config

    found = computed_tokens(config, [Turn(6200, 5200, 1000)] * 6 + [Turn(1200, 0, 1000)])

    steps, half = 16, 5200 + 8 * 2000
    assert found.waited_for == pytest.approx(steps * 128 * half, rel=0.1)
    assert found.computed == pytest.approx(steps * (48 * 2 * half + 128 * 2200), rel=0.05)


@pytest.mark.parametrize("setting", ["train.share_prefixes=false", "rollout.group_size=1"])
def test_nothing_is_shared_where_that_is_off_or_a_group_is_one(setting: str) -> None:
    config = config_of(setting, "control.zero_advantages=true", "rollout.batch_size=2048")

    found = computed_tokens(config, [Turn(6200, 5200, 1000)])

    assert found.computed == found.waited_for == found.whole == config.rollout.group_size * 2048 * 7200


def test_a_beginning_that_is_too_short_to_bind_rows_together_counts_in_each() -> None:
    tokens = computed_tokens(config_of(), [Turn(5200, 300, 1000)])

    assert tokens.computed == tokens.whole


def test_micro_batches_that_a_group_has_no_room_in_are_told_with_a_size_that_it_has() -> None:
    small = plan_preset("1.5B_n1", "memagent", [SECTION_FIRST])
    proposed = message_of(small, "prefixes").partition("train.max_tokens_per_mb=")[2].partition(",")[0]
    roomy = plan_preset("1.5B_n1", "memagent", [SECTION_FIRST, f"train.max_tokens_per_mb={proposed}"])

    assert level_of(small, "prefixes") == [Level.WARN]
    assert "need up to 38018 tokens of a micro-batch, and it holds 16384" in message_of(small, "prefixes")
    assert int(proposed) == 38912
    assert level_of(roomy, "prefixes") == [Level.OK]
    after, before = (plan.expected[0].parts["training"] for plan in (roomy, small))
    assert after.high < 0.85 * before.high


def test_what_a_larger_size_saves_is_that_of_the_rank_that_the_others_wait_for() -> None:
    small, roomy = (
        message_of(plan_preset("7B_n4", "memagent", [SECTION_FIRST, *size]), "prefixes")
        for size in ((), ("train.max_tokens_per_mb=38912",))
    )

    share = re.search(r"takes the time of (\d+)% of the rows' tokens, as the busiest of 32 ranks", roomy)
    assert share is not None
    assert f"with 38912 {share[1]}%" in small


def test_a_size_is_proposed_that_a_small_gpu_has_room_for() -> None:
    roomy, tight = (plan_preset("1.5B_n1", "memagent", [SECTION_FIRST], gpu_memory_gib=gib) for gib in (80, 26))

    assert level_of(roomy, "prefixes") == level_of(tight, "prefixes") == [Level.WARN]
    larger, smaller = (
        int(message_of(plan, "prefixes").rpartition("_mb=")[2].partition(",")[0]) for plan in (roomy, tight)
    )
    assert larger > smaller > 16384


def test_a_gpu_without_room_for_larger_micro_batches_is_no_reason_to_warn() -> None:
    plan = plan_preset("7B_n4", "memagent", [SECTION_FIRST], gpu_memory_gib=32)

    assert level_of(plan, "prefixes") == [Level.OK]
    assert "a GPU has no room for one that helps" in message_of(plan, "prefixes")


def test_a_dry_run_counts_the_rows_that_share_nothing_too() -> None:
    """On many ranks the answers fill those that have no group."""
    plan = remote_plan(resolve("7B_n16", "memagent").config)

    assert 0.85 * plan.tokens_per_step < plan.computed_tokens_per_step < 0.95 * plan.tokens_per_step


@pytest.mark.parametrize(("fewest", "most"), [(1, 2), (2, 3)])
def test_half_sections_count_half(fewest: int, most: int) -> None:
    def saved(*overrides: str) -> int:
        config = resolve("135M", "needles", [SECTION_FIRST, *overrides]).config
        return remote_plan(config).tokens_per_step - remote_plan(config).computed_tokens_per_step

    mixed = saved(f"task.min_chunks={fewest}", f"task.max_chunks={most}")
    ends = [saved(f"task.min_chunks={chunks}", f"task.max_chunks={chunks}") for chunks in (fewest, most)]
    assert mixed == pytest.approx(sum(ends) / 2, rel=0.1)


@pytest.mark.parametrize(("preset", "task"), [("7B_n4", "math"), ("tiny", None)])
def test_plans_in_which_little_is_shared_or_no_gpu_trains_say_nothing_of_it(preset: str, task: str | None) -> None:
    assert level_of(plan_preset(preset, task), "prefixes") == []


def test_lengths_of_a_task_of_ones_own_are_not_guessed() -> None:
    assert level_of(plan_preset("7B_n4", "memagent", [SECTION_FIRST, "task.name=mine:Task"]), "prefixes") == []
