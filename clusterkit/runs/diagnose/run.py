"""Diagnose a run from its directory, or any log by itself."""

from __future__ import annotations

import calendar
import json
import os
import re
import shlex
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clusterkit.common.text_plot import size
from clusterkit.config.fields import fields, setting_text
from clusterkit.config.resolve import resolve
from clusterkit.runs.diagnose.applied import read_applied
from clusterkit.runs.diagnose.changes import Context, propose
from clusterkit.runs.diagnose.checks import check_numbers
from clusterkit.runs.diagnose.details import disk_details, memory_details
from clusterkit.runs.diagnose.logged_settings import LoggedSettings
from clusterkit.runs.diagnose.model import BAD, Cause, Change, Evidence, Hit
from clusterkit.runs.diagnose.scan import (
    SHOWN_CHARACTERS,
    Scan,
    matching_signatures,
    scan_bytes,
    scan_file,
    shift_lines,
)
from clusterkit.runs.diagnose.signatures import SIGNATURES
from clusterkit.runs.diagnose.speed import check_speed
from clusterkit.runs.diagnose.stall import stall_cause
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.metrics import History, number
from clusterkit.runs.log.reader import cache_folder, log_reader
from clusterkit.runs.log.stream import StreamReader
from clusterkit.runs.status import Status, observe
from clusterkit.runs.trials import saved_config
from trainer.config import RunConfig, flatten
from trainer.errors import RunError, UserError

LOG_BYTES, STREAM_BYTES = 64 * 1024 * 1024, 16 * 1024 * 1024
"""Size of the end of a log that `diagnose --log` reads; the latter if that end has to be kept in memory."""

ZONE_BYTES, ZONE_STEP = 1 << 20, 900
"""Size of the end of a log in which a step is looked for that tells its time zone, in steps of so many seconds."""
_STAMP = "%Y%m%d-%H:%M:%S"
_STEP_LINE = re.compile(rb"^(\d{8}-\d\d:\d\d:\d\d)[^\n]*\(global step (\d+)\) finishes", re.MULTILINE)
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Warning|Exit|Interrupt)\b")
_KILLED = next(signature for signature in SIGNATURES if signature.id == "killed")
_FULL = next(signature for signature in SIGNATURES if signature.id == "disk-full")
FULL_BYTES = 1 << 20
"""With less than this free, not even a tiny run's checkpoint fits on a disk."""


