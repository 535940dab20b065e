"""A diagnosis as text, and the short form that other commands print below a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clusterkit.config.fields import setting_text
from clusterkit.runs.diagnose.model import BAD, PHASE_NAMES, Cause, Change, Evidence
from clusterkit.runs.diagnose.run import Diagnosis, diagnose_command, diagnose_run, train_command
from clusterkit.runs.diagnose.signatures import SIGNATURES
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.tail import failure_message
from clusterkit.runs.status import Status

_STATES = {
    "new": "has not begun",
    "unreadable": "cannot be read",
    "pending": "waits in the queue",
    "running": "is running",
    "stalled": "has stalled",
    "finished": "is finished",
    "interrupted": "was interrupted",
    "failed": "failed",
    "killed": "was killed",
}
_TAGS = {"areal": "AReaL's option", "environment": "environment variable"}


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """Return all that was found, and what to type next."""
    lines = []
    run = diagnosis.run
    if run is not None:
        message = diagnosis.message.splitlines()[0] if diagnosis.message else ""
        # Messages of runs that were stopped begin with that word themselves.
        apart = " " if message.startswith(f"{diagnosis.state} ") else ": "
        more = f"{apart}{message.removeprefix(f'{diagnosis.state} ')}" if message else ""
        lines += [f"{run.name} {_STATES.get(diagnosis.state, diagnosis.state)}{more}", ""]
    lines += [f"note: {note}" for note in diagnosis.notes]
    if not diagnosis.findings:
        lines.append("Nothing that is known to go wrong was found in")
        lines += [f"  {source}" for source in diagnosis.looked_at]
        return lines
    for number, finding in enumerate(diagnosis.findings, 1):
        lines += [*_finding_lines(finding, number), ""]
    return [*lines, *_next_lines(diagnosis)] if run is not None else lines[:-1]


def explain_failure(run: RunDirectory, killed: bool = False) -> list[str]:
    """Return a few lines about why a run has just failed; none if unknown.

    Never raises: the failure itself must be shown.

    Args:
        killed: SIGKILL ended the trainer.
    """
    try:
        diagnosis = diagnose_run(run, killed=killed)
    except Exception:
        return []
    number = next(iter(reversed(run.attempt_numbers())), 0)
    shown = (failure_message(run.console(number)) or diagnosis.message).removeprefix("error: ").strip().splitlines()[:1]

    def repeats(finding: Cause) -> bool:
        """Whether a finding says no more than the message that is shown anyway, which says what to do itself."""
        return not finding.changes and bool(shown) and all(shown[0] in item.text for item in finding.evidence)

    findings = [finding for finding in diagnosis.findings if finding.changes or finding.advice]
    return _short_lines(diagnosis, [finding for finding in findings if not repeats(finding)])


@dataclass(frozen=True)
class Explanation:
    """Why a run is in a bad way, in short."""

    lines: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()  # without which it ends so again; none where they are applied, or not known


def explain(status: Status) -> Explanation:
    """Explain a run that failed, was killed or is stalled; other runs need none. Never raises."""
    if status.state not in BAD:
        return Explanation()
    try:
        diagnosis = diagnose_run(status.run, status)
        # Its own message is shown with the run's state.
        others = [finding for finding in diagnosis.findings if finding.id != "own-message"]
        return Explanation(tuple(_short_lines(diagnosis, others)), _needed(diagnosis))
    except Exception:
        return Explanation()


def _needed(diagnosis: Diagnosis) -> tuple[Change, ...]:
    """The changes that a run's last message asks for; its numbers may want others, but did not end it."""
    first = next(iter(diagnosis.findings), None)
    if diagnosis.config is None or diagnosis.is_applied or first is None or first.applicable is None:
        return ()
    if first.id not in {signature.id for signature in SIGNATURES}:
        return ()
    return tuple(change for change in first.changes if change.applicable) if first.together else (first.applicable,)


def findings_of(status: Status) -> list[dict[str, Any]]:
    """Return the findings of a run that failed, was killed or is stalled, for --json. Never raises."""
    if status.state not in BAD:
        return []
    try:
        return [finding.as_dict() for finding in diagnose_run(status.run, status).findings]
    except Exception:
        return []


def change_text(change: Change) -> str:
    """Return `train.max_tokens_per_mb: 16384 → 8192`, with the kind of the setting if it is not ours."""
    proposed = setting_text(change.proposed)
    value = f"{setting_text(change.now)} → {proposed}" if change.now is not None else proposed
    text = f"{change.key}: {value}"
    tags = [_TAGS[change.kind]] if change.kind in _TAGS else []
    if change.new_trial:
        tags.append("needs a new trial")
    if change.why:
        tags.append(change.why)
    return f"{text} ({'; '.join(tags)})" if tags else text


def _finding_lines(finding: Cause, number: int) -> list[str]:
    when = f" {PHASE_NAMES[finding.phase]}" if finding.phase else ""
    follows = " [follows from what is above]" if finding.follows else ""
    lines = [f"{number}. {finding.title}{when}{follows}", f"   why     {finding.cause}"]
    seen = f" ({finding.count} times)" if finding.count > 1 else ""
    for item in finding.evidence:
        text = item.text.replace("\n", "\n           ")
        lines.append(f"   seen    {_place(item)}{seen}" + (f"\n           {text}" if text else ""))
    if not finding.follows:
        lines += [
            f"   {'change' if not place else 'and' if finding.together else 'or':<7} {change_text(change)}"
            for place, change in enumerate(finding.changes)
        ]
        lines += [f"   do      {advice}" for advice in finding.advice]
    return lines


def _next_lines(diagnosis: Diagnosis) -> list[str]:
    run, config = diagnosis.run, diagnosis.config
    if run is None:
        return []
    lines = []
    if diagnosis.applicable:
        changes = ", ".join(f"{change.key}={setting_text(change.proposed)}" for change, _ in diagnosis.applicable)
        if diagnosis.is_applied:
            command = train_command(run, config, []) or "the same `clusterkit train` command as before"
            lines.append(f"{changes} is applied already. Go on with: {command}")
        else:
            lines.append(f"To go on with {changes}: {diagnose_command(run, '--apply')}")
    needs = diagnosis.for_new_trial
    if needs:
        command = diagnosis.new_trial(needs) or "add it and trial_name=NEW"
        keys = ", ".join(change.key for change in needs)
        why = "The run is complete" if diagnosis.is_complete else f"{keys} must stay the same while a run goes on"
        lines.append(f"{why}. For a new trial: {command}")
    return lines


def _short_lines(diagnosis: Diagnosis, findings: list[Cause]) -> list[str]:
    lines = []
    for finding in [finding for finding in findings if not finding.follows][:2]:
        when = f" {PHASE_NAMES[finding.phase]}" if finding.phase else ""
        lines.append(f"{finding.title}{when}. {finding.cause}")
        ours = [change for change in finding.changes if change.kind == "setting"]
        first = next(iter([*ours, *finding.changes]), None)
        lines += [f"  change {change_text(first)}"] if first else [f"  {advice}" for advice in finding.advice[:1]]
    if lines and diagnosis.run is not None:
        lines.append(f"  more: {diagnose_command(diagnosis.run)}")
    return lines


def _place(item: Evidence) -> str:
    return f"{item.source}:{item.line}" if item.line else item.source
