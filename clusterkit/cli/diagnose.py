"""`clusterkit diagnose`: why a run failed, stands still or does not learn, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clusterkit.cli import output

if TYPE_CHECKING:
    from clusterkit.diagnose.run import Diagnosis

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def diagnose(
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str = typer.Option("runs", "--fileroot", help="Folder under which runs are."),
    log: str | None = typer.Option(None, "--log", help="Any log by itself: of AReaL, SGLang, vLLM or Ray."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    apply: bool = typer.Option(
        False, "--apply", help="Keep the proposed settings beside the run, for the same train command to pick up."
    ),
) -> None:
    """Say why a run failed, stands still or does not learn, and which setting to change.

    Changes nothing unless --apply is given.
    """
    from clusterkit.diagnose.run import diagnose_log, diagnose_run  # noqa: PLC0415
    from clusterkit.diagnose.view import diagnosis_lines  # noqa: PLC0415
    from clusterkit.status import find_run  # noqa: PLC0415
    from trainer.errors import UserError  # noqa: PLC0415

    if log is not None:
        if apply or experiment or trial:
            raise UserError("--log FILE is diagnosed by itself: leave out --apply, --experiment and --trial")
        diagnosis = diagnose_log(Path(log).expanduser())
    else:
        diagnosis = diagnose_run(find_run(Path(fileroot).expanduser().absolute(), experiment, trial))
    if apply:
        _apply(diagnosis, as_json)
    elif as_json:
        output.result_json(diagnosis.as_dict())
    else:
        output.result("\n".join(diagnosis_lines(diagnosis)))


def _apply(diagnosis: Diagnosis, as_json: bool) -> None:
    from clusterkit.diagnose.applied import apply_changes, overrides_file  # noqa: PLC0415
    from clusterkit.diagnose.run import train_command  # noqa: PLC0415
    from trainer.errors import RunError  # noqa: PLC0415

    run = diagnosis.run
    if run is None:
        return
    if diagnosis.state in ("running", "stalled"):
        raise RunError(
            f"{run.experiment}/{run.trial} is {diagnosis.state}: a trainer takes settings at its start only. "
            "Stop it first (Ctrl-C, or kill PID), then repeat this command"
        )
    if not diagnosis.applicable:
        new = ", ".join(f"{change.key}={change.proposed}" for change in diagnosis.for_new_trial)
        reason = f"{new} needs a new trial" if new else "nothing that was found is mended by a setting"
        raise RunError(f"there is nothing to apply: {reason}. What was found: leave out --apply")
    applied = apply_changes(run, diagnosis.applicable)
    command = train_command(run, diagnosis.config, [])
    if as_json:
        written = [{"key": item.key, "was": item.was, "now": item.now, "because": item.because} for item in applied]
        output.result_json({"file": str(overrides_file(run)), "overrides": written, "command": command or None})
        return
    lines = [
        f"{overrides_file(run)} now says",
        *(f"  {item.key}: {item.was} → {item.now} ({item.because})" for item in applied),
    ]
    lines.append(f"Go on with: {command or 'the same `clusterkit train` command as before'}")
    output.result("\n".join(lines))
