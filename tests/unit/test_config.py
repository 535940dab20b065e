"""Settings that cannot work together are refused before anything runs, with the field's name and what to do."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from clusterkit.config.resolve import resolve
from evaluation.config import ServerConfig
from trainer.config import RunConfig
from trainer.errors import UserError


def tiny(*overrides: str) -> RunConfig:
    return resolve("tiny", None, overrides).config


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.batch_size=30", "train.minibatches=4"], "rollout.batch_size=30 .* train.minibatches=4: .*of 4"),
        (["rollout.batch_size=31", "train.ranks=2"], "rollout.batch_size=31 .* train.ranks=2: .*of 2"),
        (["rollout.batch_size=32", "task.train_size=31"], "rollout.batch_size=32 .* task.train_size=31"),
        (["rollout.top_p=0.95"], "rollout.top_p=0.95.* needs top_p=1"),
        (["rollout.top_k=50"], "top_k=50.* needs .*top_k=-1"),
        (["model.tiny.num_heads=3"], r"hidden_size 256 must be an even multiple of num_heads 3: .*num_heads=4"),
        (["model.tiny.hidden_size=8", "model.tiny.num_heads=8"], "hidden_size 8 must be an even multiple"),
        (["task.min_chunks=5", "task.max_chunks=4"], "min_chunks 5 is larger than max_chunks 4: lower it"),
        (
            ["task.facts_per_chunk=95", "task.num_values=96"],
            "facts_per_chunk 95 needs num_values of at least 100, not 96",
        ),
        (
            ["task.facts_per_chunk=7", "task.num_keys=8", "agent.chunk_tokens=40"],
            "facts_per_chunk 7 needs num_keys of at least 9, not 8: raise num_keys",
        ),
        (
            ["servers.engine=vllm", "weights.transport=nccl"],
            r"transport=nccl: vLLM servers .* by folder only: set weights\.transport=auto",
        ),
        (["servers.engine=vllm", "servers.hang_seconds=9.9"], r"servers\.hang_seconds: 9\.9 is too short.*least 10"),
        (["rollout.controllers=2"], "rollout.controllers=2: there are no engine servers.*controllers=0"),
        (["algorithm.overlong_tokens=5"], "overlong_tokens=5 is over agent.max_final_tokens=4, .*: lower it"),
        (["algorithm.mask_low=1.5"], "mask_low 1.5 and mask_high 3.0 leave out the ratio 1"),
        (
            ["task.facts_per_chunk=3", "agent.chunk_tokens=12"],
            r"task.facts_per_chunk=3 .*filler_per_chunk=4 = 13 tokens .*chunk_tokens is 12",
        ),
    ],
)
def test_impossible_combinations_name_the_field_and_the_way_out(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        tiny(*overrides)


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_servers_that_hang_are_waited_for_without_end_or_for_some_seconds(seconds: float) -> None:
    assert tiny("servers.engine=vllm", f"servers.hang_seconds={seconds}").serving.hang_seconds == seconds
    assert ServerConfig(hang_seconds=seconds).hang_seconds == seconds
    with pytest.raises(ValidationError, match="5 is too short"):
        ServerConfig(hang_seconds=5.0)


def test_controllers_are_refused_where_a_judge_is_asked() -> None:
    with pytest.raises(UserError, match=r"rollout\.controllers=2: a judge .*controllers=0"):
        resolve("memalpha-tiny", None, ["servers.engine=vllm", "rollout.controllers=2"])


@pytest.mark.parametrize("override", ["task.num_values=95", "task.num_values=129", "task.num_keys=5001"])
def test_word_lists_have_bounds(override: str) -> None:
    with pytest.raises(UserError, match=f"^{override} is not allowed"):
        tiny(override)


def test_a_tiny_model_learns_recall_only_and_words_are_for_it_only() -> None:
    with pytest.raises(ValidationError, match=r"task\.name=hotpotqa needs a pretrained model: set model\.path"):
        RunConfig.model_validate({"task": {"name": "hotpotqa"}})
    with pytest.raises(ValidationError, match=r"with model\.path set agent\.template=memagent"):
        RunConfig.model_validate({"model": {"path": "/x"}, "agent": {"template": "words"}})


def limit(*overrides: str, preset: str = "tiny", task: str | None = None) -> int:
    return resolve(preset, task, overrides).config.response_limit


def test_the_response_limit_follows_from_the_settings_alone() -> None:
    assert limit() == 4 * 3 + 4  # task.max_chunks x agent.max_memory_tokens + agent.max_final_tokens
    assert limit("agent.max_chunks=2") == 2 * 3 + 4
    assert limit("task.max_chunks=9", "agent.max_chunks=20") == 9 * 3 + 4
    assert limit("algorithm.response_limit=77") == 77
    assert limit(preset="memalpha-tiny") == 4 * resolve("memalpha-tiny").config.agent.max_memory_tokens
    assert limit(preset="1.5B_n4") == 27648
    assert limit(preset="1.5B_n4", task="memagent") == 8 * 1024 + 1024


@pytest.mark.parametrize("override", ["algorithm.name=dr_grpo", "algorithm.loss_norm=constant"])
def test_a_loss_over_a_constant_needs_one(override: str) -> None:
    with pytest.raises(UserError, match=rf"{override} divides .*set algorithm\.response_limit=TOKENS, or agent\.max_"):
        resolve("135M_cpu", "hotpotqa", (override, "agent.max_chunks=0"))
    for way in ("algorithm.response_limit=4096", "agent.max_chunks=4"):
        assert resolve("135M_cpu", "hotpotqa", (override, "agent.max_chunks=0", way)).config.response_limit
    with pytest.raises(UserError, match=r"set algorithm\.response_limit=TOKENS$"):
        tiny(override, "agent.name=mine:Agent", "agent.max_chunks=3")


def test_unknown_keys_are_refused_in_every_section() -> None:
    for values in ({"lr": 1}, {"train": {"lr": 1}}, {"model": {"tiny": {"layers": 2}}}):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            RunConfig.model_validate(values)


# chunk + 2 x memory + question = 100 + 40 + 10 = 150; memory + question + final = 20 + 10 + 30 = 60.
LIMITS = [
    "agent.chunk_tokens=100",
    "agent.max_memory_tokens=20",
    "agent.max_question_tokens=10",
    "agent.max_final_tokens=30",
]


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        (["model.tiny.max_position_embeddings=150"], True),
        (["model.tiny.max_position_embeddings=149"], False),
        (["model.context_window=150"], True),
        (["model.context_window=149"], False),
        (["model.context_window=400", "model.tiny.max_position_embeddings=149"], False),
        (["model.tiny.max_position_embeddings=150", "agent.max_final_tokens=120"], True),
        (["model.tiny.max_position_embeddings=150", "agent.max_final_tokens=121"], False),
        (["model.tiny.max_position_embeddings=160", "agent.repeat_problem=true"], True),
        (["model.tiny.max_position_embeddings=159", "agent.repeat_problem=true"], False),
        (["model.tiny.max_position_embeddings=150", "agent.repeat_problem=true", "agent.max_final_tokens=121"], False),
    ],
)
def test_the_limits_must_fit_into_the_window(overrides: list[str], allowed: bool) -> None:
    if allowed:
        assert tiny(*LIMITS, *overrides).agent.chunk_tokens == 100
        return
    with pytest.raises(UserError, match="context window"):
        tiny(*LIMITS, *overrides)


def test_a_window_that_is_too_small_is_told_with_the_sum() -> None:
    with pytest.raises(UserError) as update:
        tiny(*LIMITS, "model.tiny.max_position_embeddings=128")
    with pytest.raises(UserError) as final:
        tiny(*LIMITS, "agent.max_final_tokens=300", "model.context_window=200")

    assert "agent.chunk_tokens=100 + 2 x agent.max_memory_tokens=20 + agent.max_question_tokens=10 = 150 tokens" in str(
        update.value
    )
    assert "is 128 (model.tiny.max_position_embeddings): lower agent.chunk_tokens" in str(update.value)
    assert "by 22 or more" in str(update.value)
    assert "agent.max_memory_tokens=20 + agent.max_question_tokens=10 + agent.max_final_tokens=300 = 330 tokens" in str(
        final.value
    )
    assert "is 200 (model.context_window): lower agent.max_final_tokens" in str(final.value)


def test_the_window_of_a_checkpoint_is_checked_only_where_it_is_given() -> None:
    limits = {"chunk_tokens": 5000, "max_question_tokens": 1000, "max_memory_tokens": 1000}

    def config(window: int) -> RunConfig:
        return RunConfig.model_validate({"model": {"path": "/x", "context_window": window}, "agent": limits})

    assert config(0).model.context_window == 0  # the checkpoint's own window is known once it is loaded
    assert config(8000).model.context_window == 8000
    with pytest.raises(ValidationError, match=r"= 8000 tokens.* is 7999 \(model.context_window\)"):
        config(7999)
