"""`clusterkit diagnose`: find out what went wrong, print it, and keep what shall change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterkit.backends.base import Backend
from clusterkit.backends.records import Runs, errors_with_original_paths
from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import place_of_run
from clusterkit.cli.runoptions import RunOptions
from clusterkit.runs.diagnose.applied import apply_changes, overrides_file
from clusterkit.runs.diagnose.run import Diagnosis, diagnose_log, diagnose_run, train_command
from clusterkit.runs.diagnose.view import diagnosis_lines
from clusterkit.ui import output
from trainer.errors import RunError


def diagnose(run: RunOptions, log: str | None, *, as_json: bool, apply: bool) -> None:
    """Diagnose a run or a log by itself."""
    if log is not None:
        run.require_no_run(*(["--apply"] if apply else []))
        _show_log(diagnose_log(Path(log) if log == "-" else Path(log).expanduser()), as_json)
        return
    with open_backend(place_of_run(run), output.note) as backend:
        runs = backend.runs()
        diagnosis = diagnose_run(runs.find(run.experiment, run.trial, logs=True))
        with errors_with_original_paths(runs):
            shown = _apply(diagnosis, backend, runs) if apply else (diagnosis.as_dict(), diagnosis_lines(diagnosis))
        facts, lines = runs.with_original_paths(shown)
        output.outcome("\n".join(lines), facts, as_json=as_json)


def _show_log(diagnosis: Diagnosis, as_json: bool) -> None:
    """Print what was found in a log by itself; one of no known kind is an error."""
    if as_json or not diagnosis.is_unknown:
        output.outcome("\n".join(diagnosis_lines(diagnosis)), diagnosis.as_dict(), as_json=as_json)
    if diagnosis.is_unknown:
        notes = "".join(f" ({note})" for note in diagnosis.notes)
        raise RunError(
            f"{diagnosis.looked_at[0]} is no log of a kind that is known here{notes}: AReaL's and clusterkit's, those "
            "of SGLang, vLLM, Ray, PyTorch and Python, of NVIDIA's tools and of Linux. Nothing that is known to go "
            "wrong was found in it"
        )


def _apply(diagnosis: Diagnosis, backend: Backend, runs: Runs) -> tuple[dict[str, Any], list[str]]:
    """Write the changed settings beside the run; what to print of it."""
    run = diagnosis.run
    assert run is not None  # a log by itself is refused before
    if diagnosis.state in ("running", "stalled"):
        raise RunError(
            f"{run.name} is {diagnosis.state}: a trainer takes settings at its start only. "
            f"Stop it first (clusterkit stop {backend.words(run)}{'' if backend.where else ', or Ctrl-C'}), "
            "then repeat this command"
        )
    if diagnosis.is_complete and diagnosis.for_new_trial:
        command = (
            diagnosis.new_trial(diagnosis.for_new_trial) or "add what `clusterkit diagnose` says and trial_name=NEW"
        )
        raise RunError(
            f"{run.name} is complete: nothing is left to train, and nothing was applied. For a new trial: {command}"
        )
    if not diagnosis.applicable:
        new = ", ".join(f"{change.key}={change.proposed}" for change in diagnosis.for_new_trial)
        reason = f"{new} needs a new trial" if new else "nothing that was found is mended by a setting"
        raise RunError(f"there is nothing to apply: {reason}. What was found: leave out --apply")
    applied = apply_changes(run, diagnosis.applicable)
    runs.put(run, overrides_file(run).name, overrides_file(run).read_text(encoding="utf-8"))
    command = train_command(run, diagnosis.config, [])
    written = [{"key": item.key, "was": item.was, "now": item.now, "because": item.because} for item in applied]
    lines = [
        f"{overrides_file(run)} now says",
        *(f"  {item.key}: {item.was} → {item.now} ({item.because})" for item in applied),
    ]
    lines.append(f"Go on with: {command or 'the same `clusterkit train` command as before'}")
    return {"file": str(overrides_file(run)), "overrides": written, "command": command or None}, lines
