"""Whether a run that has failed is started again, and after how long."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import RunConfig

LONGEST_WAIT = 600.0
SAME_FAILURES = 3
"""So often the same failure at the same step is one that comes again."""
SAME_OUT_OF_MEMORY = 2
REFUSED = 2
"""Exit code for what the user has to put right. Where an attempt with the same configuration was taken before, the
storage or a GPU may be away for a while."""
_FINAL = {0: "completed", 130: "interrupted"}
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|SIGKILL", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended. code: exit code, negative for a signal. step: last finished step. message: its last words.

    started_at: step that it went on after. crashed: it says that a new start may help, without a change of settings.
    kept, kept_at: steps of a supervised start that its recover checkpoints hold at the end, and at the beginning.
    began: it came to train, or to its supervised start.
    """

    code: int
    message: str
    step: int
    started_at: int = 0
    crashed: bool = False
    kept: int = 0
    kept_at: int = 0
    began: bool = True

    @property
    def crash(self) -> bool:
        """Whether it ended by a signal or a fault, not with a message that asks the user for something."""
        return self.crashed or self.code < 0 or self.code > 2

    @property
    def final(self) -> bool:
        """Whether starting again is out of the question: done, or stopped by a person."""
        return self.code in _FINAL

    @property
    def kind(self) -> str:
        """The failure without what differs from one time to the next."""
        return re.sub(r"\d+|0x[0-9a-f]+", "#", self.message)[:300]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do now. wait: seconds until the next start; None: do not start again. reason: for people."""

    wait: float | None
    reason: str


def retries_of(config: RunConfig) -> int:
    """Restarts that a run is allowed; none where every start is a fresh one, which throws away what was learned."""
    return 0 if config.recover_mode == "disabled" else config.recover_retries


def judge(ends: Sequence[Ended], retries: int, first_wait: float) -> Verdict:
    """Decide after the last of `ends`, all attempts of this job.

    Args:
        ends: the attempts, in order; at least one. retries: restarts allowed in a row without a new step, and before
            giving up a run that never gets further. first_wait: seconds before the first restart; doubled for each
            further one that brought no new step, ten minutes at most.
    """
    last = ends[-1]
    if last.final:
        return Verdict(None, _FINAL[last.code])
    if last.code == REFUSED and len(ends) == 1:
        return Verdict(None, "its configuration is refused")
    if not retries:
        return Verdict(None, "nothing is started again (recover_retries=0, or recover_mode=disabled)")
    same = _same_at_the_end(ends)
    limit = SAME_OUT_OF_MEMORY if _OUT_OF_MEMORY.search(last.message) else SAME_FAILURES
    # Where an attempt came further than the start before, what it needs may be away for an hour: that is waited for.
    if same >= limit and (last.began or not any(end.began for end in ends)):
        where = f"in its supervised start, after step {last.kept}" if last.kept else f"after step {last.step}"
        return Verdict(None, f"it has failed {same} times in the same way {where}")
    stuck = _without_progress(ends)
    if stuck > retries:
        return Verdict(None, f"{retries} restarts (recover_retries) have brought no new step")
    wait = min(first_wait * 2 ** (stuck - 1), LONGEST_WAIT)
    return Verdict(wait, f"restart {len(ends)} in {wait:.0f} s")


def _same_at_the_end(ends: Sequence[Ended]) -> int:
    count = 0
    for end in reversed(ends):
        if (end.kind, end.step, end.kept) != (ends[-1].kind, ends[-1].step, ends[-1].kept):
            break
        count += 1
    return count


def _without_progress(ends: Sequence[Ended]) -> int:
    """Attempts at the end, the last one included, since one of them went further than all before it."""
    count, reached = 0, (-1, 0)
    for end in ends:
        come = (end.step, end.kept)
        count = 1 if come > max(reached, (end.started_at, end.kept_at)) else count + 1
        reached = max(reached, come)
    return count
