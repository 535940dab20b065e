"""Inputs of `data prepare reading` for tests, and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterkit.data.datasets.build import build
from clusterkit.data.datasets.prepare import make_plan
from clusterkit.data.datasets.reading import ReadingShape
from clusterkit.data.datasets.texts import Shape

SMALL = ReadingShape(per_document=2, traces=60, sizes=(2, 3), distractors=0.0)


def world(count: int = 60) -> list[dict[str, Any]]:
    """Items in the official form: person n was born in town n, which is in country n; some are yes/no."""
    founded = " It was founded by Mayor Smith{} in {}."
    return [
        {
            "_id": f"h{n}",
            "question": f"In which country was person number {n} born?",
            "answer": "yes" if n % 10 == 0 else f"Countryland {n}",
            "context": [
                [
                    f"Person Name{n}",
                    [f"Person Name{n} (born {1900 + n}) is a painter who was born in Town Place{n}.", " He paints."],
                ],
                [
                    f"Town Place{n}",
                    [f"Town Place{n} is a small town which lies in Countryland {n}.", founded.format(n, 1500 + n)],
                ],
                [f"River {n}", [f"The water of River Long{n} is cold and it is {1000 + n} miles long."]],
            ],
            "supporting_facts": [[f"Person Name{n}", 0], [f"Town Place{n}", 0]],
        }
        for n in range(count)
    ]


def texts(folder: Path, files: Mapping[str, str]) -> Path:
    """A new folder of text files of the user's."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def prepare(out: Path, *files: Path, shape: ReadingShape = SMALL, share: float = 0.2, seed: int = 1) -> dict[str, Any]:
    return build(make_plan("reading", files, Shape(), share, 0, seed, shape), out, lambda _: None)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
