"""One grading process: reads `{"truths", "answer", "lenient"}` a line, writes `{"right", "reason"}` a line.

The kernel ends it when one comparison takes more CPU time than the deadline, even inside a C function; its memory is
bounded. `trainer.grading.pool` starts it, and starts another when it has ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from trainer.grading.mathematics import judge


def main(deadline: float, memory_bytes: int) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what libraries print must not look like an answer
    judge(["\\frac{1}{2}"], "0.25")  # imports and grammars take their time before the first deadline
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # Ctrl-C is for the evaluation, whose end closes our input
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        item = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, deadline)
        try:
            verdict = judge(item["truths"], item["answer"], item["lenient"])
            right, reason = verdict.right, verdict.reason
        except MemoryError:
            right, reason = False, f"gave up: comparing takes more than {memory_bytes >> 20} MiB of memory"
        except RecursionError:
            right, reason = False, "gave up: nested too deeply"
        except Exception as error:  # whatever a parser makes of a model's text
            right, reason = False, f"cannot be compared: {type(error).__name__}: {str(error)[:120]}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps({"right": right, "reason": reason}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
