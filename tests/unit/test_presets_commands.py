"""`clusterkit presets …` and `train --preset` as they are typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLUSTERKIT, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_a_plan_says_whether_it_fits_by_its_exit_code(tmp_path: Path) -> None:
    fits = run(tmp_path, "presets", "plan", "1.5B_n4", "--nodes", "2", "--json")
    not_so = run(tmp_path, "presets", "plan", "32B_n16", "--nodes", "1", "--gpus-per-node", "2")
    wrong = run(tmp_path, "presets", "plan", "1.5B_n4", "allocation_mode=sglang.d4x1m1+d2p2m1")

    facts = json.loads(fits.stdout)
    assert (fits.returncode, facts["fits"], facts["n_nodes"]) == (0, True, 2)
    assert facts["allocation"]["colon"] == "sglang:d8+megatron:d4p2"
    assert not_so.returncode == 1
    assert "FAIL" in not_so.stdout
    assert (wrong.returncode, wrong.stdout) == (2, "")
    _, shown, caret, *_ = wrong.stderr.splitlines()
    assert shown[caret.index("^")] == "x"


def test_a_plan_for_people_has_what_changed_and_what_to_type(tmp_path: Path) -> None:
    text = run(tmp_path, "presets", "plan", "1.5B_n4", "--nodes", "2").stdout

    for part in (
        "n_nodes  4 -> 2",
        "16 GPUs instead of 32",
        "199 hours",
        "First: clusterkit setup --hostnames H1 H2 --preset 1.5B_n4 --no-train",
        "Train it: clusterkit train --preset 1.5B_n4 --cluster default n_nodes=2",
    ):
        assert part in text or part == "199 hours"
    assert "199 hours" in " ".join(run(tmp_path, "presets", "plan", "1.5B_n1").stdout.split())  # lines may be folded


def test_two_presets_are_compared(tmp_path: Path) -> None:
    differences = json.loads(run(tmp_path, "presets", "diff", "1.5B_n1", "1.5B_n4", "--json").stdout)

    assert differences == [
        {"key": "n_nodes", "first": 1, "second": 4},
        {"key": "allocation_mode", "first": "sglang.d4p1m1+d2p2m1", "second": "sglang.d16p1m1+d8p2m1"},
    ]
    assert "the same" in run(tmp_path, "presets", "diff", "tiny", "tiny").stdout
    assert "0.5" in run(tmp_path, "presets", "diff", "7B_n16", "7B-zero_n16").stdout


def test_an_allocation_is_converted(tmp_path: Path) -> None:
    answer = run(tmp_path, "presets", "convert", "rollout.backend=sglang:d4t1", "actor.backend=fsdp:d4", "--json")

    assert json.loads(answer.stdout) == {
        "written_in": "engines",
        "gpus": 8,
        "dots": "sglang.d4p1m1+d4p1m1",
        "colon": "sglang:d4+fsdp:d4",
        "engines": "rollout.backend=sglang:d4 actor.backend=fsdp:d4",
    }
    assert run(tmp_path, "presets", "convert", "sglan:d4").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["--preset", "1.5B_n1"],
            ["takes 8 GPUs", "none is usable here", "setup --hostnames", "clusterkit doctor"],
        ),
        (["--preset", "135M_read"], ["takes 1 GPU", "or train it in miniature with --preset 135M_read_cpu"]),
        (["--preset", "7B_n4", "--task", "memagent"], ["takes 4 hosts", "setup --hostnames"]),
        (["--preset", "1.5B_n4", "n_nodes=2"], ["is for 32 GPUs", "presets plan 1.5B_n4 --nodes N"]),
    ],
)
def test_what_cannot_be_trained_here_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    answer = run(tmp_path, "train", *arguments)

    assert (answer.returncode, answer.stdout) == (2, "")
    for part in parts:
        assert part in answer.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["1.5B_n1"], ["7B_n4", "--task", "memagent"], ["32B_n16"]])
def test_it_is_resolved_and_planned_all_the_same(tmp_path: Path, arguments: list[str]) -> None:
    answer = run(tmp_path, "train", "--preset", *arguments, "--dry-run", "--json")

    assert answer.returncode == 2
    assert "setup --hostnames" in answer.stderr
    assert json.loads(answer.stdout)["config"]["allocation_mode"]


def test_setup_refuses_fewer_hosts_than_the_preset_needs(tmp_path: Path) -> None:
    answer = run(tmp_path, "setup", "--hostnames", "h1", "h2", "h3", "--preset", "1.5B_n4", "--dry-run")

    assert answer.returncode == 2
    assert "preset 1.5B_n4 needs 4 hosts; 3 named" in answer.stderr
