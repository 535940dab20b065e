"""The plots of one run, or of two on one another: which numbers share a plot, and their meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clusterkit.common.text_plot import size
from clusterkit.observe.report.series import Series, bucket_width, make_series
from clusterkit.observe.report.source import Run
from clusterkit.runs.log.metrics import Record, mapping, number, whole


@dataclass(frozen=True)
class Line:
    """A line of a plot. `colour`: number in the palette; `run`: 0, or 1 for the second run."""

    label: str
    colour: int
    run: int
    series: Series


@dataclass(frozen=True)
class Mark:
    """An event after a step: a `save`, a `recover` checkpoint or a `restart`."""

    kind: str
    step: int
    run: int
    text: str


@dataclass(frozen=True)
class Chart:
    """One plot over the steps. `from_zero`: the axis begins at 0; `stacked`: areas instead of lines."""

    title: str
    unit: str
    meaning: str
    lines: tuple[Line, ...] = ()
    from_zero: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Spec:
    """A plot of some numbers of `stats`."""

    title: str
    unit: str
    meaning: str
    names: tuple[str, ...]
    from_zero: bool = False


REWARD = Spec(
    "Reward",
    "mean of a step",
    "What the task gives; final_reward is after limits and penalties.",
    ("task_reward", "final_reward"),
)
LEARNING = (
    Spec(
        "Clip ratio",
        "share of tokens",
        "Tokens whose update was clipped. Rising: the policy moves too fast.",
        ("actor_clip_ratio",),
        True,
    ),
    Spec(
        "KL",
        "nats a token",
        "How far the policy moved: within a step, from the reference, from the sampling engine.",
        ("ppo_approx_kl", "kl_reward", "mismatch_kl"),
    ),
    Spec(
        "Importance weight",
        "ratio",
        "New to old probability of a token; 1 where nothing moved.",
        ("importance_weight",),
    ),
    Spec("Entropy", "nats a token", "Falling to 0 early: the policy has stopped exploring.", ("entropy",), True),
    Spec("Loss", "", "The policy's loss; its course says little about success.", ("actor_loss",)),
    Spec("Gradient norm", "", "Before clipping.", ("grad_norm",), True),
    Spec("Learning rate", "", "By the schedule.", ("lr",), True),
)
LENGTHS = (
    Spec("Lengths", "tokens a turn", "Prompt alone, and prompt with answer.", ("avg_seq_len", "avg_prompt_len"), True),
    Spec("No end of sequence", "share of answers", "Final answers that ran into the limit.", ("no_eos_ratio",), True),
    Spec("The agent's memory", "turns a step", "Memories that came out empty, or were cut off at their limit.",
         ("empty_memory", "truncated_memory"), True),
    Spec("Cut off or failed", "trajectories a step", "Answers and contexts over their limit, and failures.",
         ("truncated_final", "truncated_context", "failed_trajectories"), True),
    Spec("Groups without a signal", "groups a step", "All of a group's answers had one reward: nothing to learn from.",
         ("zero_variance_groups",), True),
)  # fmt: skip
CONSTANTS = {"disable_value", "mask_no_eos_with_zero"}
"""Flags among the numbers of AReaL's line."""

MOST_MARKS = 60
"""Most marks of a kind: more would look like a hatched area."""

TIMINGS = ("rollout", "train", "publish", "checkpoint", "eval", "other")

Section = tuple[str, list[Chart]]


def sections(runs: Sequence[Run]) -> list[Section]:
    """Return the plots under their headings, without those that have no value in any run."""
    width = max((bucket_width(_steps(run)) for run in runs), default=1)

    def plot(spec: Spec) -> Chart:
        return _plot(spec, runs, width)

    found: list[Section] = [
        ("Is it learning?", [plot(REWARD), _held_out(runs, width), *map(plot, LEARNING)]),
        ("What does it write?", [plot(spec) for spec in LENGTHS]),
        ("Where does the time go?", [_throughput(runs, width), *_times(runs, width), _step_time(runs, width)]),
        ("Other numbers", [plot(Spec(name, "", "", (name,))) for name in _others(runs)]),
    ]
    drawn = [(title, [chart for chart in charts if chart.lines]) for title, charts in found]
    return [(title, charts) for title, charts in drawn if charts]


