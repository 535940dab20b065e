"""Probe output in, facts out: one JSON file for each kind of host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterkit.provision.facts.model import Facts
from clusterkit.provision.facts.parse import parse
from clusterkit.provision.facts.parse_gpu import parse_gpus
from clusterkit.provision.facts.sections import is_whole, split

CASES = sorted((Path(__file__).parents[1] / "cases" / "facts").glob("*.json"))
SMI = Path(__file__).parents[1] / "cases" / "nvidia_smi"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))

    facts = parse("\n".join(case["output"]) + "\n")

    dumped = facts.model_dump(mode="json")
    assert subset(dumped, case["facts"]) == case["facts"]
    assert Facts.model_validate(facts.model_dump()) == facts


def test_output_cut_off_is_not_whole() -> None:
    whole = "@@clock\n1\n@@end\n"

    assert is_whole(split(whole))
    assert not is_whole(split(whole[:-5]))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_output_cut_off_anywhere_is_still_parsed(path: Path) -> None:
    output = "\n".join(json.loads(path.read_text(encoding="utf-8"))["output"])

    for end in range(0, len(output), 7):
        parse(output[:end])


def test_csv_of_a_real_h200_host() -> None:
    gpus = parse_gpus((SMI / "h200_gpus.csv").read_text().splitlines(), [])

    assert [(gpu.index, gpu.name, gpu.memory >> 20, gpu.driver) for gpu in gpus] == [
        (0, "NVIDIA H200", 143771, "580.159.04"),
        (1, "NVIDIA H200", 143771, "580.159.04"),
    ]
    assert [gpu.ecc_uncorrected for gpu in gpus] == [0, 0]


def subset(actual: Any, wanted: Any) -> Any:
    """`actual`, mappings in it cut down to the keys that `wanted` has."""
    if isinstance(actual, dict) and isinstance(wanted, dict):
        # What a case says about listeners and labels is all there is; what it leaves out of a record is not asked.
        return {key: subset(actual[key], value) for key, value in wanted.items() if key in actual}
    return actual
