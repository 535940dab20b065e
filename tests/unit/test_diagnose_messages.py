"""Every message with which trainer, evaluation or operator can end is known to `clusterkit diagnose`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from run_writer import RunWriter

from clusterkit.runs.diagnose.model import Cause
from clusterkit.runs.diagnose.run import diagnose_log, diagnose_run
from clusterkit.runs.diagnose.view import diagnosis_lines

ROOT = Path(__file__).parents[2]
SIDES = ("trainer", "evaluation", "clusterkit")
BASES = {"UserError", "RunError"}
VALUE = "7"
"""Stands for whatever a message fills in."""

MEMORY = {"gpu-memory", "host-memory"}
SIGNS = {
    # What a message says -> what it must be told as.
    r"[Nn]o space left": "disk-full",
    r"ran out of memory \(": "gpu-memory",
    r"was written with other settings|does not fit this model": "recover-differs",
    r"there is no whole recover checkpoint": "recover-damaged",
    r"did not come within|could not reach rank 0": "rendezvous",
    r"was not ready after": "server-launch",
}


class Message(NamedTuple):
    """A message of the code, with VALUE for what is filled in."""

    place: str
    side: str
    text: str


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return VALUE


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@cache
def _messages() -> tuple[Message, ...]:
    """Of every place that makes one of our errors for the user, whether it raises it there or hands it on."""
    classes: list[tuple[str, set[str]]] = []
    calls: list[tuple[Path, ast.Call]] = []
    for path in (path for side in SIDES for path in sorted((ROOT / side).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.append((node.name, {_name(base) for base in node.bases}))
            elif isinstance(node, ast.Call) and node.args and _name(node.func)[:1].isupper():
                calls.append((path.relative_to(ROOT), node))
    errors: set[str] = set(BASES)
    while new := {name for name, bases in classes if bases & errors} - errors:
        errors |= new
    # Interruptions are no failures: nothing is to be explained.
    wanted = errors - {"InterruptedRunError"}
    found = [
        Message(f"{place}:{call.lineno}", place.parts[0], _text(call.args[0]))
        for place, call in calls
        if _name(call.func) in wanted
    ]
    return tuple(found)


def _told(message: Message, findings: tuple[Cause, ...], shown: str) -> str:
    """What is wrong with what was told of a message, or ""."""
    if not findings:
        return "nothing is found"
    first = message.text.strip().splitlines()[0]
    ids = {finding.id for finding in findings}
    if first[:200] not in shown:
        return "the message is not shown"
    if wanted := [name for sign, name in SIGNS.items() if re.search(sign, message.text) and name not in ids]:
        return f"{ids} and not {wanted}"
    settings = [change.key for finding in findings if finding.id not in MEMORY for change in finding.changes]
    if memory := [key for key in settings if "batch_tokens" in key or "tokens_per_mb" in key]:
        return f"{memory} are proposed without a sign that memory ran out"
    return ""


def _faults(messages: Iterator[tuple[Message, str]]) -> list[str]:
    return [f"{message.place}: {fault}: {message.text}" for message, fault in messages if fault]


def test_the_messages_are_found() -> None:
    by_side = {side: sum(message.side == side for message in _messages()) for side in SIDES}
    assert by_side["trainer"] > 150
    assert by_side["evaluation"] > 30
    assert by_side["clusterkit"] > 200


def test_a_run_that_ended_with_any_message_of_the_trainer_is_explained(tmp_path: Path) -> None:
    """The console alone has it: of an error before the run, or on a full disk, nothing else is there."""
    writer = RunWriter(tmp_path).attempt().steps(1, 3)

    def each() -> Iterator[tuple[Message, str]]:
        for message in _messages():
            if message.side == "trainer":
                writer.run.console(1).write_text(f"error: {message.text}\n")
                diagnosis = diagnose_run(writer.run)
                assert diagnosis.state == "failed"
                yield message, _told(message, diagnosis.findings, "\n".join(diagnosis_lines(diagnosis)))

    assert _faults(each()) == []


def test_a_message_in_the_records_alone_is_explained(tmp_path: Path) -> None:
    for number, (sign, name) in enumerate(SIGNS.items()):
        message = next(
            message for message in _messages() if re.search(sign, message.text) and message.side == "trainer"
        )
        writer = RunWriter(tmp_path / str(number)).config().attempt().steps(1, 3).finish("failed", 3, message.text)
        assert name in {finding.id for finding in diagnose_run(writer.run).findings}, message


@pytest.mark.parametrize("begin", ["error: ", "20250601-12:00:00.000 master worker ERROR: "])
def test_any_message_is_explained_in_a_log_by_itself(tmp_path: Path, begin: str) -> None:
    """What a command printed, into a file or through Ray, and main.log."""
    log = tmp_path / "some.log"

    def each() -> Iterator[tuple[Message, str]]:
        for message in _messages():
            log.write_text(f"some words before\n{begin}{message.text}\n")
            diagnosis = diagnose_log(log)
            yield message, _told(message, diagnosis.findings, "\n".join(diagnosis_lines(diagnosis)))

    assert _faults(each()) == []


def test_an_error_of_the_code_is_no_message_of_its_own(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config().attempt().steps(1, 3)
    writer.run.console(1).write_text("error: KeyError: 'lm_head'\nmain.log has the traceback, if the run had begun\n")
    [finding] = diagnose_run(writer.run).findings
    assert finding.id == "unknown-error"
    assert "KeyError: 'lm_head'" in finding.cause
    stamp = "20990601-12:00:00.000 master worker ERROR: KeyError: 'lm_head'"
    trace = "Traceback (most recent call last):\n  File \"/code/x.py\", line 3, in f\n    y[z]\nKeyError: 'lm_head'\n"
    (writer.run.logs / "main.log").write_text(f"{stamp}\n{trace}")
    [finding] = diagnose_run(writer.run).findings
    assert "y[z]" in finding.evidence[0].text


def test_a_message_after_which_the_run_went_on_explains_nothing(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    line = "20250601-12:00:00.000 master worker"
    log.write_text(f"{line} ERROR: no engine server came back within 60 s\n{line} INFO: Recovering from step 3\n")
    assert diagnose_log(log).findings == ()