def _steps(run: Run) -> list[int]:
    return [whole(step, "global_step") for step in run.history.steps]


def _stat(name: str) -> Callable[[Record], Any]:
    return lambda record: mapping(record, "stats").get(name)


def _lines(
    runs: Sequence[Run], width: int, values: Sequence[tuple[str, Callable[[Record], Any]]], kind: str = "steps"
) -> tuple[Line, ...]:
    lines = []
    for position, (label, value) in enumerate(values):
        for index, run in enumerate(runs):
            found = make_series(getattr(run.history, kind), value, width)
            if found:
                # Every line has its own colour; lines of the second run are also dashed.
                lines.append(Line(label, position * len(runs) + index, index, found))
    return tuple(lines)


def _plot(spec: Spec, runs: Sequence[Run], width: int) -> Chart:
    lines = _lines(runs, width, [(name, _stat(name)) for name in spec.names])
    return Chart(spec.title, spec.unit, spec.meaning, lines, from_zero=spec.from_zero)


def _held_out(runs: Sequence[Run], width: int) -> Chart:
    values = [("greedy", lambda r: r.get("accuracy")), ("sampled", lambda r: r.get("sampled_accuracy"))]
    lines = _lines(runs, width, values, "held_out")
    return Chart("Held-out accuracy", "share of tasks", "Tasks that it never trains on.", lines, from_zero=True)


def _throughput(runs: Sequence[Run], width: int) -> Chart:
    lines = _lines(runs, width, [("tokens_per_s", lambda record: record.get("tokens_per_s"))])
    meaning = "Tokens read, sampled and trained on, over the step's seconds."
    return Chart("Throughput", "tokens/s", meaning, lines, from_zero=True)


def _step_time(runs: Sequence[Run], width: int) -> Chart:
    lines = _lines(runs, width, [("step_time_s", lambda record: record.get("step_time_s"))])
    return Chart("Step time", "seconds", "From the start of a step to its end.", lines, from_zero=True)


def _times(runs: Sequence[Run], width: int) -> list[Chart]:
    """Return a plot of the parts of a step for each run."""
    charts = []
    for index, run in enumerate(runs):
        recorded = {part for step in run.history.steps for part in mapping(step, "timings")}
        parts = [part for part in TIMINGS if part in recorded] + sorted(recorded - set(TIMINGS))
        lines = []
        for colour, part in enumerate(parts):
            # A part that a step lacks took no time: stacked areas need a value everywhere.
            found = make_series(run.history.steps, _part(part), width)
            if any(found.high):
                lines.append(Line(part, colour, index, found))
        title = "Time of a step" if len(runs) == 1 else f"Time of a step, {run.directory.trial}"
        meaning = "Its parts on one another."
        charts.append(Chart(title, "seconds", meaning, tuple(lines), from_zero=True, stacked=True))
    return charts


def _part(name: str) -> Callable[[Record], Any]:
    def seconds(record: Record) -> float:
        return number(mapping(record, "timings"), name) or 0.0

    return seconds


def _others(runs: Sequence[Run]) -> list[str]:
    """Return the numbers that no plot above shows, such as new ones of a trainer."""
    shown = {name for spec in (REWARD, *LEARNING, *LENGTHS) for name in spec.names} | CONSTANTS
    names = {name for run in runs for step in run.history.steps for name in mapping(step, "stats")}
    return sorted(names - shown)


def marks(runs: Sequence[Run]) -> list[Mark]:
    """Return the events of the runs; of many checkpoints the latest, and some at even distances before."""
    found = []
    for index, run in enumerate(runs):
        saves = {whole(save, "global_step"): save for save in run.history.saves}
        for kind, label, records in (
            ("recover", "recover checkpoint", run.recovers()),
            ("save", "checkpoint kept", saves),
        ):
            some = list(records)[:: -max(-(-len(records) // MOST_MARKS), 1)]
            found += [Mark(kind, step, index, f"{label}, {size(number(records[step], 'bytes'))}") for step in some]
        found += [
            Mark(
                "restart", restart.resume_step, index, f"attempt {restart.attempt} went on from here: {restart.reason}"
            )
            for restart in run.restarts
        ]
    return found
