"""Writes the tables of docs/scale.md: the expected time of a step, by preset, part and GPU.

python scripts/scale_page.py            write them
python scripts/scale_page.py --check    exit with 1 where the page has others
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clusterkit.capacity.expected import controller_share, controllers_wanted, expected_steps, why_unknown
from clusterkit.capacity.speed import GPUS
from clusterkit.common.text_plot import duration
from clusterkit.config import presets
from clusterkit.config.resolve import resolve

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
BEGIN, END = "<!-- tables: scripts/scale_page.py -->", "<!-- end of tables -->"


def tables() -> str:
    """Return a table for every preset that has GPUs."""
    return "\n\n".join(_table(name) for name in presets.size_names() if presets.load_size(name).gpu_memory_gib)


def _table(name: str) -> str:
    size = presets.load_size(name)
    lines = [f"### {name}", "", f"| task: part | {' | '.join(GPUS)} | published |", f"|{'---|' * (len(GPUS) + 2)}"]
    sure: list[str] = []
    for task in size.tasks:
        config = resolve(name, task).config
        if why := why_unknown(config):
            lines.append(f"| {task} | {' | '.join('' for _ in GPUS)} | not told: {why} |")
            continue
        steps = expected_steps(config)
        published = size.measured.get(task)
        told = f"{duration(published.step_seconds)} on {published.gpus} {published.gpu}".strip() if published else ""
        lines += [_row(f"{task}: {part}", [str(step.parts[part]) for step in steps], "") for part in steps[0].parts]
        lines.append(_row(f"**{task}: a step**", [f"**{step.whole}**" for step in steps], told))
        sure.append(f"{task} on {steps[0].gpu}: {steps[0].sure}.")
        if wanted := controllers_wanted(config):
            share = controller_share(config)
            sure.append(f"{task}: requests take rank 0 up to {share:.0%} of sampling; `rollout.controllers={wanted}`.")
    return "\n".join([*lines, *(f"\n{line[0].upper()}{line[1:]}" for line in sure)])


def _row(first: str, cells: list[str], last: str) -> str:
    return f"| {first} | {' | '.join(cells)} | {last} |"


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"
    if given.check:
        return int(wanted != text)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
