"""Build a folder of training and evaluation files in parts, so that an interrupted build can continue.

A part is a file of 200 rows, whole or absent. Its name has the plan's hash, so parts of other inputs or settings are
never used. The folder appears when all parts are done, with a card that lists its inputs and settings.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterkit.data.datasets.inputs import TEXT, Input
from trainer.disk import file_failures
from trainer.errors import UserError
from trainer.files import sha256, write_atomic
from trainer.locks import HeldError, hold
from trainer.staging import staged_folder

PART_ROWS = 200
CARD = "card.json"
VERSIONS = {"reading": 3}
"""Of a kind, 1 without: increase it when the same inputs give other rows, and folders of before are no more taken."""
TEXTS_VERSION = 1
"""The same of what is made of texts of the user's alone; other folders stay as they are."""

Say = Callable[[str], None]
MakeRow = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Output:
    """One file to write."""

    name: str
    count: int
    make: MakeRow  # returns a row by its number, and depends on nothing else
    key: str = "data_source"  # the column that the card counts rows by
    part: int = 0  # rows of a part; 0: PART_ROWS


@dataclass(frozen=True)
class BuildPlan:
    """Everything that a build depends on. Settings have their options' names."""

    kind: str
    inputs: Sequence[Input]
    settings: dict[str, Any]
    outputs: Sequence[Output]
    left_out: int = 0
    notes: Sequence[str] = field(default_factory=list)  # for the card
    warnings: Sequence[str] = field(default_factory=list)  # for the card, and to be told
    texts: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    """How the values of settings are typed, where that is not what Python makes of them."""

    @property
    def key(self) -> str:
        """Hash of all that the rows depend on."""
        version = VERSIONS.get(self.kind, 1) + any(i.style == TEXT for i in self.inputs) * TEXTS_VERSION
        parts = [version, self.kind, sorted((i.style, i.digest) for i in self.inputs), self.settings]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def build(plan: BuildPlan, out: Path, say: Say, force: bool = False) -> dict[str, Any]:
    """Build the folder `out` unless it is up to date; return its card with `outcome` made or present.

    Raises:
        UserError: the folder holds something else, or the files would be empty.
    """
    if not any(output.count for output in plan.outputs):
        raise UserError("no usable row is left: look at the inputs, or lower --test-share")
    card = read_card(out)
    if card is not None and card["key"] == plan.key and not force and _whole(out, card):
        return {**card, "outcome": "present"}
    _refuse_others(out, plan, force)
    parts = out.parent / f".{out.name}.parts-{plan.key}"
    with _alone(parts, out), staged_folder(out, replace=True) as staging:
        files = {output.name: _write(output, parts, staging, say) for output in plan.outputs}
        card = {
            "kind": plan.kind,
            "key": plan.key,
            "inputs": [{"file": i.name, "style": i.style, "rows": i.count, "sha256": i.digest} for i in plan.inputs],
            "settings": plan.settings,
            "left_out": plan.left_out,
            "files": files,
            "notes": [*plan.notes, *plan.warnings],
        }
        write_atomic(staging / CARD, json.dumps(card, indent=1, ensure_ascii=False))
        write_atomic(staging / "README.md", card_text(card))
        _refuse_others(out, plan, force)  # that another command with other settings has made meanwhile
    shutil.rmtree(parts, ignore_errors=True)
    return {**card, "outcome": "made"}


def _refuse_others(out: Path, plan: BuildPlan, force: bool) -> None:
    card = read_card(out)
    if out.exists() and any(out.iterdir()) and card is None:
        raise UserError(f"{out} holds something else: choose another folder with --out")
    if card is not None and not force and card["key"] != plan.key:
        raise UserError(
            f"{out} was prepared {_difference(card, plan)}: choose another folder with --out, or replace it with "
            "--force"
        )


