"""`clusterkit train --recover-from`: the settings that the option stands for."""

from __future__ import annotations

from collections.abc import Sequence

from clusterkit.backends.base import Backend
from clusterkit.runs.holder import holder_of
from clusterkit.runs.start_from import is_path, require_run_name, settings_for
from trainer.errors import UserError


def settings_from(
    source: str, backend: Backend, preset: str | None, task: str | None, settings: Sequence[str]
) -> list[str]:
    """KEY=VALUE words for a run that starts from another one, or from a folder.

    Args:
        source: EXPERIMENT/TRIAL or a path, as typed.
        backend: where the run is trained.

    Raises:
        UserError: the source is none, is being trained, or does not fit. RunError: it is not there, or damaged.
    """
    config = backend.request(preset, task, settings).config
    runs = backend.runs(config.fileroot)
    if is_path(source):
        folder = runs.checkpoint_folder(source)
    else:
        run = runs.find(*require_run_name(source))
        if holder := holder_of(run):
            raise UserError(
                f"--recover-from: {run.name} is being trained now by {holder}, and its recover "
                "checkpoints change. Stop it first (clusterkit stop), or name one of its persistent checkpoints by its "
                "path"
            )
        folder = runs.with_original_paths(str(run.recover))
    return settings_for(folder, config, runs.look_at)
