"""`clusterkit diagnose`: find out what went wrong, print it, and keep what shall change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterkit.cli.actions.target import RUNS, cluster_of_run, folder_of_runs
from clusterkit.runs.diagnose.applied import apply_changes, overrides_file
from clusterkit.runs.diagnose.run import Diagnosis, diagnose_log, diagnose_run, train_command
from clusterkit.runs.diagnose.view import diagnosis_lines
from clusterkit.runs.status import find_run
from clusterkit.ui import output
from trainer.errors import RunError, UserError

if TYPE_CHECKING:
    from clusterkit.backends.ray.sync_mirror import Mirror


def diagnose(
    experiment: str | None,
    trial: str | None,
    fileroot: str | None,
    cluster: str | None,
    here: bool,
    log: str | None,
    *,
    as_json: bool,
    apply: bool,
) -> None:
    """Diagnose a run or a log by itself; with `apply`, keep the settings that it proposes."""
    if log is not None:
        if apply or experiment or trial or cluster:
            raise UserError("--log FILE is diagnosed by itself: leave out --apply, --experiment, --trial and --cluster")
        _show_log(diagnose_log(Path(log) if log == "-" else Path(log).expanduser()), as_json)
        return
    cluster = cluster_of_run(cluster, here, fileroot, experiment, trial)
    if cluster is None:
        _show(diagnose_run(find_run(folder_of_runs(fileroot), experiment, trial)), apply, as_json)
    else:
        from clusterkit.backends.ray.sync_mirror import mirror_of  # noqa: PLC0415 (asyncssh, only for runs of a cluster)

        with mirror_of(cluster, fileroot or RUNS) as mirror:
            _show(diagnose_run(mirror.find(experiment, trial, logs=True)), apply, as_json, mirror)


def _show_log(diagnosis: Diagnosis, as_json: bool) -> None:
    """Print what was found in a log by itself; one of no known kind is an error."""
    if as_json or not diagnosis.is_unknown:
        _show(diagnosis, False, as_json)
    if diagnosis.is_unknown:
        notes = "".join(f" ({note})" for note in diagnosis.notes)
        raise RunError(
            f"{diagnosis.looked_at[0]} is no log of a kind that is known here{notes}: AReaL's and clusterkit's, those "
            "of SGLang, vLLM, Ray, PyTorch and Python, of NVIDIA's tools and of Linux. Nothing that is known to go "
            "wrong was found in it"
        )


def _show(diagnosis: Diagnosis, apply: bool, as_json: bool, mirror: Mirror | None = None) -> None:
    """Print it, or apply it. mirror: where the run really is."""
    try:
        shown = _apply(diagnosis, mirror) if apply else (diagnosis.as_dict(), diagnosis_lines(diagnosis))
    except UserError as error:
        if mirror is None:
            raise
        raise type(error)(mirror.told(str(error))) from None
    facts, lines = mirror.told(shown) if mirror else shown
    if as_json:
        output.result_json(facts)
    else:
        output.result("\n".join(lines))


def _apply(diagnosis: Diagnosis, mirror: Mirror | None) -> tuple[dict[str, Any], list[str]]:
    """Write the changed settings beside the run; what to print of it."""
    run = diagnosis.run
    assert run is not None  # a log by itself is refused before
    if diagnosis.state in ("running", "stalled"):
        raise RunError(
            f"{run.experiment}/{run.trial} is {diagnosis.state}: a trainer takes settings at its start only. "
            f"Stop it first (clusterkit stop{f' --cluster {mirror.cluster.name}' if mirror else ', or Ctrl-C'}), "
            "then repeat this command"
        )
    if not diagnosis.applicable:
        new = ", ".join(f"{change.key}={change.proposed}" for change in diagnosis.for_new_trial)
        reason = f"{new} needs a new trial" if new else "nothing that was found is mended by a setting"
        raise RunError(f"there is nothing to apply: {reason}. What was found: leave out --apply")
    applied = apply_changes(run, diagnosis.applicable)
    if mirror is not None:
        mirror.put(run, overrides_file(run).name, overrides_file(run).read_text(encoding="utf-8"))
    command = train_command(run, diagnosis.config, [])
    written = [{"key": item.key, "was": item.was, "now": item.now, "because": item.because} for item in applied]
    lines = [
        f"{overrides_file(run)} now says",
        *(f"  {item.key}: {item.was} → {item.now} ({item.because})" for item in applied),
    ]
    lines.append(f"Go on with: {command or 'the same `clusterkit train` command as before'}")
    return {"file": str(overrides_file(run)), "overrides": written, "command": command or None}, lines
