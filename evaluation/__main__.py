"""`python -m evaluation CONFIG.yaml`: run an evaluation; prints {"results": FOLDER, "status": …} on stdout.

Exit codes: 0 complete, 1 failed or incomplete, 2 bad configuration, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path

from evaluation.config import EvalConfig
from evaluation.evaluate import evaluate
from trainer.configfile import read_config
from trainer.errors import UserError
from trainer.signals import StopFlag


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m evaluation", description=__doc__)
    parser.add_argument("config", type=Path, help="the EvalConfig, as `clusterkit eval` writes it")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    stop = StopFlag().install()
    try:
        config = read_config(arguments.config, EvalConfig)
        place = evaluate(config, stop)
        status = json.loads((place / "results.json").read_text(encoding="utf-8"))["status"]
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        known = isinstance(error, UserError)
        sys.stderr.write(f"error: {error if known else f'{type(error).__name__}: {error}'}\n")
        if not known and not arguments.debug:
            sys.stderr.write("this is a fault of clusterkit or of this machine: --debug shows where it happened\n")
        return error.exit_code if isinstance(error, UserError) else 1
    print(json.dumps({"results": str(place), "status": status}))
    return 0 if status == "complete" else 1


if __name__ == "__main__":
    sys.exit(main())
