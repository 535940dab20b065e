"""`clusterkit train --recover-from`: the settings that the option stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterkit.backends.ray.sync_mirror import mirror_of
from clusterkit.backends.ray.train import order_of
from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.holder import holder_of
from clusterkit.runs.start_from import is_path, require_run_name, settings_for
from clusterkit.runs.status import find_run
from trainer.checkpoint.slots import look
from trainer.errors import UserError


def settings_from(
    source: str, preset: str | None, task: str | None, typed: Sequence[str], cluster: str | None
) -> list[str]:
    """KEY=VALUE words for a run that starts from `EXPERIMENT/TRIAL` or a folder.

    Args:
        source: as typed. preset, task, typed: the command it belongs to. cluster: where it is trained; None: here.

    Raises:
        UserError: the source is none, is being trained, or does not fit. RunError: it is not there, or damaged.

    """
    if cluster is not None:
        return _there(source, preset, task, typed, cluster)
    config = resolve(preset, task, typed).config
    if is_path(source):
        folder = Path(source).expanduser().absolute()
        if not folder.is_dir():
            raise UserError(f"--recover-from {source}: there is no such folder; a run is named EXPERIMENT/TRIAL")
    else:
        run = find_run(Path(config.fileroot), *require_run_name(source))
        _require_idle(run)
        folder = run.recover
    return settings_for(str(folder), config, lambda path: look(Path(path)))


def _there(source: str, preset: str | None, task: str | None, typed: Sequence[str], cluster: str) -> list[str]:
    with mirror_of(cluster) as mirror:
        order, _, _ = order_of(mirror.cluster, preset, task, typed)
        if is_path(source):
            if not source.startswith(f"{mirror.cluster.storage}/"):
                raise UserError(
                    f"--recover-from {source} is not below {mirror.cluster.storage}, which is all that the hosts share"
                )
            folder = source.rstrip("/")
        else:
            run = mirror.find(*require_run_name(source))
            _require_idle(run)
            folder = mirror.told(str(run.recover))
        return settings_for(folder, order.config, mirror.look_at)


def _require_idle(run: RunDirectory) -> None:
    if holder := holder_of(run):
        raise UserError(
            f"--recover-from: {run.experiment}/{run.trial} is being trained now by {holder}, and its recover "
            "checkpoints change. Stop it first (clusterkit stop), or name one of its persistent checkpoints by its path"
        )
