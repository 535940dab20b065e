"""What was typed behind `clusterkit train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clusterkit.cli.runoptions import RunOptions


@dataclass(frozen=True)
class TrainOptions:
    """A `train` command.

    Attributes:
        overrides: KEY=VALUE words.
        task: its name; None for the preset's own.
        run: what the options say about the place.
        slurm_options: fields of `SlurmOptions`.
        recover_from: the run or folder to start from.
        shown: whether progress is shown.
    """

    overrides: list[str]
    preset: str | None
    task: str | None
    run: RunOptions
    slurm: bool
    slurm_options: dict[str, Any]
    recover_from: str | None
    dry_run: bool
    detach: bool
    as_json: bool
    shown: bool

    @property
    def settings(self) -> list[str]:
        """The KEY=VALUE words, --fileroot among them."""
        place = [] if self.run.fileroot is None else [f"fileroot={self.run.fileroot}"]
        return [*self.overrides, *place]
