"""Every signature on a real excerpt, or on the message as its source has it; healthy logs are no finding."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from realparts import data_is_missing

from clusterkit.runs.diagnose.changes import Context, propose
from clusterkit.runs.diagnose.checks import CHECKS
from clusterkit.runs.diagnose.run import diagnose_log
from clusterkit.runs.diagnose.scan import WORDS, matching_signatures, plain, scan_bytes, scan_file
from clusterkit.runs.diagnose.signatures import SIGNATURES
from clusterkit.runs.diagnose.signatures.memory import RECOMPUTE
from trainer.config import RunConfig

FOLDER = Path(__file__).parent.parent / "cases" / "diagnose"
CASES = [case for file in sorted(FOLDER.glob("*.yaml")) for case in yaml.safe_load(file.read_text())]
PATTERNS = [(signature.id, pattern) for signature in SIGNATURES for pattern in signature.patterns]
HEALTHY = ("areal_v0.2_master_worker.log", "ray_status_16_nodes.txt", "sglang_0.5.17_startup_ok.log")


@pytest.fixture(scope="module")
def fixtures() -> Path:
    """Folder of the real logs: ../shared/fixtures beside the repository, or that beside $CLUSTERKIT_TEST_DATA."""
    data = os.environ.get("CLUSTERKIT_TEST_DATA")
    folder = Path(data).parent / "fixtures" if data else Path(__file__).parents[3] / "shared" / "fixtures"
    if not folder.is_dir():
        data_is_missing(f"no logs in {folder}")
    return folder


def _log(case: dict[str, Any]) -> bytes:
    return (FOLDER / case["file"]).read_bytes() if "file" in case else case["log"].encode()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_an_excerpt_is_told_as_what_it_is(case: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    log.write_bytes(_log(case))
    findings = diagnose_log(log).findings
    assert [finding.id for finding in findings] == case["finds"]
    first = findings[0]
    assert first.phase == case.get("phase", first.phase)
    proposed = {change.key: change.proposed for change in first.changes}
    assert proposed.items() >= case.get("changes", {}).items()
    assert case.get("says", "") in first.cause
    assert case.get("advises", "") in " ".join(first.advice)
    if "first_change" in case:
        assert first.changes[0].key == case["first_change"]
    assert first.changes or first.advice
    assert all(finding.follows for finding in findings[1:])


def test_every_expression_of_every_signature_has_an_excerpt() -> None:
    lines = [plain(line) for case in CASES for line in _log(case).split(b"\n")]
    unseen = [item for item in PATTERNS if not any(re.search(item[1], line) for line in lines)]
    assert unseen == []


@pytest.mark.parametrize(("identity", "pattern"), PATTERNS)
def test_no_message_is_passed_over_for_want_of_a_word(identity: str, pattern: str) -> None:
    @settings(max_examples=25, deadline=None, database=None)
    @given(st.from_regex(pattern))
    def holds(text: str) -> None:
        assert any(word in text for word in WORDS), text

    holds()


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_logs_are_no_finding(name: str, fixtures: Path) -> None:
    assert diagnose_log(fixtures / "logs" / name).findings == ()


def test_healthy_nvidia_smi_output_is_no_finding(fixtures: Path) -> None:
    for path in sorted((fixtures / "nvidia_smi").iterdir()):
        assert diagnose_log(path).findings == (), path


def test_the_whole_log_of_the_failed_weight_update(fixtures: Path) -> None:
    name = "sglang_0.5.17_startup_and_nccl_update_failure.log"
    [finding] = diagnose_log(fixtures / "logs" / name).findings
    assert (finding.id, finding.phase) == ("nccl-invalid-argument", "weights")
    assert [item.line for item in finding.evidence] == [369]
    assert finding.count == 2


def test_the_steps_of_a_log_are_judged_too(fixtures: Path, tmp_path: Path) -> None:
    text = (fixtures / "logs" / "areal_v0.2_master_worker.log").read_text()
    log = tmp_path / "main.log"
    log.write_text(re.sub(r"'task_reward': [-.\d]+", "'task_reward': -5.0", text))
    [finding] = diagnose_log(log).findings
    assert (finding.id, finding.evidence[0].source) == ("reward-lowest", str(log))
    log.write_text(re.sub(r"'actor_loss': [-.e\d]+", "'actor_loss': nan", text))
    [finding] = diagnose_log(log).findings
    assert (finding.id, finding.changes[0].key) == ("nan-loss", "actor.optimizer.lr")


def test_colour_prefixes_and_repetitions_are_no_hindrance() -> None:
    line = (
        b"(\x1b[36mmaster_worker/0 pid=9, ip=10.0.0.1\x1b[0m) \x1b[31mOSError: [Errno 28] No space left on device"
        b"\x1b[0m [repeated 7x across cluster]\r"
    )
    [hit] = scan_bytes(line, "x").hits
    assert (hit.signature.id, hit.evidence.text) == ("disk-full", "OSError: [Errno 28] No space left on device")


def test_the_phase_is_that_of_the_traceback() -> None:
    log = """20250222-11:53:02.760 master worker ERROR: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
