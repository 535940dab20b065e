"""The parts of a diagnosis: signatures (data), and causes (what signatures and checks find in one run)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

START, WARMUP, GENERATE, REFERENCE = "start", "warm-up", "generate", "reference"
TRAIN, WEIGHTS, CHECKPOINT = "train", "weights", "checkpoint"
PHASE_NAMES = {
    START: "at the start, before the first rollout",
    WARMUP: "in the warm-up",
    GENERATE: "while generating (actor_gen)",
    REFERENCE: "while computing reference log-probs (ref_inf)",
    TRAIN: "while training (actor_train)",
    WEIGHTS: "while weights were sent to the engine",
    CHECKPOINT: "while a checkpoint was written or read",
}

BAD = ("failed", "killed", "stalled")
"""States of a run that need an explanation."""


@dataclass(frozen=True)
class Rule:
    """How to change one setting.

    Args:
        how: halve, double, times, less, more (the last three by `by`) or to (`to`).
        key: our setting, by its dotted key.
        areal: AReaL's option for the same.
        environment: a variable of the processes.
        to: the new value, with how="to".
        by: the factor or the difference.
        least: lower bound of the proposal.
        most: upper bound of the proposal.
        why: the reason, in half a sentence.
        engine: server or embedded: only for runs with that engine.
    """

    how: str
    key: str = ""
    areal: str = ""
    environment: str = ""
    to: Any = None
    by: float = 0.0
    least: float = 0.0
    most: float = float("inf")
    why: str = ""
    engine: str = ""


@dataclass(frozen=True)
class Case:
    """What a signature means in some phases."""

    phases: tuple[str, ...]
    cause: str
    advice: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Signature:
    """A known message and what it means.

    Args:
        id: its name in JSON and in docs/diagnose.md.
        title: what happened.
        patterns: regular expressions; each matches within one line of a log.
        cause: why it happened.
        advice: what to do beside changing settings.
        rules: settings to change, the best one first.
        in_phases: other causes in some phases of a step.
        origin: the program that prints the message.
        follows: it is usually the consequence of something else, so other causes are shown first.
        unless: ids of signatures beside which it says nothing new.
        together: all rules are needed, not one of them.
    """

    id: str
    title: str
    patterns: tuple[str, ...]
    cause: str
    advice: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    in_phases: tuple[Case, ...] = ()
    origin: str = ""
    follows: bool = False
    unless: tuple[str, ...] = ()
    together: bool = False

    def case(self, phase: str) -> Case:
        """Return what the message means in that phase."""
        usual = Case((), self.cause, self.advice, self.rules)
        return next((case for case in self.in_phases if phase in case.phases), usual)


@dataclass(frozen=True)
class Evidence:
    """Where something was seen. `line` counts from 1; 0 is no line of a file, or one too far on to be counted."""

    source: str
    line: int
    text: str


@dataclass(frozen=True)
class Change:
    """One proposed change.

    Args:
        key: the setting, AReaL's option or the environment variable.
        kind: setting (ours), areal (AReaL's option without a setting of ours) or environment.
        now: the present value; None where it is unknown.
        proposed: the new value; words such as `half of it` where the present one is unknown.
        why: the reason, in half a sentence.
        new_trial: the run cannot go on with it, because its checkpoints demand the old value.
    """

    key: str
    kind: str
    now: Any
    proposed: Any
    why: str = ""
    new_trial: bool = False

    @property
    def applicable(self) -> bool:
        """Whether the run can go on with it."""
        return self.kind == "setting" and not self.new_trial


@dataclass(frozen=True)
class Cause:
    """Something that the diagnosis recognised.

    Args:
        id: of the signature or check.
        title: what happened.
        cause: why it happened.
        phase: the phase of the step in which it happened.
        evidence: the first and the last place where it was seen.
        count: how often it was seen.
        changes: the first one is the proposal, the others are for when it does not suffice.
        advice: what to do beside changing settings.
        follows: it is the consequence of something else.
        together: all changes are needed.
    """

    id: str
    title: str
    cause: str
    phase: str = ""
    evidence: tuple[Evidence, ...] = ()
    count: int = 1
    changes: tuple[Change, ...] = ()
    advice: tuple[str, ...] = ()
    follows: bool = False
    together: bool = False

    @property
    def applicable(self) -> Change | None:
        """The change that `--apply` writes, if any."""
        return None if self.follows else next((change for change in self.changes if change.applicable), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the shape of --json."""
        values = asdict(self)
        values |= {"phase": self.phase or None, "follows_from_another": values.pop("follows")}
        del values["together"]
        return values


@dataclass(frozen=True)
class Hit:
    """A line that matches a signature. `from_traceback`: its phase is that of a traceback's frames."""

    signature: Signature
    evidence: Evidence
    phase: str
    text: str
    from_traceback: bool = False
