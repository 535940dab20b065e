"""Sections of which a name chooses the class: what applies is there, what does not is refused by name or left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from clusterkit.config.explain import compare, explain
from clusterkit.config.fields import fields, has_effect
from clusterkit.config.resolve import applicable_values, resolve
from clusterkit.evaluate.request import make_request
from clusterkit.runs.diagnose.run import train_command
from clusterkit.runs.directory import RunDirectory
from trainer.config import RunConfig, flatten
from trainer.config_agents import MemagentConfig, OwnAgentConfig, SingleTurnConfig
from trainer.config_choice import as_class
from trainer.config_choices import CHOICES
from trainer.config_tasks import FactsConfig, HotpotqaConfig, MathConfig, OwnTaskConfig, RecallConfig
from trainer.configfile import read_config
from trainer.errors import UserError

REQUEST = {"model_path": "m", "output_path": "o", "data_names": ["recall"]}


def refused(*overrides: str, preset: str = "7B_n4", task: str | None = "math") -> str:
    with pytest.raises(UserError) as refusal:
        resolve(preset, task, overrides)
    assert refusal.value.exit_code == 2
    return str(refusal.value)


def test_a_preset_shows_only_what_its_task_agent_and_reward_have() -> None:
    shown = applicable_values(resolve("7B_n4", "math").config)

    assert set(shown["task"]) == {
        "name",
        "train_size",
        "path",
        "dataset",
        "eval_fraction",
        "reward_scale",
        "reward_bias",
    }
    assert set(shown["agent"]) == {
        "name",
        "template",
        "enable_thinking",
        "max_question_tokens",
        "max_final_tokens",
    }
    assert shown["reward"] == {"name": "math"}


@pytest.mark.parametrize(
    ("preset", "sections"),
    [
        ("7B_n4", {"weights"}),
        ("tiny", {"model.tiny", "warmup"}),
        ("135M_cpu", set[str]()),
        ("memalpha-tiny", {"model.tiny", "warmup", "judge"}),
        ("memalpha-4B", {"weights", "judge"}),
    ],
)
def test_a_preset_shows_only_sections_that_its_run_reads(preset: str, sections: set[str]) -> None:
    shown = applicable_values(resolve(preset).config)

    found = {section for section in ("weights", "warmup", "judge") if section in shown}
    assert found | ({"model.tiny"} if "tiny" in shown["model"] else set()) == sections


def test_what_a_preset_shows_is_the_whole_run() -> None:
    for preset in ("7B_n4", "tiny", "135M_cpu", "memalpha-4B"):
        config = resolve(preset).config
        again = RunConfig.model_validate(applicable_values(config))
        assert {k: v for k, v in flatten(again).items() if has_effect(k, config) and k != "train.ranks"} == {
            k: v for k, v in flatten(config).items() if has_effect(k, config) and k != "train.ranks"
        }


@pytest.mark.parametrize("everything", [False, True])
def test_a_preset_explains_only_those(everything: bool) -> None:
    explained = {item.key: item for item in explain("7B_n4", "math", everything=everything)}

    assert set(explained) <= set(flatten(resolve("7B_n4", "math").config))
    assert explained["task.path"].meaning.startswith("Folder or hub repository")  # as this task means it
    assert "documents.jsonl" in explain("7B_n4", "memagent", "task.path")[0].meaning
    with pytest.raises(
        UserError, match=r"agent\.chunk_tokens is a setting of .*, and this preset has agent\.name=sing"
    ):
        explain("7B_n4", "math", "agent.chunk_tokens")


def test_presets_of_two_tasks_are_compared_field_by_field() -> None:
    different = {item.key: (item.first, item.second) for item in compare("tiny", "7B_n4")}

    assert different["task.num_keys"][1] == "(not set)"
    assert different["task.path"][0] == "(not set)"
    assert different["task.name"] == ("recall", resolve("7B_n4").config.task.name)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "task.facts_per_chunk=3",
            "task.facts_per_chunk is a setting of task.name=recall, needles and facts, and this run has task.name="
            "math: leave it out",
        ),
        (
            "agent.core_tokens=9",
            "agent.core_tokens is a setting of agent.name=memalpha, and this run has agent.name=si",
        ),
        (
            "agent.repeat_problem=true",
            "agent.repeat_problem is a setting of agent.name=memagent, and this run has agent.name=single_turn",
        ),
        ("reward.beta=1", "reward.beta is a setting of reward.name=memalpha, and this run has reward.name=math"),
        ("task.options.a=1", "task.options is a setting of task.name=module:Class, one of your own, and this run has"),
        ("task.name=mathematics", "choose it with --task"),
        (
            "agent.name=multi_turn",
            "agent.name=multi_turn is not known: choose memagent, single_turn, memalpha, or name",
        ),
        (
            "reward.name=exact",
            "reward.name=exact is not known: choose boxed, f1, found, math, reading, memalpha, or name a class",
        ),
        ("task.num_keyz=3", "unknown key task.num_keyz: did you mean task.num_keys"),
        ("agent.max_final_tokens=0", "agent.max_final_tokens=0 is not allowed: it must be a whole number at least 1"),
    ],
)
def test_what_another_name_has_is_refused_by_name(override: str, said: str) -> None:
    assert said in refused(override)


def test_every_misplaced_setting_is_named_at_once() -> None:
    said = refused("task.num_keys=9", "agent.max_chunks=2", "reward.gamma=0").splitlines()

    assert [line.split()[0] for line in said] == ["task.num_keys", "agent.max_chunks", "reward.gamma"]


def test_an_engine_in_the_trainers_own_process_takes_no_settings_of_servers() -> None:
    assert refused("servers.engine=embedded", "servers.count=2", preset="tiny", task=None) == (
        "servers.count is a setting of servers.engine=auto, sglang and vllm, and this run has servers.engine=embedded: "
        "leave it out"
    )
    config = resolve("tiny", None, ("servers.engine=embedded",)).config
    assert config.servers.model_dump() == {"engine": "embedded"}
    assert (config.engine, config.num_servers) == ("embedded", 0)
    assert "one of auto, embedded, sglang, vllm" in refused("servers.engine=tgi", preset="tiny", task=None)


def test_what_a_preset_sets_of_another_name_is_left_out() -> None:
    """The preset of a small model has words for its memory agent; who takes another agent did not ask for them."""
    config = resolve("tiny", None, ("agent.name=single_turn", "reward.name=f1")).config

    assert config.agent == SingleTurnConfig(template="words", max_question_tokens=8, max_final_tokens=4)
    assert flatten(resolve("tiny", "sft", ("task.path=/x.jsonl",)).config)["task.as_chat"] is True
    assert "task.num_keys is a setting" in refused("task.num_keys=32", "task.path=/x", preset="tiny", task="sft")


def test_a_class_of_the_users_own_has_what_any_of_ours_has() -> None:
    config = resolve("tiny", None, ("task.name=mine:Task", "agent.name=mine:Agent", "task.num_documents=7")).config

    assert isinstance(config.task, OwnTaskConfig)
    assert isinstance(config.agent, OwnAgentConfig)
    assert (config.task.num_keys, config.task.num_documents, config.agent.chunk_tokens) == (32, 7, 10)
    for choice in CHOICES.values():
        lacking = {field for cls in choice.ours.values() for field in cls.model_fields} - set(choice.own.model_fields)
        assert lacking <= {"as_chat"}  # of sft, which has no class of one's own


def test_every_field_is_known_by_its_dotted_key_once() -> None:
    keys = set(fields())

    assert {"task.as_chat", "task.options", "agent.tool_format", "reward.beta", "servers.count", "task.name"} <= keys
    assert all(fields()[key].help for key in keys if key.partition(".")[0] in CHOICES)
    assert (fields()["task.name"].default, fields()["servers.engine"].default) == ("recall", "auto")


def test_a_file_with_a_field_of_another_task_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("task: {name: hotpotqa, num_keys: 9}\nmodel: {path: m, dtype: float}\n")

    with pytest.raises(UserError) as refusal:
        read_config(path, RunConfig)

    lines = str(refusal.value).splitlines()
    assert "  task.num_keys is a setting of task.name=recall, needles and facts, and this one has " in lines[2]
    assert lines[1].startswith("  model.dtype: Input should be")


def test_what_is_wrong_with_a_value_is_said_without_pydantics_tag() -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate({"task": {"name": "facts", "num_keys": 1}})
    assert refused("task.num_keys=1", preset="memalpha-tiny", task=None).startswith("task.num_keys=1 is not allowed")


def test_a_section_as_another_class_keeps_what_both_have() -> None:
    facts = FactsConfig(num_keys=64, num_questions=9, train_size=5)

    assert as_class(RecallConfig, facts) == RecallConfig(num_keys=64, train_size=5)
    assert as_class(FactsConfig, facts) is facts
    assert as_class(MemagentConfig, SingleTurnConfig(max_final_tokens=7)).max_final_tokens == 7


def test_an_evaluation_takes_the_runs_settings_and_refuses_those_of_others() -> None:
    settings = resolve("memalpha-tiny").config
    changed = make_request(REQUEST, settings, ["agent.name=memagent", "agent.max_question_tokens=8"])

    assert isinstance(changed.agent, MemagentConfig)
    assert (changed.agent.chunk_tokens, changed.agent.max_question_tokens) == (13, 8)
    assert changed.task == settings.task
    with pytest.raises(UserError) as refusal:
        make_request(REQUEST, settings, ["agent.prompt_order=paper", "task.name=hotpotqa", "task.num_keys=9"])
    assert str(refusal.value).splitlines() == [
        "agent.prompt_order is a setting of agent.name=memagent, and this evaluation has agent.name=memalpha: "
        "leave it out, or take that name as well (--set)",
        "task.num_keys is a setting of task.name=recall, needles and facts, and this evaluation has task.name="
        "hotpotqa: leave it out, or take that name as well (--set)",
    ]


def test_servers_of_an_evaluation_hold_prompts_back_as_long_as_the_runs() -> None:
    settings = resolve("135M_read").config
    values = {**REQUEST, "server": {"engine": "sglang", "gpus": 1}}

    held = make_request(values, settings, []).server
    assert (held.prefill_delay_ms, held.engine, held.gpus) == (settings.serving.prefill_delay_ms, "sglang", 1)
    assert held.prefill_delay_ms > 0
    assert make_request(values, settings, ["server.prefill_delay_ms=0"]).server.prefill_delay_ms == 0
    assert make_request(REQUEST, resolve("tiny").config, []).server.prefill_delay_ms == 0
    assert make_request(values, None, []).server.prefill_delay_ms == 0


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "methods",
            ["gold", "memagnt"],
            "methods=memagnt is not allowed: it must be a list, with commas; each one of ",
        ),
        ("num_questions", -3, "num_questions=-3 is not allowed: it must be a whole number at least 0"),
        ("top_p", 2.0, "top_p=2.0 is not allowed: it must be a number above 0 and at most 1"),
        ("methods", [], "methods: name at least one way to read documents: memagent, "),
    ],
)
def test_an_evaluation_says_what_it_allows_instead(name: str, value: object, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_request({**REQUEST, name: value}, None, [])
    assert str(refusal.value).startswith(sentence)


def test_the_names_choose_the_classes() -> None:
    values = {"model": {"path": "m"}, "agent": {"name": "single_turn"}, "reward": {"name": "math"}}

    assert isinstance(RunConfig.model_validate({**values, "task": {"name": "math"}}).task, MathConfig)
    assert isinstance(RunConfig.model_validate({"task": HotpotqaConfig(), **values}).task, HotpotqaConfig)
    assert isinstance(RunConfig().task, RecallConfig)


def test_the_command_of_a_run_with_another_agent_than_the_presets_names_it(tmp_path: Path) -> None:
    typed = ("agent.name=mine:Agent", "agent.core_tokens=9", "reward.name=f1", f"fileroot={tmp_path}")
    config = resolve("tiny", None, typed).config

    command = train_command(RunDirectory(tmp_path, "me", config.experiment_name, "run1"), config, []).split()

    assert {"agent.name=mine:Agent", "agent.core_tokens=9", "reward.name=f1"} <= set(command)
    assert not [word for word in command if word.startswith(("agent.shown_items", "agent.options", "reward.beta"))]


@pytest.mark.parametrize(
    ("preset", "typed"), [("memalpha-4B", "/data/m/train.jsonl"), ("4B", "/data/m/questions.jsonl")]
)
def test_an_old_word_for_folder_and_file_is_a_folder_where_tasks_take_one(preset: str, typed: str) -> None:
    config = resolve(preset, None, [f"train_dataset.path={typed}"]).config

    assert config.data_path == "/data/m"


def test_an_old_word_is_refused_as_it_was_typed() -> None:
    said = r"^MEM_CHUNK_TOKENS=400 is agent.chunk_tokens=400 here, and agent.chunk_tokens is a setting of agent.name="
    with pytest.raises(UserError, match=said):
        resolve("7B_n4", "math", ["MEM_CHUNK_TOKENS=400"])
