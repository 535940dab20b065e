"""`python -m trainer CONFIG.yaml`: run a resolved configuration. Exit codes: 0, 1 failed, 2 bad configuration, 130."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.config import RunConfig
from trainer.configfile import read_config
from trainer.entry import quick_imports, run_command
from trainer.signals import StopFlag


def main() -> int:
    """Entry point; returns the exit code."""
    fault = "main.log has the traceback, if the run had begun; --debug shows it"
    return run_command("python -m trainer", __doc__, _train, fault)


def _train(path: Path, stop: StopFlag) -> int:
    config = read_config(path, RunConfig)
    with quick_imports():
        from trainer.launch.local import train  # noqa: PLC0415 (seconds of imports, after the cheap checks)

    train(config, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
