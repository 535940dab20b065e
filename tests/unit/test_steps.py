"""Steps as pure functions: facts and wish in, actions out. One JSON file per system and state.

A case has `facts` (`system` fills in the operating system), `wish`, and either `actions` (in order, over all steps,
with texts that a script contains or lacks) or `refused` (step, words of the message and of the fix). `after`: what the
facts have become when the actions are done; with them the plan must be empty.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps.all import PROBED_COMMANDS, PROBED_FILES, PROBED_PACKAGES, STEPS
from clusterkit.provision.steps.shell import sha
from clusterkit.provision.steps.step import Action, DesiredState, Refused
from clusterkit.provision.steps.storage import probed_paths
from clusterkit.provision.steps.systems import SYSTEMS

FOLDER = Path(__file__).parents[1] / "cases" / "steps"
CASES = sorted(FOLDER.glob("*/*.json"))
SYSTEM_FACTS = json.loads((FOLDER / "systems.json").read_text())
CLUSTER = Cluster(hosts=(Host(name="node1"),))
READY_STORAGE = {path: {"path": path} for path in probed_paths(CLUSTER)}


def load(path: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(path.read_text())
    return case


def facts_of(case: Mapping[str, Any], key: str = "facts", planned: Sequence[tuple[str, Action]] = ()) -> Facts:
    """Facts of a case. What it does not speak about is in order: base packages, storage.

    A file given as `text:…` has that content, `written` what the plan writes to it, anything else is a checksum. Modes
    are octal, as chmod takes them.
    """
    ready: dict[str, Any] = {
        "commands": {
            "curl": "/usr/bin/curl",
            "git": "/usr/bin/git",
            "git-lfs": "/usr/bin/git-lfs",
            "zstd": "/usr/bin/zstd",
            "gpg": "/usr/bin/gpg",
        },
        "packages": {"ca-certificates": "2023"},
        "disks": READY_STORAGE,
        "os": SYSTEM_FACTS[case["system"]],
    }
    given = case["facts"] if key == "facts" else {**case["facts"], **case[key]}
    for name, value in given.items():
        # "+commands" adds to what is in order, "commands" replaces it.
        ready[name.removeprefix("+")] = {**ready[name[1:]], **value} if name.startswith("+") else value
    ready["modes"] = {path: int(mode, 8) for path, mode in ready.get("modes", {}).items()}
    ready["files"] = {path: checksum(path, value, planned) for path, value in ready.get("files", {}).items()}
    return Facts.model_validate(ready)


def checksum(path: str, value: str, planned: Sequence[tuple[str, Action]]) -> str:
    if value == "written":
        return sha(next(action.stdin for _, action in planned if action.stdin and path in action.script))
    return sha(value.removeprefix("text:").encode()) if value.startswith("text:") else value


def desired_state(case: Mapping[str, Any]) -> DesiredState:
    given = dict(case.get("wish", {}))
    if "ca_bundle" in given:
        given["ca_bundle"] = given["ca_bundle"].encode()
    cluster = Cluster(hosts=CLUSTER.hosts, storage=given.pop("storage", "/storage"))
    return DesiredState(cluster=cluster, **given)


def plan(facts: Facts, wish: DesiredState) -> list[tuple[str, Action]]:
    return [(step.name, action) for step in STEPS for action in step.plan(facts, wish)]


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_case(path: Path) -> None:
    case = load(path)
    facts, wish = facts_of(case), desired_state(case)
    if "refused" in case:
        step = next(step for step in STEPS if step.name == case["refused"]["step"])
        with pytest.raises(Refused) as refused:
            step.plan(facts, wish)
        for words in case["refused"]["message"]:
            assert words in refused.value.message
        for words in case["refused"]["fix"]:
            assert words in refused.value.fix
        return
    planned = plan(facts, wish)
    assert [action.title for _, action in planned] == [wanted["title"] for wanted in case["actions"]]
    for (step_name, action), wanted in zip(planned, case["actions"], strict=True):
        assert step_name == wanted.get("step", path.parent.name)
        text = action.script + action.stdin.decode()
        for words in wanted.get("contains", ()):
            assert words in text
        for words in wanted.get("lacks", ()):
            assert words not in text
    if "after" in case:
        assert plan(facts_of(case, "after", planned), wish) == []


def all_scripts() -> dict[str, str]:
    """Every script that any case leads to, by its text."""
    scripts = {}
    for path in CASES:
        case = load(path)
        if "refused" not in case:
            for _, action in plan(facts_of(case), desired_state(case)):
                scripts.setdefault(action.script, f"{path.parent.name}/{path.stem}: {action.title}")
    return scripts


def test_every_script_is_posix_sh() -> None:
    shell = shutil.which("dash")
    for text, title in all_scripts().items():
        checked = subprocess.run(
            [shell or "sh", "-n"], check=False, input=f"set -eu\n{text}", text=True, capture_output=True
        )
        assert checked.returncode == 0, f"{title}: {checked.stderr}"


def test_no_script_shows_a_secret() -> None:
    for path in CASES:
        case = load(path)
        if "refused" not in case:
            for _, action in plan(facts_of(case), desired_state(case)):
                assert "hunter2" not in action.script + action.title


def test_the_plan_of_every_system_is_complete_and_steps_ask_only_for_known_facts() -> None:
    """A bare host of every supported release gets Docker, and what the cases speak about is really asked for."""
    assert {system.name for system in SYSTEMS} == SYSTEM_FACTS.keys() - {"centos-7", "fedora", "none", "arm"}
    for system in SYSTEMS:
        case = {"system": system.name, "facts": {"commands": {}, "packages": {}, "disks": {}}}
        planned = plan(facts_of(case), DesiredState(cluster=CLUSTER))
        assert [name for name, _ in planned].count("docker") == 4, system.name
        assert planned[-1][0] == "storage"
    for path in CASES:
        facts = facts_of(load(path))
        assert facts.files.keys() <= set(PROBED_FILES), path
        assert facts.packages.keys() <= set(PROBED_PACKAGES), path
        assert facts.commands.keys() <= {*PROBED_COMMANDS, "nvidia-smi", "nvidia-ctk"}, path


def test_a_host_in_order_needs_nothing() -> None:
    case = {
        "system": "debian-12",
        "facts": {
            "+commands": {"docker": "/usr/bin/docker", "dockerd": "/usr/sbin/dockerd"},
            "docker": {"client": "29.1", "server": "29.1"},
        },
    }
    assert plan(facts_of(case), DesiredState(cluster=CLUSTER)) == []
