"""Records of `benchmarks/reading.py`: F1 of every question under every arm, in one small file, and their table.

A JSON line each: `questions` (ids, and the form of each: span or yes_no), `evaluation` (one of each checkpoint: hash,
engine, device, versions, seconds), and `cell` (a checkpoint's seed read with a method at a number of documents: F1 of
the questions in their order, three digits, and exact match as a string of 0 and 1).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evaluation.intervals import bootstrap
from trainer.errors import UserError
from trainer.files import write_atomic

TOP_K = 2
"""Paragraphs that BM25 finds."""
MODELS = {
    "trained": "trained",
    "supervised": "supervised only",
    "shuffled": "shuffled rewards",
    "untrained": "untrained",
}
METHODS = {
    "memagent": "memory",
    "blank_memory": "blank memory",
    "no_context": "question alone",
    "long_context": "full context, truncated",
    "rag": f"BM25 top {TOP_K}",
    "gold": "gold documents",
}
YES_NO = "yes_no"
VERSIONS = ("commit", "clusterkit", "torch", "transformers", "SGLang", "vLLM")
"""Those that are kept, of the software that gave the answers."""


@dataclass(frozen=True)
class Arm:
    """A checkpoint and how it reads."""

    model: str
    method: str

    @property
    def label(self) -> str:
        return f"{MODELS[self.model]}: {METHODS[self.method]}"


@dataclass
class Records:
    """cells: (arm, seed, documents) -> F1 and exact match of every question, in the order of ids."""

    ids: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    evaluations: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    cells: dict[tuple[Arm, int, int], tuple[list[float], str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Records:
        """Read a file. Raises UserError for one that is none of these."""
        records = cls()
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row["kind"] == "questions":
                    records.ids, records.forms = row["ids"], row["forms"]
                elif row["kind"] == "evaluation":
                    records.evaluations[row["model"], row["seed"]] = row
                else:
                    key = (Arm(row["model"], row["method"]), row["seed"], row["documents"])
                    records.cells[key] = (row["f1"], row["em"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: no records of benchmarks/reading.py ({error})") from error
        if not records.cells:
            raise UserError(f"{path}: there is no measurement in it yet")
        return records

    def write(self, path: Path) -> None:
        """Write the file anew, in an order of its own, so that equal records are equal files."""
        lines: list[dict[str, Any]] = [{"kind": "questions", "ids": self.ids, "forms": self.forms}]
        lines += [self.evaluations[key] for key in sorted(self.evaluations)]
        places = {name: number for number, name in enumerate([*MODELS, *METHODS])}
        order = sorted(self.cells, key=lambda k: (places[k[0].model], k[1], k[2], places[k[0].method]))
        for arm, seed, documents in order:
            f1, exact = self.cells[arm, seed, documents]
            cell = {"kind": "cell", "model": arm.model, "seed": seed, "method": arm.method, "documents": documents}
            lines.append({**cell, "em": exact, "f1": [int(value) if value in (0, 1) else value for value in f1]})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))

    def add(self, results: dict[str, Any], model: str, seed: int, device: str) -> None:
        """Take in an evaluation's results.json.

        Raises:
            UserError: answers are missing, or other questions were asked than those of the records.
        """
        if results["status"] != "complete":
            raise UserError(f"the evaluation of {model}, seed {seed}, lacks answers: run the same command again")
        for row in results["rows"]:
            questions = row["questions"]
            if not self.ids:
                self.ids = list(questions)
                self.forms = [str(questions[q].get("form", "span")) for q in self.ids]
            if set(questions) != set(self.ids):
                raise UserError(
                    f"{row['dataset']} of {model}, seed {seed}, asked other questions than the records have: name "
                    "another file with --records, or take the same questions folder, --split and --num-questions"
                )
            f1 = [round(questions[q]["f1"], 3) for q in self.ids]
            exact = "".join(str(int(questions[q]["em"])) for q in self.ids)
            documents = int(row["suite"].partition("@")[2])
            self.cells[Arm(model, row["method"]), seed, documents] = (f1, exact)
        self.evaluations[model, seed] = {
            "kind": "evaluation",
            "model": model,
            "seed": seed,
            "checkpoint_sha256": results["checkpoint_sha256"],
            "engine": results["engine"],
            "device": device,
            "seconds": results["seconds"],
            "versions": {name: version for name, version in results["versions"].items() if name in VERSIONS},
        }

    @property
    def documents(self) -> list[int]:
        return sorted({documents for _, _, documents in self.cells})

    @property
    def arms(self) -> list[Arm]:
        there = {arm for arm, _, _ in self.cells}
        return [arm for model in MODELS for method in METHODS if (arm := Arm(model, method)) in there]

    def by_seed(self, arm: Arm, documents: int, *, yes_no: bool = False) -> dict[int, list[float]]:
        """Seed -> F1 of the yes/no questions, or of all others."""
        kept = [number for number, form in enumerate(self.forms) if (form == YES_NO) == yes_no]
        found = {seed: f1 for (one, seed, size), (f1, _) in self.cells.items() if (one, size) == (arm, documents)}
        return {seed: [found[seed][number] for number in kept] for seed in sorted(found)}

    def scores(self, arm: Arm, documents: int, *, yes_no: bool = False) -> list[float]:
        """F1 of every question, as a mean over the seeds; empty where the arm was not measured."""
        by_seed = self.by_seed(arm, documents, yes_no=yes_no).values()
        return [statistics.mean(values) for values in zip(*by_seed, strict=True)]

    def changes(self, arm: Arm, other: Arm, documents: int) -> list[float]:
        """F1 of every question less that of another arm, as a mean over the seeds that both have; of all without any.

        Supervised starts that several runs began with have a seed of their own.
        """
        ours, theirs = (self.by_seed(one, documents) for one in (arm, other))
        both = ours.keys() & theirs.keys()
        sides = ([f1 for seed, f1 in side.items() if seed in both or not both] for side in (ours, theirs))
        means = [[statistics.mean(values) for values in zip(*side, strict=True)] for side in sides]
        return [a - b for a, b in zip(*means, strict=False)]


def tables(records: Records) -> list[str]:
    """Markdown: for every number of documents a line an arm; F1 in points, 95 % intervals over questions."""
    yes_no = sum(form == YES_NO for form in records.forms)
    header = (
        f"| arm | F1 of {len(records.ids) - yes_no} questions | by seed | less its own blank memory | "
        f"less supervised only | F1 of {yes_no} yes/no questions |"
    )
    found = []
    for documents in records.documents:
        found += [f"{documents} documents:", "", header, "|---|---|---|---|---|---|"]
        for arm in records.arms:
            if scores := records.scores(arm, documents):
                seeds = [f"{100 * statistics.mean(f1):.1f}" for f1 in records.by_seed(arm, documents).values()]
                cells = [arm.label, with_interval(scores), ", ".join(seeds)]
                for other in (Arm(arm.model, "blank_memory"), Arm("supervised", "memagent")):
                    changes = records.changes(arm, other, documents) if other != arm else []
                    cells.append(with_interval(changes, sign="+"))
                cells.append(with_interval(records.scores(arm, documents, yes_no=True)))
                found.append(f"| {' | '.join(cells)} |")
        found.append("")
    return found


def measured_with(records: Records) -> list[str]:
    """A line for every device and software that answers are of."""
    found: dict[str, list[str]] = {}
    for (model, seed), row in records.evaluations.items():
        software = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        found.setdefault(f"{row['device']}, engine {row['engine']}, {software}", []).append(f"{model} {seed}")
    return [f"{', '.join(names)}: {where}" for where, names in found.items()]


def with_interval(scores: Sequence[float], sign: str = "") -> str:
    """Mean and interval, times 100; a dot of nothing."""
    if not scores:
        return "·"
    low, high = bootstrap(scores)
    return f"{100 * statistics.mean(scores):{sign}.1f} ({100 * low:{sign}.1f} … {100 * high:{sign}.1f})"