@dataclass(frozen=True)
class Diagnosis:
    """The result, causes before consequences."""

    findings: tuple[Cause, ...]
    state: str = ""  # of the run; empty for a log without a run
    message: str = ""
    run: RunDirectory | None = None
    config: RunConfig | None = None
    looked_at: tuple[str, ...] = ()  # the files that were read
    notes: tuple[str, ...] = ()  # on reading a log without a run
    kind: str = ""  # the program that wrote that log; empty if unknown
    empty: bool = False  # whether that log is empty

    @property
    def is_unknown(self) -> bool:
        """Whether it is of a log without a run whose kind is unknown, so that nothing can be said about it."""
        return self.run is None and not (self.findings or self.kind or self.empty)

    @property
    def is_complete(self) -> bool:
        """Whether it is of a run that has nothing left to train."""
        return self.state == "finished"

    def new_trial(self, changes: list[Change]) -> str:
        """The command of a new trial with changed settings; empty if the run's cannot be rebuilt."""
        return train_command(self.run, self.config, changes, trial=f"{self.run.trial}-2") if self.run else ""

    @property
    def applicable(self) -> list[tuple[Change, str]]:
        """The changes that `--apply` writes: one for each cause, with its reason. None for a complete run."""
        chosen: dict[str, tuple[Change, str]] = {}
        for finding in () if self.is_complete else self.findings:
            change = finding.applicable
            if change is not None:
                chosen.setdefault(change.key, (change, finding.id + (f", {finding.phase}" if finding.phase else "")))
        return list(chosen.values())

    @property
    def is_applied(self) -> bool:
        """Whether all of these are applied already, and wait for the next attempt."""
        if self.run is None:
            return False
        try:
            waiting = {item.key: item.now for item in read_applied(self.run)}
        except UserError:
            return False
        return all(waiting.get(change.key) == change.proposed for change, _ in self.applicable)

    @property
    def for_new_trial(self) -> list[Change]:
        """The first change of every cause that needs a new trial, as all do of a complete run."""
        chosen: dict[str, Change] = {}
        for finding in self.findings:
            first = next((change for change in finding.changes if change.kind == "setting"), None)
            if first is not None and (first.new_trial or self.is_complete) and not finding.follows:
                chosen.setdefault(first.key, first)
        return list(chosen.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the shape of --json."""
        return {
            "experiment": self.run.experiment if self.run else None,
            "trial": self.run.trial if self.run else None,
            "state": self.state or None,
            "message": self.message or None,
            "findings": [finding.as_dict() for finding in self.findings],
            "applicable": [asdict(change) for change, _ in self.applicable],
            "looked_at": list(self.looked_at),
            "kind": self.kind or None,
            "notes": list(self.notes),
        }


def diagnose_run(run: RunDirectory, observed: Status | None = None, killed: bool = False) -> Diagnosis:
    """Diagnose a run's latest attempt.

    Args:
        observed: its status, if it is known already.
        killed: SIGKILL ended the trainer, which no log can say.
    """
    status = observed or observe(run, time.time())
    history, config = status.history, saved_config(run)
    learned = bool(history.steps) or run.has_recover_checkpoint or run.keeps_supervised
    scans = _scan_attempt(run, history)
    context = Context(config, _logged_settings(scans), os.environ, learned)
    ended = status.message if status.state in ("failed", "killed") else ""
    hits = [hit for scan in scans for hit in scan.hits]
    hits += _hits_of(ended, {hit.signature.id for hit in hits})
    # Not so for the copy of a run on other machines.
    own_disks = config is None or Path(config.fileroot).absolute() == run.fileroot
    if status.state in BAD and own_disks and not any(hit.signature.id == _FULL.id for hit in hits):
        hits += _full_disks(run)
    findings = _findings(hits, context)
    if (killed or status.state == "killed") and not any(
        f.id in ("killed", "crashed", "host-memory", "gpu-memory") for f in findings
    ):
        evidence = Evidence("the trainer", 0, "ended by SIGKILL" if killed else status.message)
        [finding] = _findings([Hit(_KILLED, evidence, "", evidence.text)], context)
        findings.append(finding if killed else replace(finding, title="The trainer ended without a message"))
    if status.state == "stalled":
        last = next((scan for scan in scans if scan.source.endswith("main.log")), None)
        phase, line = (last.last_phase, last.last_line) if last else ("", None)
        findings.append(stall_cause(status.holder, status.silence, history.step_time(), phase, line))
    if status.state in BAD and all(finding.follows for finding in findings):
        findings += _unknown_error(scans) or _own_message(Evidence("the run's last message", 0, ended))
    findings += check_numbers(history, context)
    if not killed and status.state not in BAD:
        findings += check_speed(history, context)
    sources = (*(scan.source for scan in scans), str(run.metrics))
    return Diagnosis(_in_order(findings), status.state, status.message, run, config, sources)


def diagnose_log(path: Path) -> Diagnosis:
    """Diagnose a log without a run: of AReaL, an engine server, Ray or nvidia-smi.

    Raises:
        UserError: the log is missing, is no file, or may not be read.
        RunError: the disk fails.
    """
    reader = log_reader(path, cache_folder(), keep=STREAM_BYTES)
    view = reader.refresh()
    try:
        if isinstance(reader, StreamReader):
            text = reader.text
            scan = scan_bytes(bytes(text.kept), view.name, skipped=text.skipped_bytes)
            scan = shift_lines(scan, text.skipped_lines)
        else:
            scan = scan_file(path, "", LOG_BYTES)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from None
    context = Context(None, scan.logged)
    numbers = [
        replace(finding, evidence=tuple(replace(item, source=scan.source) for item in finding.evidence))
        for finding in check_numbers(view.history, context)
    ]
    findings = _findings(scan.hits, context)
    explained = any(not finding.follows for finding in findings) or (numbers and not scan.fatal)
    findings += [] if explained else _unknown_error([scan]) or _own_message(scan.message)
    read = f"{scan.source} (without its first {scan.skipped_bytes} bytes)" if scan.skipped_bytes else scan.source
    found = _in_order([*findings, *numbers])
    return Diagnosis(found, looked_at=(read,), notes=view.notes, kind=view.kind, empty=not view.size)


def train_command(run: RunDirectory, config: RunConfig | None, changes: list[Change], trial: str = "") -> str:
    """Rebuild a run's `clusterkit train` command from its configuration, with changed settings; empty if impossible.

    Args:
        trial: name of a new trial; its command also has the settings that were applied to this run.
    """
    if config is None or not config.preset:
        return ""
    try:
        # Fields of an agent or reward that the preset does not use have their defaults there.
        defaults = {key: field.default for key, field in fields().items()}
        plain = defaults | flatten(resolve(config.preset, config.task.name).config)
        applied = {} if trial else {item.key: item.was for item in read_applied(run)}
    except UserError:
        return ""
    values = {**flatten(config), **applied, "trial_name": trial or run.trial}
    values.update((change.key, change.proposed) for change in changes)
    # Submission to a cluster sets the latter two.
    set_otherwise = {"preset", "task.name", "fileroot", "experiment_name"}
    set_otherwise |= {"mode", "cache_dir"} if config.mode == "ray" else set()
    changed = {change.key for change in changes}  # typed where they are the preset's, too: they were announced
    typed = [
        f"{key}={setting_text(value)}"
        for key, value in values.items()
        if key not in set_otherwise and (plain[key] != value or key in changed)
    ]
    if run.experiment != plain["experiment_name"]:
        typed.append(f"experiment_name={run.experiment}")
    words = ["clusterkit", "train", "--preset", config.preset, "--task", config.task.name]
    return shlex.join([*words, "--fileroot", str(run.fileroot), *typed])


def diagnose_command(run: RunDirectory, *options: str) -> str:
    """Return the command that diagnoses this run."""
    words = ["clusterkit", "diagnose", run.name]
    return shlex.join([*words, "--fileroot", str(run.fileroot), *options])


def _scan_attempt(run: RunDirectory, history: History) -> list[Scan]:
    """Scan the logs of the latest attempt; of main.log, which has all attempts, what was written since its start."""
    numbers = run.attempt_numbers()
    folder = run.logs / f"attempt_{numbers[-1]}" if numbers else None
    scans = []
    if folder is not None:
        scans += [_scan(path) for path in sorted(folder.rglob("*.log"))]
    since = _attempt_start(history, folder) if len(numbers) > 1 else None  # of one attempt all lines are its own
    scans += [_scan(path, _stamp(path, since, history) if since else "") for path in sorted(run.logs.glob("*.log"))]
    return [scan for scan in scans if scan is not None]


def _stamp(log: Path, moment: float, history: History) -> str:
    """Return the time stamp that a log has at a moment: that of a run on a cluster goes by the time zone there.

    It is told by a step that both the log and the records have; without one this machine's zone is taken.
    """
    recorded = {step.get("global_step"): number(step, "time") for step in history.steps}
    with suppress(OSError, ValueError), log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - ZONE_BYTES, 0))
        for stamp, step in reversed(_STEP_LINE.findall(file.read())):
            if (written := recorded.get(int(step))) is not None:
                logged = calendar.timegm(time.strptime(stamp.decode(), _STAMP))
                ahead = round((logged - written) / ZONE_STEP) * ZONE_STEP
                return time.strftime(_STAMP, time.gmtime(moment + ahead))
    return time.strftime(_STAMP, time.localtime(moment))


def _scan(path: Path, since: str = "") -> Scan | None:
    try:
        return scan_file(path, since)
    except OSError:
        return None


def _attempt_start(history: History, folder: Path | None) -> float | None:
    """Return when the latest attempt began: its folder is made first, its first record comes after the warm-up."""
    if folder is None:
        return None
    try:
        made = folder.stat().st_mtime
    except OSError:
        return None
    own = [
        number(record, "time") for record in history.attempts[-1:] if f"attempt_{record.get('attempt')}" == folder.name
    ]
    marked = None
    with suppress(OSError, ValueError, AttributeError):  # an attempt of a cluster writes to its folder at its end
        marked = number(json.loads((folder / "exit.json").read_text(encoding="utf-8")), "began")
    return min(moment for moment in (made, marked, *own) if moment is not None)


def _logged_settings(scans: list[Scan]) -> LoggedSettings:
    logged = LoggedSettings()
    for scan in scans:
        logged.values.update(scan.logged.values)
    return logged


def _findings(hits: list[Hit], context: Context) -> list[Cause]:
    by_id: dict[str, list[Hit]] = {}
    for hit in hits:
        by_id.setdefault(hit.signature.id, []).append(hit)
    return [_finding(group, context) for group in by_id.values() if not set(group[0].signature.unless) & by_id.keys()]


def _finding(hits: list[Hit], context: Context) -> Cause:
    signature = hits[0].signature
    # The frames of a traceback are surer than what was logged before it.
    phases = [hit.phase for hit in hits if hit.from_traceback] or [hit.phase for hit in hits if hit.phase]
    phase = phases[-1] if phases else ""
    case = signature.case(phase)
    ends = hits[:1] if hits[0].evidence.text == hits[-1].evidence.text else [hits[0], hits[-1]]
    finding = Cause(
        signature.id,
        signature.title,
        case.cause,
        phase,
        tuple(hit.evidence for hit in ends),
        len(hits),
        propose(case.rules, context),
        case.advice,
        signature.follows,
        signature.together,
    )
    if signature.id == "disk-full":
        return disk_details(finding, "\n".join(hit.text for hit in hits))
    return memory_details(finding, hits[-1].text) if signature.id == "gpu-memory" else finding


def _hits_of(message: str, seen: set[str]) -> list[Hit]:
    """Match the message that a run ended with; its logs may be on the very disk that is full."""
    lines = [(line, signature) for line in message.splitlines() for signature in matching_signatures(line)]
    return [
        Hit(signature, Evidence("the run's last message", 0, line.strip()[:SHOWN_CHARACTERS]), "", line)
        for line, signature in lines
        if signature.id not in seen
    ]


def _full_disks(run: RunDirectory) -> list[Hit]:
    """Return a hit for every disk of the run that is full now: a trainer cannot always log that."""
    hits = []
    for folder in (run.logs, run.checkpoints, run.recover):
        with suppress(OSError):
            disk = shutil.disk_usage(folder)
            if disk.free < FULL_BYTES:
                text = f"{size(disk.free)} of {size(disk.total)} are free"
                hits.append(Hit(_FULL, Evidence(str(folder), 0, text), "", text))
    return hits


def _is_known(text: str) -> bool:
    return any(next(matching_signatures(line), None) for line in text.splitlines())


def _own_message(last: Evidence | None) -> list[Cause]:
    """Return the message that a run or a command ended with as a cause: ours say what is wrong and what to do."""
    if last is None or not last.text.strip() or _is_known(last.text):
        return []
    first, *rest = last.text.strip().splitlines()
    if _EXCEPTION.match(first):
        title, cause = "An error that is not known here ended it", f"{first}. Its traceback, if any, is in main.log."
        return [Cause("unknown-error", title, cause, evidence=(last,), advice=("main.log of the run's folder",))]
    cause = "\n           ".join([first, *rest])
    return [Cause("own-message", "It ended with a message that says why", cause, evidence=(replace(last, text=""),))]


def _unknown_error(scans: list[Scan]) -> list[Cause]:
    """Return the traceback that ends a log, else the last one in it, as a cause, unless a signature explains it."""
    with_error = sorted((scan for scan in scans if scan.error), key=lambda scan: not scan.fatal)
    scan = with_error[0] if with_error else None
    if scan is None or scan.error is None or _is_known(scan.error.text):
        return []
    return [
        Cause(
            "unknown-error",
            f"An error that is not known here {'ended it' if scan.fatal else 'was printed on the way'}",
            f"{scan.error.text.splitlines()[-1].strip()}. The code that its traceback names says what that means.",
            evidence=(scan.error,),
            advice=("read the whole traceback in the log; the line before its last names the code that failed",),
        )
    ]


def _in_order(findings: list[Cause]) -> tuple[Cause, ...]:
    """Sort causes before consequences. What usually follows from something else is a cause if it is alone."""
    order = {signature.id: place for place, signature in enumerate(SIGNATURES)}
    causes = [finding for finding in findings if not finding.follows]
    follows = [finding if causes else replace(finding, follows=False) for finding in findings if finding.follows]
    return tuple(sorted([*causes, *follows], key=lambda item: (item.follows, order.get(item.id, len(order)))))
