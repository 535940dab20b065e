"""`python -m trainer CONFIG.yaml`: run a resolved configuration. Exit codes: 0, 1 failed, 2 bad configuration, 130."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from trainer.config import RunConfig
from trainer.configfile import read_config
from trainer.errors import UserError
from trainer.signals import StopFlag


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("config", type=Path, help="the resolved RunConfig, as `clusterkit train` writes it")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    stop = StopFlag().install()  # first of all: a signal during the imports is kept, too
    try:
        config = read_config(arguments.config, RunConfig)
        from trainer.launch.local import train  # noqa: PLC0415 (seconds of imports, after the cheap checks)

        train(config, stop)
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        known = isinstance(error, UserError)
        message = f"error: {error if known else f'{type(error).__name__}: {error}'}\n"
        if not known and not arguments.debug:
            message += "main.log has the traceback, if the run had begun; --debug shows it\n"
        with suppress(OSError):  # our output may lie on the very disk that is full
            sys.stderr.write(message)
            sys.stderr.flush()
        return error.exit_code if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
