"""Lines as AReaL's versions print them, for tests of their readers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

BEGIN = datetime(2025, 6, 1, 12, 0, 0)


def stamp(seconds: float) -> str:
    """The time stamp of a message, `seconds` after the run began."""
    return (BEGIN + timedelta(seconds=seconds)).strftime("%Y%m%d-%H:%M:%S.%f")[:-3]


def master(text: str, at: float, level: str = "INFO") -> str:
    """A message of the master worker."""
    return f"{stamp(at)} master worker {level}: {text}\n"


def v2_step(step: int, at: float, seconds: float = 100.0, steps: int = 50) -> str:
    """A finished step of v0.2."""
    return master(
        f"Epoch 1/1 step {step}/{steps} (global step {step}) finishes. Average #tokens per batch is 1000. "
        f"#End to end# execution time: *{seconds:.3f}*s. Total time consumption: 1.000s. ",
        at,
    )


def v2_stats(at: float, **values: float) -> str:
    """Statistics of v0.2, which come before the line of their step."""
    return master(f"RPC name actor_train returns {values!r}", at)


def v2_steps(first: int, last: int, at: float = 0.0, seconds: float = 100.0) -> str:
    """Steps with a reward of a hundredth of their number; step n ends `n * seconds` after `at`."""
    return "".join(
        v2_stats(at + seconds * n - 0.006, task_reward=n / 100) + v2_step(n, at + seconds * n, seconds)
        for n in range(first, last + 1)
    )


def v3_step(step: int, at: float, seconds: float = 100.0) -> str:
    """A finished step of v0.3, which says nothing of tokens."""
    return master(
        f"Epoch 1/1 step {step}/50 (global step {step}) finishes. #End to end# execution time: *{seconds:.3f}*s. "
        "Total time consumption: 1.000s. ",
        at,
    )


def grid(values: dict[str, float], columns: int = 4) -> str:
    """The table that v0.3 and Lite print: name and value side by side, four of them a row, column after column."""
    cells = [(name, f"{value:.4e}") for name, value in values.items()]
    rows = -(-len(cells) // columns)
    table: list[Sequence[tuple[str, str]]] = [cells[row::rows] for row in range(rows)]
    lines = [
        "│ "
        + " │ ".join(f"{name:<30} │ {value:>12}" for name, value in [*row, *[("", "")] * (columns - len(row))])
        + " │"
        for row in table
    ]
    rule = "═╤".join(["═" * 20] * columns)
    between = "\n├" + "─┼".join(["─" * 20] * columns) + "┤\n"
    return f"╒{rule}╕\n" + between.join(lines) + f"\n╘{rule.replace('╤', '╧')}╛\n"


def lite(text: str, at: float, logger: str = "StatsLogger") -> str:
    """A message of Lite and 1.x, coloured as they are even in files."""
    return f"\x1b[1;38;2;180;140;80m[AReaL]\x1b[0m \x1b[92m{stamp(at)} {logger} INFO: {text}\x1b[0m\n"


def lite_step(step: int, at: float, values: dict[str, float], total: int = 50) -> str:
    """A finished step of Lite and the table of its statistics."""
    done = lite(f"Epoch 1/1 Step {step}/{total} Train step {step}/{total} done.", at)
    return done + lite("Stats (1/1):", at) + lite("\n" + grid(values).rstrip("\n"), at)


def through_ray(text: str, actor: str = "MasterWorker", colour: str = "\x1b[36m") -> str:
    """Lines as Ray's driver prints those of an actor on another node."""
    return "".join(f"{colour}({actor} pid=96390, ip=10.0.0.5)\x1b[0m {line}\n" for line in text.splitlines())
