"""Find the phase of a training step in which a line of a log was written."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterkit.runs.diagnose.model import CHECKPOINT, GENERATE, REFERENCE, START, TRAIN, WARMUP, WEIGHTS

FRAMES = (
    # A traceback passes through the loop and several modules: the first expression that matches decides.
    (re.compile(r"self\.reference\b|compute_ref|ref_inf"), REFERENCE),
    (re.compile(r"/trainer/weights/|update_weights|weight_update|/weight_sync"), WEIGHTS),
    (re.compile(r"/trainer/checkpoint/|save_checkpoint|load_checkpoint"), CHECKPOINT),
    (re.compile(r"/trainer/warmup/"), WARMUP),
    (re.compile(r"/trainer/engines/|/trainer/rollout/|sglang/srt/managers/scheduler|event_loop|actor_gen"), GENERATE),
    (
        re.compile(r"load_lm|load_model|from_pretrained|sampling_copy|initialize_cache|/cache_engine\.py|init_model"),
        START,
    ),
    (re.compile(r"/trainer/train/|train_batch|train_step|actor_train|\.backward\(|optimizer\.step"), TRAIN),
)
"""Words in the frames of a traceback."""

MARK_WORDS = (
    "odel rpc",
    "Launching experiments",
    "Following Values",
    "Load weight begin",
    "init custom process group",
    "update_weights_from",
    "fired up and ready",
    "Prefill batch",
    "Decode batch",
    "finishes",
    "Train step",
)
"""Every line that marks a phase contains one of these."""

_REQUESTED = re.compile(r"[Mm]odel rpc (\w+) requested")
_FINISHED = re.compile(r"[Mm]odel rpc (\w+) finished")
_RPC_PHASES = {"gen": GENERATE, "rollout": GENERATE, "ref": REFERENCE, "train": TRAIN}
_MARKS = (
    (re.compile(r"Launching experiments|Setting \w+ with the Following Values|Load weight begin"), START),
    (re.compile(r"init custom process group|update_weights_from"), WEIGHTS),
    (re.compile(r"fired up and ready|Prefill batch|Decode batch"), GENERATE),
    # A finished step says nothing about how far the next one came.
    (re.compile(r"Epoch \d+/\d+ [Ss]tep \d+/\d+"), ""),
)


class PhaseTracker:
    """Follows a log line by line."""

    def __init__(self) -> None:
        self.phase = ""
        self._open: list[str] = []

    def read_line(self, line: str) -> None:
        """Update the phase from one line."""
        requested = _REQUESTED.search(line)
        if requested:
            self._open.append(requested[1])
            self.phase = _of_rpc(requested[1])
            return
        finished = _FINISHED.search(line)
        if finished:
            if finished[1] in self._open:
                self._open.remove(finished[1])
            self.phase = _of_rpc(self._open[-1]) if self._open else ""
            return
        for pattern, phase in _MARKS:
            if pattern.search(line):
                self.phase = phase
                return


def phase_of_traceback(lines: Sequence[str]) -> str:
    """Return the phase that the frames of a traceback belong to; empty if unknown."""
    text = "\n".join(line for line in lines if line.lstrip().startswith("File ") or line.startswith("    "))
    return next((phase for pattern, phase in FRAMES if pattern.search(text)), "")


def _of_rpc(name: str) -> str:
    return next((phase for word, phase in _RPC_PHASES.items() if word in name), "")
