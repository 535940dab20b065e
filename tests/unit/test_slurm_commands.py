"""What is told when one of Slurm's commands fails. A script stands in for squeue: a real one fails by its network."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterkit.backends.slurm.submit import sbatch
from clusterkit.runs.slurm.commands import SlurmError, slurm
from trainer.errors import UserError

LOST = "Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            [LOST, LOST],
            f"squeue failed: {LOST}\nscontrol ping shows whether Slurm's controller answers; then give the command "
            "again",
        ),
        (["Invalid user: nobody"], "squeue failed: Invalid user: nobody"),
        ([], "squeue failed: exit code 1"),
        (
            ["fetch_config: failed", "Could not establish a configuration source"],
            "squeue failed: fetch_config: failed; Could not establish a configuration source\nSlurm's programs are "
            "here, but not its configuration: give the command on the cluster's login node",
        ),
    ],
    ids=["lost", "refused", "silent", "not configured"],
)
def test_slurms_own_message_is_told_once_with_what_to_do(
    printed: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"echo 'squeue: error: {line}' >&2\n" for line in printed)
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{lines}exit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    with pytest.raises(SlurmError) as failed:
        slurm(["squeue"])
    assert str(failed.value) == said


@pytest.mark.parametrize(("printed", "exit_code"), [(LOST, 1), ("invalid partition specified: gpu", 2)])
def test_a_controller_that_does_not_answer_is_no_refused_job(
    printed: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: error: {printed}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    with pytest.raises(UserError, match=printed[:10]) as failed:
        sbatch((), tmp_path / "job.sbatch")
    assert failed.value.exit_code == exit_code
    assert ("sbatch refused the job" in str(failed.value)) == (exit_code == 2)
