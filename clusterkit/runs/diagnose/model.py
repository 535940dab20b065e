"""What the diagnosis is made of: signatures (data), and findings (what they came to for one run)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

START, WARMUP, GENERATE, REFERENCE, TRAIN, WEIGHTS, CHECKPOINT = (
    "start",
    "warm-up",
    "generate",
    "reference",
    "train",
    "weights",
    "checkpoint",
)
PHASE_NAMES = {
    "": "in an unknown phase",
    START: "at the start, before the first rollout",
    WARMUP: "in the warm-up",
    GENERATE: "while generating (actor_gen)",
    REFERENCE: "while computing reference log-probs (ref_inf)",
    TRAIN: "while training (actor_train)",
    WEIGHTS: "while weights were sent to the engine",
    CHECKPOINT: "while a checkpoint was written or read",
}

BAD = ("failed", "killed", "stalled")
"""States of a run in which there is something to explain."""


@dataclass(frozen=True)
class Rule:
    """How one setting is changed.

    how: halve, double, times, less, more (the last three by `by`) or to (`to`). key: our setting, by its dotted key;
    areal: AReaL's option for the same; environment: a variable of the processes. least, most: bounds of the
    proposal. why: in half a sentence. engine: of runs with that engine only, server or embedded.
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
    """What a signature means in some phases (none named: in all others). together: all rules at once, or none."""

    cause: str
    rules: tuple[Rule, ...] = ()
    advice: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    together: bool = False


@dataclass(frozen=True)
class Signature:
    """A message that is known.

    patterns: regular expressions for one line of a log. origin: what prints it. follows: as a rule the consequence of
    something else, so that another finding comes first. unless: not told where one of these was found.
    """

    id: str
    title: str
    patterns: tuple[str, ...]
    cases: tuple[Case, ...]
    origin: str
    follows: bool = False
    unless: tuple[str, ...] = ()

    def case(self, phase: str) -> Case:
        """What it means in that phase."""
        return next((case for case in self.cases if phase in case.phases), self.cases[-1])


@dataclass(frozen=True)
class Evidence:
    """Where something was seen. line: 1 for the first; 0: no line of a file, or too far on to be counted."""

    source: str
    line: int
    text: str

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"source": self.source, "line": self.line, "text": self.text}


@dataclass(frozen=True)
class Change:
    """One proposed change. now: None where unknown, and `proposed` is then words such as `half of it`.

    kind: setting (ours), areal (AReaL's option, no setting of ours) or environment. new_trial: the run cannot go on
    with it, because checkpoints demand the old value.
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

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "key": self.key,
            "kind": self.kind,
            "now": self.now,
            "proposed": self.proposed,
            "why": self.why,
            "new_trial": self.new_trial,
        }


@dataclass(frozen=True)
class Cause:
    """Something that was recognised.

    changes: the first one is meant, the others are for when it is not enough; together: all of them at once.
    count: how often it was seen; evidence: the first and the last time.
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
        """For --json."""
        return {
            "id": self.id,
            "title": self.title,
            "phase": self.phase or None,
            "cause": self.cause,
            "follows_from_another": self.follows,
            "count": self.count,
            "evidence": [item.as_dict() for item in self.evidence],
            "changes": [change.as_dict() for change in self.changes],
            "advice": list(self.advice),
        }


@dataclass(frozen=True)
class Hit:
    """A line that a signature knows. text: the whole line. traced: the phase is that of a traceback's frames."""

    signature: Signature
    evidence: Evidence
    phase: str
    text: str
    traced: bool = False
