"""Suites by name: `math_500`, `ruler_hqa@200`, `niah_single@8192`, `recall@16`, or the path of a JSON-lines file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from evaluation.config import Split
from evaluation.suites.base import Suite
from evaluation.suites.hqa import DEFAULT_DOCUMENTS, hqa_suite, official_places, official_suite, text_qa_suite
from evaluation.suites.memory import facts_suite, memory_suites, needles_suite, recall_suite
from evaluation.suites.problems import find_problems, heldout_suite, problem_suite
from evaluation.suites.ruler import TASKS as RULER
from evaluation.suites.ruler import ruler_suite
from trainer.assets import SHARED_DATASETS, cache_root, data_places
from trainer.config_tasks import HotpotqaConfig, MathConfig, MemalphaConfig, RecallConfig, TaskConfig
from trainer.errors import UserError
from trainer.tasks.hotpotqa_data import HOW_TO_GET, QUESTIONS, has_data

PROBLEMS = ("math_500", "aime24", "aime25", "amc23", "gsm8k")
RECALL_CHUNKS, HQA_DOCUMENTS, RULER_TOKENS = 0, DEFAULT_DOCUMENTS, 4096
MEMORY = "memalpha"
SPLIT = ("ruler_hqa", "ruler_qa")
"""Suites whose questions are of a split that can be chosen."""
NAMES = (*PROBLEMS, "ruler_hqa", "ruler_hqa_official", "ruler_qa", *RULER, "recall", "needles", "facts", "math", MEMORY)
"""What can be asked for by name; memory suites take a size: NAME@SIZE."""
_SIZED = re.compile(r"(?P<name>[A-Za-z0-9_.-]+?)@(?P<size>\d+)(?P<unit>[kKmM]?)")


class Finder:
    """Finds suites.

    Args:
        data: folder to look in before $CLUSTERKIT_DATA, /storage/datasets and the cache.
        limit: only the first so many questions of each suite; 0: all.
        task: the run's task, for suites of its generated documents or held-out problems.
        split: see `EvalConfig.split`.
    """

    def __init__(
        self,
        data: str = "",
        cache_dir: str = "",
        limit: int = 0,
        task: TaskConfig | None = None,
        split: Split = "usual",
    ) -> None:
        self.split: Split = split
        self.data, self.cache_dir, self.limit, self.task = data, cache_dir, limit, task or RecallConfig()
        chosen = [data, os.environ.get("CLUSTERKIT_DATA", "")]
        roots = [Path(folder).expanduser() for folder in chosen if folder]
        self.roots = [*roots, SHARED_DATASETS, cache_root(cache_dir), cache_root(cache_dir) / "datasets"]

    def suite(self, name: str) -> Suite:
        """The suite of that name.

        Raises:
            UserError: no such name (with the nearest ones) or file, a size that cannot be, or data that are missing.
        """
        if name.endswith((".jsonl", ".jsonl.gz", ".json")) or "/" in name:
            return self._file(Path(name).expanduser())
        sized = _SIZED.fullmatch(name)
        base, size = (sized["name"], _size(sized)) if sized else (name, None)
        if base in PROBLEMS:
            if size is not None:
                raise UserError(f"{name}: {base} has no size: ask for {base}; --num-questions N takes the first N")
            return self._problems(base)
        if base == "math":
            if size is not None:
                raise UserError(f"{name}: the problems of a run have no size: ask for math")
            if not isinstance(self.task, MathConfig):
                raise UserError(
                    "math is what a run of task.name=math holds out of its problems, and the checkpoint is of no such "
                    f"run: ask for {', '.join(PROBLEMS)} or a JSON-lines file"
                )
            return heldout_suite(self.task, self.limit)
        make = self._makers().get(base)
        if make is None:
            near = get_close_matches(base, NAMES, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UserError(
                f"there is no data set '{name}'.{hint}\nNames: {', '.join(NAMES)}; or the path of a JSON-lines file. "
                "Memory suites take a size: ruler_hqa@200 documents, niah_single@8k tokens, recall@16 chunks"
            )
        if size == 0:
            raise UserError(f"{name}: the size must be 1 or more")
        return make(size)

    def _named(self, name: str) -> list[Suite]:
        """The suites that a name stands for: memalpha has one for every data source."""
        if name != MEMORY:
            return [self.suite(name)]
        places = [self.data, self.task.path if isinstance(self.task, MemalphaConfig) else None]
        return memory_suites([Path(place).expanduser() for place in places if place], self.cache_dir, self.limit)

    def _makers(self) -> dict[str, Callable[[int | None], Suite]]:
        makers: dict[str, Callable[[int | None], Suite]] = {
            "ruler_hqa": lambda n: self._hqa(hqa_suite, n or HQA_DOCUMENTS),
            "ruler_hqa_official": lambda n: self._official(n or HQA_DOCUMENTS),
            "ruler_qa": lambda n: self._hqa(text_qa_suite, n or RULER_TOKENS),
            "facts": lambda n: facts_suite(n or RECALL_CHUNKS, self.task, self.limit),
            "needles": lambda n: needles_suite(n or RECALL_CHUNKS, self.task, self.limit),
            "recall": lambda n: recall_suite(n or RECALL_CHUNKS, self.task, self.limit),
        }
        for task in RULER:
            makers[task] = lambda n, task=task: ruler_suite(task, n or RULER_TOKENS, self.limit)  # type: ignore[misc]
        return makers

    def _hqa(self, make: Callable[[int, str | None, str, int, Split], Suite], size: int) -> Suite:
        return make(size, self._hotpotqa(), self.cache_dir, self.limit, self.split)

    def _problems(self, name: str) -> Suite:
        path = find_problems(name, self.roots)
        if path is None:
            raise UserError(
                f"no data of {name}: fetch them with clusterkit assets get {name}, name their folder with --data-path, "
                f"or the file itself in --data-names (looked for {name}/test.jsonl, {name}.jsonl and the like in "
                f"{', '.join(map(str, self.roots))})"
            )
        return problem_suite(name, path, self.limit)

    def _file(self, path: Path) -> Suite:
        if path.is_dir():
            inside = [path / "test.jsonl", path / "test.jsonl.gz"]
            found = next((file for file in inside if file.is_file()), None)
            if found is None:
                raise UserError(f"{path} is a folder without test.jsonl: name the file")
            return problem_suite(path.name, found, self.limit)
        if not path.is_file():
            raise UserError(f"{path}: there is no such file: name a JSON-lines file, or one of {', '.join(NAMES)}")
        name = path.name.removesuffix(".gz").rpartition(".")[0]
        if path.suffix == ".json":
            return official_suite(name, path, self.limit)
        return problem_suite(path.parent.name if name == "test" else name, path, self.limit)

    def _hotpotqa(self) -> str | None:
        """Folder of the HotpotQA files: under --data-path, else what the run trains on; None: the usual places.

        Raises:
            UserError: none of them has any.
        """
        own = self.task.path if isinstance(self.task, HotpotqaConfig) else None
        if not self.data:
            return own
        root = Path(self.data).expanduser()
        holders = [root / "hotpotqa", root]
        usual = [] if own else data_places("hotpotqa", self.cache_dir)
        found = next((folder for folder in holders if has_data(folder)), None)
        if found is None and not own and not any(map(has_data, usual)):
            raise UserError(
                f"no questions of HotpotQA's form; looked for {QUESTIONS} in "
                f"{', '.join(map(str, [*holders, *usual]))}. {HOW_TO_GET}"
            )
        return str(found) if found else own

    def _official(self, documents: int) -> Suite:
        shapes = official_places(documents)
        path = next((root / shape for root in self.roots for shape in shapes if (root / shape).is_file()), None)
        if path is None:
            raise UserError(
                f"no eval_{documents}.json of MemAgent; looked in {', '.join(map(str, self.roots))} and their folders "
                "ruler_hqa and hotpotqa. Name its folder with --data-path, or use the rebuilt set: "
                f"ruler_hqa@{documents}"
            )
        return official_suite(f"ruler_hqa_official@{documents}", path, self.limit)

    def suites(self, names: Sequence[str]) -> list[Suite]:
        """Suites in the order of their names, each once. Raises UserError as `suite`, and where none is named."""
        requested = list(dict.fromkeys(name.strip() for name in names if name.strip()))
        if not requested:
            raise UserError(f"no data set named: add --data-names, such as {','.join(NAMES[:3])} or ruler_hqa@50")
        if self.split != "usual":
            others = [name for name in requested if name.partition("@")[0] not in SPLIT]
            if others:
                names = " and ".join(SPLIT)
                raise UserError(f"split={self.split} is for {names}: leave {', '.join(others)} out, or the split")
        found = [suite for name in requested for suite in self._named(name)]
        labels = [suite.name for suite in found]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise UserError(f"two data sets have the name {twice}: rename one of the files, or ask for one of them")
        return found


def _size(match: re.Match[str]) -> int:
    return int(match["size"]) * {"": 1, "k": 1024, "m": 1024 * 1024}[match["unit"].lower()]
