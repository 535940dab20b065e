"""Settings in the spelling of AReaL, verl and vime: translated, passed over or refused, and always said."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterkit.config.aliases import ALIASES, Renamed, Switch, translation_notes
from clusterkit.config.fields import fields
from clusterkit.config.overrides import parse_overrides
from clusterkit.config.resolve import resolve
from trainer.errors import UserError

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))


def test_every_alias_leads_to_a_setting_and_hides_none() -> None:
    for old, alias in ALIASES.items():
        if isinstance(alias, Renamed):
            assert set(alias.keys) | set(alias.beside) <= set(fields()), old
        if isinstance(alias, Switch):
            assert set(alias.on) | set(alias.off) <= set(fields()), old
        # A key of ours stays ours: only values of it may have another spelling.
        assert old not in fields() or (isinstance(alias, Renamed) and alias.keys == (old,)), old


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("actor.path=/m", {"model.path": "/m"}),
        ("dataset.train_bs_n_seqs=512", {"rollout.batch_size": 512}),
        ("actor_rollout_ref.model.lora_rank=8", {"model.lora.rank": 8, "model.lora.alpha": 16.0}),
        ("actor_rollout_ref.model.target_modules=all-linear", {"model.lora.targets": ["all-linear"]}),
        ("actor.use_lora=true", {"model.lora.rank": 32, "model.lora.alpha": 16.0}),
        ("actor.use_lora=false", {"model.lora.rank": 0}),
        ("actor.lora_rank=8", {"model.lora.rank": 8, "model.lora.alpha": 16.0}),
        ("actor.target_modules=[]", {"model.lora.targets": ["all-linear"]}),
        ("exp_ctrl.save_freq_steps=null", {"checkpoint.save_freq_steps": 0}),
        ("trainer.test_freq=-1", {"eval.every_steps": 0}),
        ("algorithm.grpo_use_adv=False", {"algorithm.advantage": "mean"}),
        ("actor.c_clip=null", {"algorithm.dual_clip": 0.0}),
        ("actor.overlong_reward_penalty=true", {}),
        ("reward_model.overlong_buffer.len=4096", {"algorithm.overlong_tokens": 4096}),
        ("algorithm.filter_groups.enable=True", {"rollout.refill": True}),
        ("actor.eps_clip=0.4", {"algorithm.clip_low": 0.4, "algorithm.clip_high": 0.4}),
        ("dataset.path=/storage/datasets/b.jsonl", {"task.path": "/storage/datasets", "task.dataset": "b.jsonl"}),
        ("train_dataset.path=org/name", {"task.path": "org/name"}),
        ("trainer.experiment_name=memory_agent/0.5B", {"experiment_name": "memory_agent-0.5B"}),
        ("MEM_CHUNK_TOKENS=2048", {"agent.chunk_tokens": 2048}),
        ("recover.mode=on", {"recover_mode": "auto"}),
        ("mode=torchrun", {"mode": "local"}),
        ("mode=ray", {"mode": "ray"}),
        ("+data.context_key=context", {}),
        ("actor_rollout_ref.actor.use_kl_loss=True", {}),
    ],
)
def test_an_old_spelling_means_ours(typed: str, meant: dict[str, object]) -> None:
    assert parse_overrides([typed]) == meant


def test_a_number_of_epochs_counts_although_the_preset_counts_steps() -> None:
    config = resolve("7B_n4", "memagent", ["trainer.total_epochs=3"]).config
    assert (config.train.total_epochs, config.train.total_steps) == (3, 0)
    both = parse_overrides(["train.total_steps=7", "trainer.total_epochs=3"])
    assert both == {"train.total_steps": 7, "train.total_epochs": 3}


def test_adapters_of_areal_have_what_is_typed_and_its_own_defaults_beside() -> None:
    typed = ["actor.use_lora=true", "actor.lora_rank=8", "actor.lora_alpha=64"]
    for words in (typed, typed[::-1]):
        assert parse_overrides(words) == {"model.lora.rank": 8, "model.lora.alpha": 64.0}
    with pytest.raises(UserError, match=r"actor\.use_lora=maybe: it is true or false"):
        parse_overrides(["actor.use_lora=maybe"])
    assert translation_notes(typed)[0] == "actor.use_lora=true is model.lora.rank=32 model.lora.alpha=16 here"


def test_what_was_understood_is_said_and_nothing_is_said_of_our_own_keys() -> None:
    arguments = ["seed=2", "mode=ray", "actor.path=/m", "trainer.total_epochs=3", "data.shuffle=False"]
    assert translation_notes(arguments) == (
        "actor.path=/m is model.path=/m here",
        "trainer.total_epochs=3 is train.total_epochs=3 train.total_steps=0 here",
        "data.shuffle=False is not needed here: the order of the tasks follows from seed",
    )


def test_what_cannot_be_translated_is_refused_at_once_with_what_to_do() -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides(["critic.path=/c", "actor_rollout_ref.rollout.name=vllm", "trainer.critic_warmup=5", "seed=2"])
    with pytest.raises(UserError, match="type recover_mode=disabled"):
        parse_overrides(["recover.mode=off"])
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("critic.path: no critic is trained")
    assert "allocation_mode" in second
    assert third.startswith("trainer.critic_warmup=5: only 0 is possible here")


def test_values_are_checked_by_our_rules() -> None:
    with pytest.raises(UserError, match=r"rollout.group_size=none is not allowed"):
        parse_overrides(["group_size=none"])


def test_two_old_keys_of_one_setting_must_agree_and_ours_may_follow() -> None:
    agreeing = ["actor_train.mb_spec.max_tokens_per_mb=20480", "ref_inf.mb_spec.max_tokens_per_mb=20480"]
    assert parse_overrides(agreeing) == {"train.max_tokens_per_mb": 20480}
    with pytest.raises(UserError, match=r"are both model\.path here: leave one of them out"):
        parse_overrides(["actor.path=/a", "ref.path=/b"])
    assert parse_overrides(["actor.path=/a", "model.path=/b"]) == {"model.path": "/b"}


def test_commands_say_what_they_understood_beside_their_result(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([CLUSTERKIT, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)

    dry = run("train", "--preset", "tiny", "--dry-run", "NUM_ROLLOUT=3")
    assert (dry.returncode, dry.stderr) == (0, "note: NUM_ROLLOUT=3 is train.total_steps=3 here\n")
    assert re.search(r"^  total_steps: 3$", dry.stdout, re.MULTILINE)
    assert "note: group_size=8" in run("presets", "plan", "1.5B_n1", "group_size=8").stderr
    explained = run("presets", "explain", "tiny", "actor.path")
    assert (explained.returncode, explained.stderr) == (2, "error: actor.path is model.path here\n")
