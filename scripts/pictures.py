"""Draw the README's pictures from a run that is complete: the learning curve, how the agent reads, the report's page.

    clusterkit train --preset tiny --here fileroot=/tmp/shown
    python scripts/pictures.py /tmp/shown tiny-recall/run1

writes docs/pictures/{curve,reading}.svg and report.png (which needs Chromium). scripts/record_terminal.py records the
terminals.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from shutil import which

import matplotlib as mpl
from matplotlib import pyplot as plt
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browsers import BROWSERS

from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.trace.heldout import HeldoutTask, Reading, heldout_tasks
from clusterkit.ui.markup import Html, tag

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
INK, QUIET, PAPER, GOOD, BAD, BOX = "#1f2328", "#656d76", "#ffffff", "#1a7f37", "#cf222e", "#f6f8fa"
LINE, WIDTH = 19, 920
COLUMNS = {"section": (20, 40), "before": (400, 26), "after": (665, 26)}
"""Of the picture of reading: where a column begins (pixels), and its characters a line."""


def curve(run: RunDirectory, out: Path) -> None:
    """Draw reward over the steps, and the accuracy on held-out documents."""
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = [one for one in records if one["kind"] == "step"]
    other = ("chunks", "blank_memory", "method")
    measured = [one for one in records if one["kind"] == "eval" and not any(map(one.get, other))]
    heldout = sorted(measured, key=lambda one: int(one["global_step"]))
    mpl.rcParams.update(
        {"svg.hashsalt": "clusterkit", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    axes.plot(
        [one["global_step"] for one in steps],
        [100 * one["stats"]["task_reward"] for one in steps],
        label="reward of the step's rollouts",
    )
    axes.plot(
        [one["global_step"] for one in heldout],
        [100 * one["accuracy"] for one in heldout],
        "o-",
        label="right answers, held-out documents, greedy",
    )
    axes.set(xlabel="training step", ylabel="%", ylim=(0, 103), xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def reading(task: HeldoutTask, out: Path) -> None:
    """Draw a held-out task: its sections, and beside each the memory after it, before training and after."""
    assert task.before is not None
    assert task.after is not None
    top, parts = 78, [_text(20, 30, f"Question: {task.question}", weight="bold")]
    parts += [
        _text(COLUMNS["section"][0], 60, "the document, a section a turn", fill=QUIET),
        _text(COLUMNS["before"][0], 60, "memory, before training", fill=QUIET),
        _text(COLUMNS["after"][0], 60, "memory, after training", fill=QUIET),
    ]
    for place, section in enumerate(task.sections):
        cells = {"section": (section, INK)}
        for name, one in task.readings():
            memory = one.memories[place] if place < len(one.memories) else None
            text = memory.text if memory else ""
            cells[name] = (text or "(empty)", GOOD if memory and memory.held.answer else QUIET)
        wrapped = {name: (textwrap.wrap(text, COLUMNS[name][1]) or [""], fill) for name, (text, fill) in cells.items()}
        high = LINE * max(len(lines) for lines, _ in wrapped.values()) + 18
        for name, (lines, fill) in wrapped.items():
            left, letters = COLUMNS[name]
            parts.append(tag("rect", x=left - 8, y=top, width=letters * 8.4 + 16, height=high - 8, rx=6, fill=BOX))
            parts += [_text(left, top + 18 + LINE * row, line, fill=fill) for row, line in enumerate(lines)]
        top += high
    parts.append(_text(20, top + 22, f"Right answer: {' or '.join(task.answers)}", weight="bold"))
    for name, one in task.readings():
        left, _ = COLUMNS[name]
        parts.append(
            _text(
                left,
                top + 22,
                f"answers: {one.answer or '(nothing)'}",
                fill=GOOD if _right(one) else BAD,
                weight="bold",
            )
        )
    svg = tag(
        "svg",
        tag("title", "How a memory agent reads"),
        tag("rect", width="100%", height="100%", rx=8, fill=PAPER),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {top + 42}",
        font_family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
        font_size=14,
    )
    out.write_text(svg + "\n", encoding="utf-8")


def _text(x: float, y: float, words: str, fill: str = INK, weight: str | None = None) -> Html:
    return tag("text", words, x=x, y=y, fill=fill, font_weight=weight)


def _right(one: Reading) -> bool:
    return one.scores.get("accuracy", 0.0) == 1.0


def learned(tasks: list[HeldoutTask]) -> HeldoutTask:
    """Return the longest task that was answered wrong before training and right after it."""
    fitting = [one for one in tasks if one.before and one.after and not _right(one.before) and _right(one.after)]
    return max(fitting, key=lambda one: len(one.sections))


def page(fileroot: Path, name: str, out: Path) -> None:
    """Take a picture of the report's page."""
    html = out.with_suffix(".html").resolve()
    command = [sys.executable, "-m", "clusterkit", "report", name]
    command += ["--here", "--fileroot", str(fileroot), "--out", str(html)]
    subprocess.run(command, check=True)
    with sync_playwright() as driver:
        program = next(path for path in map(which, BROWSERS) if path)
        with driver.chromium.launch(executable_path=program) as browser:
            shown = browser.new_page(viewport={"width": 1280, "height": 900})
            shown.goto(html.as_uri())
            shown.screenshot(path=str(out))
    html.unlink()


def main() -> None:
    """Draw what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fileroot", type=Path)
    parser.add_argument("run", help="EXPERIMENT/TRIAL")
    given = parser.parse_args()
    run = RunDirectory(given.fileroot, user_name(), *given.run.split("/"))
    PICTURES.mkdir(exist_ok=True)
    curve(run, PICTURES / "curve.svg")
    reading(learned(heldout_tasks(run)), PICTURES / "reading.svg")
    page(given.fileroot, given.run, PICTURES / "report.png")


if __name__ == "__main__":
    main()
