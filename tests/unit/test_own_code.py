"""Classes of the user's own before a run: what is read of a command, what goes to the nodes, what stays out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clusterkit.backends.base import RunRequest
from clusterkit.backends.own_code import MOST_BYTES, own_files, require_own
from clusterkit.backends.ray.request import on_cluster
from clusterkit.config.explain import explain
from clusterkit.config.resolve import resolve
from clusterkit.hosts.model import Cluster, Host
from trainer.config import RunConfig
from trainer.errors import UserError

CLUSTER = Cluster(hosts=(Host(name="h1"),), storage="/storage")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command runs in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def config(*overrides: str) -> RunConfig:
    return resolve("tiny", None, overrides).config


def test_options_are_read_entry_by_entry(here: Path) -> None:
    found = config("agent.name=mine:Mine", "agent.options={depth: 1}", "agent.options.depth=2", "agent.options.a.b=x")

    assert found.agent.options == {"depth": 2, "a": {"b": "x"}}
    assert found.code_dir == str(here)
    assert found.custom == {"agent.name": "mine:Mine"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "agent.name=mine",
            "agent.name=mine is not known: choose memagent, single_turn, memalpha, or name a class of yours",
        ),
        ("reward.name=a:b:c", "reward.name=a:b:c is not known: choose boxed"),
        ("task.options=3", "task.options=3 is not allowed: it must be a mapping; its entries: task.options.NAME=VALUE"),
        (
            "task.options.day=3",
            "task.options is a setting of task.name=module:Class, one of your own, and this run has",
        ),
        ("task.name=hotpotqa", "choose it with --task"),
        ("trainer.type=dpo", "trainer.type=dpo is not allowed: it must be one of grpo, sft, null"),
    ],
)
def test_what_is_no_class_or_option_is_refused(override: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        config(override)

    assert said in str(refusal.value)


def test_options_are_what_json_can_hold() -> None:
    with pytest.raises(UserError, match="options must be numbers, texts"):
        config("task.name=mine:Mine", "task.options.day=2024-01-01")


def test_trainer_types_in_areals_words() -> None:
    assert config("trainer.type=ppo").trainer.type == "grpo"
    assert config("trainer.type=null").trainer.type == "null"
    assert RunConfig.model_validate({"trainer": {"type": None}}).trainer.type == "null"
    assert resolve("tiny", None, ["trainer.type=sft", "task.path=/x.jsonl"]).task == "sft"
    with pytest.raises(UserError, match="add --task sft"):
        resolve("tiny", "recall", ["trainer.type=sft"])


def test_the_new_settings_are_explained() -> None:
    (kind,) = explain("tiny", "sft", "trainer.type")
    assert (kind.value, kind.allowed) == ("sft", "one of grpo, sft, null")
    explained = {field.key: field for field in explain("tiny", None, "reward")}
    assert list(explained) == ["reward.name"]
    assert "module:Class" in explained["reward.name"].meaning
    with pytest.raises(UserError, match=r"reward\.options is a setting of reward\.name=module:Class, one of your own"):
        explain("tiny", None, "reward.options")


def test_module_and_what_it_imports_from_its_folder_are_packed(here: Path) -> None:
    (here / "mine.py").write_text("import json, trainer.types\nfrom helpers.words import THINGS\nclass Mine: pass\n")
    (here / "helpers" / "__pycache__").mkdir(parents=True)
    (here / "helpers" / "words.py").write_text("import more\n")
    (here / "helpers" / "list.txt").write_text("bread")
    (here / "helpers" / "__pycache__" / "words.pyc").write_bytes(b"x")
    (here / "more.py").write_text("import mine\n")
    (here / "private.py").write_text("KEY = 1\n")

    packed = own_files(config("reward.name=mine:Mine"))

    assert [name for name, _ in packed] == ["helpers/list.txt", "helpers/words.py", "mine.py", "more.py"]
    assert dict(packed)["helpers/list.txt"] == b"bread"


def test_pythonpath_comes_before_the_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine.py").write_text("first = 1")
    (here / "other").mkdir()
    (here / "other" / "mine.py").write_text("second = 2")
    monkeypatch.setenv("PYTHONPATH", str(here / "other"))

    assert own_files(config("reward.name=mine:Mine")) == (("mine.py", b"second = 2"),)


def test_what_cannot_be_packed_is_refused(here: Path) -> None:
    with pytest.raises(UserError, match="there is no module nowhere in PYTHONPATH or "):
        own_files(config("reward.name=nowhere:Mine"))
    with pytest.raises(UserError, match="cannot be called trainer"):
        own_files(config("reward.name=trainer.rewards:Boxed"))
    (here / "large").mkdir()
    (here / "large" / "data.bin").write_bytes(bytes(MOST_BYTES + 1))
    with pytest.raises(UserError, match="at most 20 are sent"):
        own_files(config("reward.name=large:Mine"))


def test_on_a_cluster_other_code_is_another_run(here: Path) -> None:
    (here / "mine.py").write_text("class Mine: pass")
    wanted = config("reward.name=mine:Mine")

    def fingerprint() -> str:
        return RunRequest(on_cluster(wanted, CLUSTER), own_code=own_files(wanted)).fingerprint

    before = fingerprint()
    assert fingerprint() == before
    (here / "mine.py").write_text("class Mine: more = 1")
    assert fingerprint() != before
    assert on_cluster(wanted, CLUSTER).code_dir == "", "the nodes have it where PYTHONPATH leads"


def test_a_class_is_looked_at_without_importing_it_here(here: Path) -> None:
    (here / "mine.py").write_text("print('imported')\nclass Mine:\n    def score(self, task, trajectory): return 0\n")
    require_own(config("reward.name=mine:Mine"))
    assert "mine" not in sys.modules

    (here / "mine.py").write_text("import torch_of_tomorrow\n")
    with pytest.raises(UserError, match="imports torch_of_tomorrow, which is not installed"):
        require_own(config("reward.name=mine:Mine"))
    (here / "mine.py").write_text("import os; os._exit(7)\n")
    with pytest.raises(UserError, match="importing ends the process: exit code 7"):
        require_own(config("reward.name=mine:Mine"))


def test_a_class_that_wants_the_nodes_packages_is_left_to_them(here: Path) -> None:
    (here / "mine.py").write_text("import sglang.nothing\nclass Mine: pass\n")  # not installed where this runs
    require_own(config("reward.name=mine:Mine"))


def test_the_look_imports_nothing_heavy(here: Path) -> None:
    (here / "mine.py").write_text("from trainer.agents.base import Agent\nclass Mine(Agent): pass\n")
    code = (
        "import sys; from trainer.custom import main; "
        f"print(main([{str(here)!r}, 'agent.name=mine:Mine'])); print(*{{'torch', 'transformers'}} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
        check=True,
    )

    message, returned, heavy = done.stdout.splitlines()
    assert "class Mine has no answer" in message
    assert (returned, heavy) == ("2", "")
