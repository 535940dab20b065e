"""`python -m evaluation.ask CONFIG.yaml`: read a document with a memory and answer one question about it.

Prints a line of JSON on stdout for every event: `document` before the reading, `section` after each section with the
memory as it then is, and `answer`.

Exit codes: 0 answered, 1 failed, 2 bad configuration, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from evaluation.config import AskConfig
from trainer.configfile import read_config
from trainer.entry import quick_imports, run_command
from trainer.signals import StopFlag


def _print_event(**event: Any) -> None:
    print(json.dumps(event), flush=True)  # ASCII: whatever the locale


def _answer(path: Path, stop: StopFlag) -> int:
    config = read_config(path, AskConfig)
    with quick_imports():
        from evaluation.reading import answer_question  # noqa: PLC0415 (seconds of imports)
    answer_question(config, _print_event, stop)
    return 0


def main() -> int:
    """Entry point; returns the exit code."""
    return run_command("python -m evaluation.ask", __doc__, _answer)


if __name__ == "__main__":
    sys.exit(main())