Traceback (most recent call last):
  File "/code/trainer/loop.py", line 133, in _step
    batch, stats = self._learn(groups, number)
  File "/code/trainer/train/learner.py", line 90, in step
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""
    hits = scan_bytes(log.encode(), "x").hits
    assert [(hit.phase, hit.from_traceback) for hit in hits] == [("", False), ("train", True)]


def test_only_lines_since_the_attempt_count() -> None:
    log = b"""20250222-11:53:02.760 master worker ERROR: OSError: [Errno 28] No space left on device
OSError: [Errno 28] No space left on device
20250222-12:00:00.000 master worker INFO: Dumped recover info to file.
"""
    assert len(scan_bytes(log, "x").hits) == 2
    assert scan_bytes(log, "x", since="20250222-12:00:00").hits == []


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from([b"NCCL ", b"Traceback (most recent call last)", b"  File "]))
    )
)
def test_junk_does_no_harm(pieces: list[bytes]) -> None:
    scan_bytes(b"\n".join(pieces), "x")


def test_a_huge_line_and_many_hits_take_no_long_time() -> None:
    line = b"CUDA out of memory " * 12_000  # 228 KB
    many = b"Traceback (most recent call last)\n" + b"  File x NCCL error in: y\n" * 20_000
    began = time.process_time()
    scan_bytes(line + b"\n" + many, "x")
    # Quadratic behaviour would take minutes.
    assert time.process_time() - began < 30


def test_a_line_is_known_to_what_it_says_only() -> None:
    assert [signature.id for signature in matching_signatures("NVRM: Xid (PCI:0000:07:00): 79, pid=1")] == [
        "gpu-broken"
    ]
    assert list(matching_signatures("NVRM: Xid (PCI:0000:07:00): 31, a fault of a program")) == []


def test_the_documentation_names_every_finding() -> None:
    text = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    known_ids = [signature.id for signature in SIGNATURES] + ["stall"]
    known_ids += [check.__name__.replace("_", "-") for check in CHECKS]
    assert [identity for identity in known_ids if f"`{identity}`" not in text] == []


def test_of_a_very_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    """A terabyte, most of it a hole: nobody reads that within a test."""
    log, error = tmp_path / "main.log", b"OSError: [Errno 28] No space left on device\n"
    log.write_bytes(b"begun\n" * 7 + b"x" * 100 + b"\n" + error)
    [hit] = scan_file(log, read_bytes=60).hits
    assert (hit.signature.id, hit.evidence.line) == ("disk-full", 9)
    with log.open("r+b") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + error)
    [hit] = scan_file(log).hits
    assert (hit.signature.id, hit.evidence.line) == ("disk-full", 0)


@pytest.mark.parametrize(
    ("kept", "proposed"),
    [("none", "full"), ("selective", "full"), ("full", "chunked"), ("chunked", "offloaded"), ("offloaded", None)],
)
def test_activations_are_kept_in_less_memory_step_by_step(kept: str, proposed: str | None) -> None:
    config = RunConfig.model_validate({"model": {"gradient_checkpointing": kept}})

    changes = propose((RECOMPUTE,), Context(config=config))

    assert [change.proposed for change in changes] == ([proposed] if proposed else [])
