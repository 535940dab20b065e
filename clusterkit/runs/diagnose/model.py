"""The parts of a diagnosis: signatures (data), and causes (what signatures and checks find in one run)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
    """How to change one setting."""

    how: str  # halve, double, times, less, more (the last three by `by`), to (`to`) or next (`steps`)
    key: str = ""  # our setting, by its dotted key
    areal: str = ""  # AReaL's option for the same
    environment: str = ""  # a variable of the processes
    to: Any = None  # the new value, with how="to"
    steps: Mapping[str, str] = field(default_factory=dict)  # value -> the next one, with how="next"
    by: float = 0.0  # the factor or the difference
    least: float = 0.0  # lower bound of the proposal
    most: float = float("inf")  # upper bound of the proposal
    why: str = ""  # the reason, in half a sentence
    engine: str = ""  # server or embedded: only for runs with that engine


@dataclass(frozen=True)
class Case:
    """What a signature means in some phases."""

    phases: tuple[str, ...]
    cause: str
    advice: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Signature:
    """A known message and what it means."""

    id: str  # its name in JSON and in docs/diagnose.md
    title: str  # what happened
    patterns: tuple[str, ...]  # regular expressions; each matches within one line of a log
    cause: str  # why it happened
    advice: tuple[str, ...] = ()  # what to do beside changing settings
    rules: tuple[Rule, ...] = ()  # settings to change, the best one first
    in_phases: tuple[Case, ...] = ()  # other causes in some phases of a step
    origin: str = ""  # the program that prints the message
    follows: bool = False  # it is usually the consequence of something else, so other causes are shown first
    unless: tuple[str, ...] = ()  # ids of signatures beside which it says nothing new
    together: bool = False  # all rules are needed, not one of them

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
    """One proposed change."""

    key: str  # the setting, AReaL's option or the environment variable
    kind: str  # setting (ours), areal (AReaL's option without a setting of ours) or environment
    now: Any  # the present value; None where it is unknown
    proposed: Any  # the new value; words such as `half of it` where the present one is unknown
    why: str = ""  # the reason, in half a sentence
    new_trial: bool = False  # the run cannot go on with it, because its checkpoints demand the old value

    @property
    def applicable(self) -> bool:
        """Whether the run can go on with it."""
        return self.kind == "setting" and not self.new_trial


@dataclass(frozen=True)
class Cause:
    """Something that the diagnosis recognised."""

    id: str  # of the signature or check
    title: str  # what happened
    cause: str  # why it happened
    phase: str = ""  # the phase of the step in which it happened
    evidence: tuple[Evidence, ...] = ()  # the first and the last place where it was seen
    count: int = 1  # how often it was seen
    changes: tuple[Change, ...] = ()  # the first one is the proposal, the others are for when it does not suffice
    advice: tuple[str, ...] = ()  # what to do beside changing settings
    follows: bool = False  # it is the consequence of something else
    together: bool = False  # all changes are needed

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
