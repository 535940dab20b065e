"""What was typed behind `clusterkit train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clusterkit.cli.runoptions import RunOptions


@dataclass(frozen=True)
class TrainOptions:
    """A `train` command."""

    overrides: list[str]  # KEY=VALUE words
    preset: str | None
    task: str | None  # its name; None for the preset's own
    run: RunOptions  # what the options say about the place
    slurm: bool
    slurm_options: dict[str, Any]  # fields of `SlurmOptions`
    recover_from: str | None  # the run or folder to start from
    dry_run: bool
    detach: bool
    as_json: bool
    shown: bool  # whether progress is shown

    @property
    def settings(self) -> list[str]:
        """The KEY=VALUE words, --fileroot among them."""
        place = [] if self.run.fileroot is None else [f"fileroot={self.run.fileroot}"]
        return [*self.overrides, *place]
