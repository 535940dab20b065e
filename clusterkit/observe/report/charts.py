"""The plots of one run, or of several over one another: which numbers share a plot, and their meaning.

Numbers have the names that TensorBoard and W&B get (trainer/metrics.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterkit.common.text_plot import size
from clusterkit.observe.report.series import Series, bucket_width
from clusterkit.observe.report.source import Run, held_out_name
from clusterkit.runs.log.metrics import number, whole

Numbers = dict[str, dict[int, Series]]
"""By name and number of the run."""


@dataclass(frozen=True)
class Mark:
    """An event after a step: a `save`, a `recover` checkpoint or a `restart`."""

    kind: str
    step: int
    run: int
    text: str


@dataclass(frozen=True)
class Chart:
    """One plot over the steps."""

    title: str
    unit: str  # of all its numbers
    meaning: str  # one sentence
    names: tuple[str, ...]  # of the numbers that it shows
    from_zero: bool = False  # the axis begins at 0
    stacked: int | None = None  # number of the run whose numbers are stacked as areas; None: lines of all runs


REWARD = Chart(
    "Reward",
    "mean of a step",
    "What the task gives; final_reward is after limits and penalties.",
    ("task_reward", "final_reward"),
)
LEARNING = (
    Chart(
        "Clip ratio",
        "share of tokens",
        "Tokens whose update was clipped. Rising: the policy moves too fast.",
        ("actor_clip_ratio",),
        True,
    ),
    Chart(
        "KL",
        "nats a token",
        "How far the policy moved: within a step, from the reference, from the sampling engine.",
        ("ppo_approx_kl", "kl_reward", "mismatch_kl"),
    ),
    Chart(
        "Importance weight",
        "ratio",
        "New to old probability of a token; 1 where nothing moved.",
        ("importance_weight",),
    ),
    Chart("Entropy", "nats a token", "Falling to 0 early: the policy has stopped exploring.", ("entropy",), True),
    Chart("Loss", "", "The policy's loss; its course says little about success.", ("actor_loss",)),
    Chart("Gradient norm", "", "Before clipping.", ("grad_norm",), True),
    Chart("Learning rate", "", "By the schedule.", ("lr",), True),
)
LENGTHS = (
    Chart("Lengths", "tokens a turn", "Prompt alone, and prompt with answer.", ("avg_seq_len", "avg_prompt_len"), True),
    Chart("No end of sequence", "share of answers", "Final answers that ran into the limit.", ("no_eos_ratio",), True),
    Chart("The agent's memory", "turns a step", "Memories that came out empty, or were cut off at their limit.",
         ("empty_memory", "truncated_memory"), True),
    Chart("Cut off or failed", "trajectories a step", "Answers and contexts over their limit, and failures.",
         ("truncated_final", "truncated_context", "failed_trajectories"), True),
    Chart("Groups without a signal", "groups a step", "All of a group's answers had one reward: nothing to learn from.",
         ("zero_variance_groups",), True),
)  # fmt: skip
HELD_OUT = Chart(  # of accuracy; see _held_out
    "Held-out accuracy",
    "share of tasks",
    "Tasks that it never trains on.",
    ("eval/accuracy", "eval/sampled_accuracy"),
    True,
)
SPEED = (
    Chart(
        "Throughput",
        "tokens/s",
        "Tokens read, sampled and trained on, over the step's seconds.",
        ("tokens_per_s",),
        True,
    ),
    Chart("Step time", "seconds", "From the start of a step to its end.", ("step_time_s",), True),
)
MACHINE = (
    Chart(
        "GPUs and cores",
        "share that is busy",
        "Means over a step, of all GPUs and cores of the first rank's machine.",
        ("machine/gpu_share", "machine/cpu_share"),
        True,
    ),
    Chart(
        "Memory",
        "GiB",
        "Of the fullest GPU (peak: as PyTorch counts it), and of the machine.",
        ("machine/gpu_memory_gib", "gpu_memory_peak_gib", "machine/memory_gib"),
        True,
    ),
)
CONSTANTS = {"disable_value", "mask_no_eos_with_zero"}
"""Flags among the numbers of AReaL's line."""

MOST_MARKS = 60
"""Most marks of a kind: more would look like a hatched area."""

TIMINGS = ("rollout", "train", "publish", "checkpoint", "eval", "other")

Section = tuple[str, list[Chart]]


def numbers_of(runs: Sequence[Run]) -> Numbers:
    """Return all numbers of the runs, with the same steps per point."""
    width = max((bucket_width(run.step_numbers()) for run in runs), default=1)
    found: Numbers = {}
    for index, run in enumerate(runs):
        for name, series in run.numbers(width).items():
            if name not in CONSTANTS:
                found.setdefault(name, {})[index] = series
    return found


def sections(runs: Sequence[Run], numbers: Numbers) -> list[Section]:
    """Return the plots under their headings, without numbers that no run has."""
    first, *more = SPEED
    found: list[Section] = [
        ("Is it learning?", [REWARD, _held_out(runs)]),
        ("How does the policy change?", list(LEARNING)),
        ("What does it write?", list(LENGTHS)),
        ("Where does the time go?", [first, *_times(runs, numbers), *more]),
        ("How busy is the machine?", list(MACHINE)),
    ]
    shown = {name for _, charts in found for chart in charts for name in chart.names}
    found.append(("Other numbers", [Chart(name, "", "", (name,)) for name in sorted(numbers.keys() - shown)]))
    drawn = [(title, [_with_values(chart, numbers) for chart in charts]) for title, charts in found]
    kept = [(title, [chart for chart in charts if chart.names]) for title, charts in drawn]
    return [(title, charts) for title, charts in kept if charts]


def _held_out(runs: Sequence[Run]) -> Chart:
    """Return the plot of held-out scores under their name; their numbers have the same names in all runs."""
    name = held_out_name(runs)
    if name == "accuracy":
        return HELD_OUT
    owners: dict[str, list[str]] = {}
    for run in runs:
        if run.history.held_out and number(run.history.held_out[-1], "accuracy") is not None:
            owners.setdefault(held_out_name([run]), []).append(run.directory.trial)
    mixed = "; ".join(f"{own} of {', '.join(trials)}" for own, trials in owners.items()) if len(owners) > 1 else ""
    told = f" ({mixed})" if mixed else ""
    meaning = f"{HELD_OUT.meaning} Their {name}{told} is the number eval/accuracy."
    return replace(HELD_OUT, title=f"Held-out {name}", unit="mean over tasks", meaning=meaning)


def _with_values(chart: Chart, numbers: Numbers) -> Chart:
    return replace(chart, names=tuple(name for name in chart.names if name in numbers))


def _times(runs: Sequence[Run], numbers: Numbers) -> list[Chart]:
    """Return a plot of the parts of a step for each run."""
    charts = []
    for index, run in enumerate(runs):
        parts = {name for name, lines in numbers.items() if name.startswith("time/") and index in lines}
        known = [f"time/{part}" for part in TIMINGS]
        names = [name for name in [*known, *sorted(parts.difference(known))] if name in parts]
        taken = tuple(name for name in names if any(numbers[name][index].high))
        title = "Time of a step" if len(runs) == 1 else f"Time of a step, {run.directory.trial}"
        charts.append(Chart(title, "seconds", "Its parts on one another.", taken, True, stacked=index))
    return charts


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