@contextmanager
def _alone(parts: Path, out: Path) -> Iterator[None]:
    with ExitStack() as stack:
        with file_failures(parts, "choose a folder on another disk"):
            parts.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((parts / "lock").open("a+b"))
            try:
                hold(lock)
            except HeldError as error:
                raise UserError(
                    f"{out} is being made by another command: give yours again when that has ended, or name another "
                    "--out"
                ) from error
            parts.mkdir(exist_ok=True)  # that may have ended just now
        yield


def read_card(folder: Path) -> dict[str, Any] | None:
    """Return the card of a prepared folder, or None."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        return card if isinstance(card, dict) and "key" in card and "files" in card else None
    except (OSError, ValueError):
        return None


def _difference(card: Mapping[str, Any], plan: BuildPlan) -> str:
    """What a prepared folder was made with, and what a plan has in its place."""
    if card.get("kind") != plan.kind:
        return f"for {card.get('kind')}, not for {plan.kind}"
    was, now = card.get("settings", {}), plan.settings
    told = [_inputs_difference(card.get("inputs", []), plan.inputs)]
    for name in dict.fromkeys([*was, *now]):
        if was.get(name) != now.get(name):
            before, after = (_typed(plan, name, one.get(name)) for one in (was, now))
            told.append(f"with --{name.replace('_', '-')} {before}, not {after}")
    return "; ".join(filter(None, told)) or "by another version of clusterkit, which makes other rows"


def _inputs_difference(was: Sequence[Mapping[str, str]], now: Sequence[Input]) -> str:
    before, after = ({i["sha256"]: i["file"] for i in was}, {i.digest: i.name for i in now})
    gone = [name for digest, name in before.items() if digest not in after]
    new = [name for digest, name in after.items() if digest not in before]
    if gone and sorted(gone) == sorted(new):
        return f"when {' and '.join(gone)} held something else"
    words = (("from", gone), ("without", new))
    return " and ".join(f"{word} {' and '.join(names)}" for word, names in words if names)


def _typed(plan: BuildPlan, name: str, value: Any) -> str:
    if value is None:  # a setting that is kept only where it changes something
        return "as it is by default"
    return plan.texts.get(name, str)(value)


def _whole(folder: Path, card: dict[str, Any]) -> bool:
    return all(
        (folder / name).is_file() and sha256(folder / name) == facts["sha256"] for name, facts in card["files"].items()
    )


def _write(output: Output, parts: Path, staging: Path, say: Say) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    path = staging / output.name
    size = output.part or PART_ROWS
    for folder in (path.parent, (parts / output.name).parent):  # a name may have a folder
        folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, output.count, size):
            part = parts / f"{output.name}.{first}"
            if not part.is_file():
                rows = [output.make(i) for i in range(first, min(first + size, output.count))]
                write_atomic(part, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
                say(f"{output.name}: {min(first + size, output.count)} of {output.count} rows")
            text = part.read_text(encoding="utf-8")
            kinds.update(str(json.loads(line).get(output.key, "rows")) for line in text.splitlines())
            file.write(text)
    return {
        "rows": output.count,
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
        "by_source": dict(sorted(kinds.items())),
    }


def card_text(card: dict[str, Any]) -> str:
    """Return the card as Markdown."""
    lines = [f"# Data for {card['kind']}", "", "| file | rows | bytes | sha256 | sources |", "|---|---:|---:|---|---|"]
    for name, facts in card["files"].items():
        sources = ", ".join(f"{source} {count}" for source, count in facts["by_source"].items())
        lines.append(f"| {name} | {facts['rows']} | {facts['bytes']} | `{facts['sha256']}` | {sources} |")
    lines += ["", "Made of:", "", "| file | style | rows | sha256 |", "|---|---|---:|---|"]
    lines += [f"| {i['file']} | {i['style']} | {i['rows']} | `{i['sha256']}` |" for i in card["inputs"]]
    settings = ", ".join(f"{name}={value}" for name, value in card["settings"].items())
    lines += ["", f"Settings: {settings}. Rows left out: {card['left_out']}.", ""]
    lines += [f"* {note}" for note in card["notes"]]
    lines += ["* Licences are those of the inputs; look them up before you publish what was made of them.", ""]
    return "\n".join(lines)
