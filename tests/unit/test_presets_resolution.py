"""From what was typed to one RunConfig, and what is answered to mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterkit.config import presets
from clusterkit.config.explain import explain
from clusterkit.config.fields import fields
from clusterkit.config.resolve import resolve
from trainer.algorithms.table import TABLE
from trainer.algorithms.table import resolve as row
from trainer.config import flatten
from trainer.config_tasks import HotpotqaConfig
from trainer.errors import UserError


@pytest.mark.parametrize(("size", "task"), [(s, t) for s in presets.size_names() for t in presets.load_size(s).tasks])
def test_every_preset_resolves_with_every_task_it_allows(size: str, task: str) -> None:
    config = resolve(size, task).config

    assert (config.preset, config.experiment_name) == (size, f"{size}-{task}")
    assert config.task.name == presets.config_task(task)


@pytest.mark.parametrize("size", presets.size_names())
def test_every_note_is_about_a_value_that_is_set(size: str) -> None:
    chosen = presets.load_size(size)
    for preset in [chosen, *map(presets.load_task, chosen.tasks)]:
        layers = [preset.values, *getattr(preset, "per_task", {}).values()]
        assert set(preset.notes) <= {key for layer in layers for key, _ in presets.leaves(layer)}
    for task, notes in chosen.task_notes.items():
        assert set(notes) <= {key for key, _ in presets.leaves(chosen.per_task[task])}


@pytest.mark.parametrize("size", [name for name in presets.size_names() if presets.load_size(name).gpu_memory_gib])
def test_every_value_of_a_gpu_preset_has_its_source(size: str) -> None:
    for task in presets.load_size(size).tasks:
        settings = presets.collect(presets.load_size(size), task)
        own = {"preset", "experiment_name"} | {"task.name", "agent.template", "algorithm.name", "agent.name"}
        assert {key for key, setting in settings.items() if not setting.note} <= own


def test_later_layers_win() -> None:
    hotpotqa, cpu = presets.load_task("hotpotqa"), presets.load_size("135M_cpu")
    own = cpu.per_task["hotpotqa"]["task"]["num_documents"]
    assert HotpotqaConfig().num_documents != own

    config = resolve("135M_cpu", "hotpotqa", ["agent.chunk_tokens=300"]).config

    assert config.algorithm.dual_clip == hotpotqa.values["algorithm"]["dual_clip"]  # task over default
    assert config.agent.max_memory_tokens == cpu.values["agent"]["max_memory_tokens"]  # size over default
    assert config.task.num_documents == own  # the size's section for the task over default
    assert config.agent.chunk_tokens == 300  # override over all


def test_overrides_alone_do_not_change_other_fields() -> None:
    before, after = flatten(resolve("tiny").config), flatten(resolve("tiny", None, ["seed=7"]).config)

    assert {key for key in before if before[key] != after[key]} == {"seed"}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.learning_rate=1e-4", "train.learning_rate", 1e-4),
        ("train.total_steps=1_000", "train.total_steps", 1000),
        ("eval.final_chunks=[4, 8]", "eval.final_chunks", [4, 8]),
        ("eval.final_chunks=4,8", "eval.final_chunks", [4, 8]),
        ("eval.final_chunks=16", "eval.final_chunks", [16]),
        ("eval.final_chunks=", "eval.final_chunks", []),
        ("control.rewards=true", "control.rewards", "true"),
        ("trial_name=007", "trial_name", "007"),
        ("model.path=null", "model.path", None),
        ("recover_from=/data/a=b", "recover_from", "/data/a=b"),
        ("eval.blank_memory=false", "eval.blank_memory", False),
        ("algorithm.clip_high=0.28", "algorithm.clip_high", 0.28),
        ("algorithm.advantage=mean_std", "algorithm.advantage", "mean_std"),
    ],
)
def test_override_values_are_read_as_their_field_wants_them(override: str, key: str, value: object) -> None:
    assert flatten(resolve("tiny", None, [override]).config)[key] == value


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("train.learning_rat", "train.learning_rate"),
        ("train.lr", "train.learning_rate"),
        ("rollout.batchsize", "rollout.batch_size"),
        ("groupsize", "rollout.group_size"),
        ("trian.total_steps", "train.total_steps"),
        ("eval.total_steps", "supervised.total_steps or train.total_steps"),
        ("ckpt_freq_sec", "checkpoint.ckpt_freq_secs"),
        ("Seed", "seed"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_nearest_field(wrong: str, right: str) -> None:
    with pytest.raises(UserError) as raised:
        resolve("tiny", None, [f"{wrong}=1"])

    assert f"unknown key {wrong}: did you mean {right}?" in str(raised.value)


@pytest.mark.parametrize("key", [key for key in fields() if len(key) > 6])
def test_one_wrong_letter_in_any_key_leads_back_to_it(key: str) -> None:
    with pytest.raises(UserError, match="did you mean") as raised:
        resolve("tiny", None, [f"{key[:-2]}{key[-1]}=1"])

    assert key in str(raised.value)


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("train.learning_rate=-1", "a number above 0"),
        ("train.learning_rate=fast", "a number above 0"),
        ("train.learning_rate=nan", "a number above 0"),
        ("train.total_steps=2.5", "a whole number at least 0"),
        ("train.total_steps=", "a whole number at least 0"),
        ("seed=yes", "a whole number"),
        ("rollout.top_p=2", "at most 1"),
        ("recover_mode=never", "one of auto, resume, disabled"),
        ("algorithm.advantage=median", "one of mean, mean_std, or null"),
        ("eval.blank_memory=perhaps", "true or false"),
        ("eval.final_chunks=[4, 0]", "a list such as [4, 8]"),
        ("trial_name=a/b", "letters, digits"),
        ("model.tiny.hidden_size=20", "a multiple of 8"),
    ],
)
def test_a_bad_value_names_field_value_and_what_is_allowed(override: str, allowed: str) -> None:
    with pytest.raises(UserError) as raised:
        resolve("tiny", None, [override])

    message = str(raised.value)
    key = override.partition("=")[0]
    assert message.startswith(f"{key}=")
    assert allowed in message
    assert "pydantic" not in message
    assert "type=" not in message


def test_values_that_do_not_fit_each_other_are_named_with_their_section() -> None:
    with pytest.raises(UserError, match=r"model\.tiny: hidden_size 40 must be an even multiple of num_heads 3"):
        resolve("tiny", None, ["model.tiny.hidden_size=40", "model.tiny.num_heads=3"])
    with pytest.raises(UserError, match=r"rollout\.batch_size=30 is not divisible by train\.minibatches=4"):
        resolve("tiny", None, ["rollout.batch_size=30", "train.minibatches=4"])


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(UserError) as raised:
        resolve("tiny", None, ["trian.total_steps=3", "recover_mode=never", "tiny"])

    assert len([line for line in str(raised.value).splitlines() if not line.startswith(" ")]) == 3


def test_a_section_is_answered_with_its_fields() -> None:
    with pytest.raises(UserError, match=r"train is a section.*train\.total_steps"):
        resolve("tiny", None, ["train=3"])


@pytest.mark.parametrize("name", ["..", ".hidden"])
def test_a_trial_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(UserError, match="name of a folder"):
        resolve("tiny", None, [f"trial_name={name}"])


def test_an_unknown_preset_is_answered_with_the_nearest_and_the_list() -> None:
    with pytest.raises(UserError) as raised:
        resolve("tyni")

    assert "Did you mean tiny?" in str(raised.value)
    assert all(name in str(raised.value) for name in presets.size_names())


def test_a_task_that_the_preset_does_not_allow_is_refused_with_a_preset_that_does() -> None:
    with pytest.raises(UserError, match=r"preset tiny trains on recall or sft, not on hotpotqa.*--preset 135M_cpu"):
        resolve("tiny", "hotpotqa")
    with pytest.raises(UserError, match="Did you mean hotpotqa"):
        resolve("tiny", "hotpot")
    with pytest.raises(UserError, match="--task"):
        resolve("135M_cpu", None, ["task.name=recall"])


@pytest.mark.parametrize(
    ("size", "overrides", "advice"),
    [
        ("7B_n4", ["agent.prompt_order=section_first"], ": leave it out, or choose --task memagent"),
        ("7B_n4", ["agent.name=single_turn", "agent.chunk_tokens=512"], ": leave it out"),
        ("tiny", ["task.num_documents=3"], ": leave it out"),
        ("tiny", ["trainer.type=sft", "task.num_keys=8"], ": leave it out"),
    ],
)
def test_a_setting_of_another_task_of_the_preset_is_refused_with_that_task(
    size: str, overrides: list[str], advice: str
) -> None:
    with pytest.raises(UserError) as refused:
        resolve(size, None, overrides)
    assert str(refused.value).endswith(advice)


def test_the_run_folder_does_not_depend_on_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert resolve("tiny").config.fileroot == str(tmp_path / "runs")


def test_explain_says_where_a_value_comes_from() -> None:
    by_key = {item.key: item for item in explain("135M_cpu", everything=True)}

    assert set(by_key) == set(flatten(resolve("135M_cpu").config))
    assert by_key["algorithm.kl_coef"].origin == "preset 135M_cpu for hotpotqa"
    assert by_key["algorithm.dual_clip"].origin == "task hotpotqa"
    assert by_key["agent.chunk_tokens"].origin == "preset 135M_cpu"
    assert by_key["agent.chunk_tokens"].note
    assert by_key["train.beta1"].origin == "default"
    assert all(item.meaning for item in by_key.values() if item.key not in ("model.tiny", "monitor"))


@pytest.mark.parametrize("name", ["dapo", "dr_grpo", "gspo", "cispo"])
def test_another_algorithm_is_its_own_row_and_not_the_presets(name: str) -> None:
    """The preset's settings over grpo's row would have turned each of them back into MemAgent's grpo."""
    config = resolve("7B_n4", "memagent", (f"algorithm.name={name}",)).config

    assert row(config.algorithm) == TABLE[name]
    assert config.algorithm.kl_coef == 0


def test_the_presets_own_algorithm_named_again_changes_nothing() -> None:
    named = resolve("7B_n4", "memagent", ("algorithm.name=grpo",)).config

    assert named == resolve("7B_n4", "memagent").config
    assert named.algorithm.kl_coef == 0.001


def test_what_is_typed_beside_another_algorithm_holds() -> None:
    typed = ("algorithm.clip_high=0.3", "algorithm.name=dapo", "algorithm.kl_coef=0.1")
    algorithm = resolve("7B_n4", "memagent", typed).config.algorithm

    assert (row(algorithm).clip_high, algorithm.kl_coef) == (0.3, 0.1)
