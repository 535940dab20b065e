"""`python -m evaluation CONFIG.yaml`: run an evaluation; prints {"results": FOLDER, "status": …} on stdout.

Exit codes: 0 complete, 1 failed or incomplete, 2 bad configuration, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evaluation.config import EvalConfig
from evaluation.evaluate import evaluate
from trainer.configfile import read_config
from trainer.disk import file_failure
from trainer.entry import run_command
from trainer.signals import StopFlag


def main() -> int:
    """Entry point; returns the exit code."""
    return run_command("python -m evaluation", __doc__, _evaluate)


def _evaluate(path: Path, stop: StopFlag) -> int:
    try:
        place = evaluate(read_config(path, EvalConfig), stop)
    except PermissionError as error:
        if error.filename is None:
            raise
        raise file_failure(error) from error
    status = json.loads((place / "results.json").read_text(encoding="utf-8"))["status"]
    print(json.dumps({"results": str(place), "status": status}))
    return 0 if status == "complete" else 1


if __name__ == "__main__":
    sys.exit(main())
