"""`python -m trainer.launch.job CONFIG.yaml`: what a Ray job runs on the head node; keeps one attempt of the trainer.

The trainer's output goes to attempt_N/console.log beside the run's other files, and to the job's own log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from trainer.paths import new_attempt

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Run the trainer to its end and return its exit code, 128 + N where signal N ended it."""
    if len(arguments) != 1:
        print("usage: python -m trainer.launch.job CONFIG.yaml", file=sys.stderr)
        return 2
    config = Path(arguments[0])
    try:
        attempt = new_attempt(config.parent)
        return _attempt(config, attempt)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _attempt(config: Path, attempt: int) -> int:
    environment = {**os.environ, "CLUSTERKIT_ATTEMPT": str(attempt)}
    console = config.parent / f"attempt_{attempt}" / "console.log"
    command = [sys.executable, "-m", "trainer", str(config)]
    with console.open("ab", buffering=0) as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)

        def hand_on(number: int, _frame: FrameType | None) -> None:
            process.send_signal(number)

        for number in _SIGNALS:
            signal.signal(number, hand_on)
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 65536):
            file.write(data)
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
