"""The commands of the node side: `python -m MODULE CONFIG.yaml`, their errors and exit codes."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import UserError
from trainer.signals import StopFlag

FAULT = "this is a fault of clusterkit or of this machine: --debug shows where it happened"
SPIN_COUNT = "1000"
"""Turns that an OpenMP thread waits for the others before it sleeps; the 300,000 of libgomp keep a core from them.

Fewer cost a training that is alone time. What was measured is in docs/performance.md.
"""


def run_command(
    program: str, description: str | None, work: Callable[[Path, StopFlag], int], fault: str = FAULT
) -> int:
    """Do the work of a command line that names a configuration; errors become one message on stderr.

    Args:
        work: gets the configuration's file and the flag that a signal sets; returns the exit code.
        fault: line that follows an error which is none of the user's.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("config", type=Path, help="the configuration, as clusterkit writes it")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # libgomp reads it when PyTorch is imported, in `work`
    stop = StopFlag().install()  # before the imports of `work`: a signal during them is kept, too
    try:
        return work(arguments.config, stop)
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        known = isinstance(error, UserError)
        message = f"error: {error if known else f'{type(error).__name__}: {error}'}\n"
        if not known and not arguments.debug:
            message += f"{fault}\n"
        with suppress(OSError):  # our output may lie on the very disk that is full
            sys.stderr.write(message)
            sys.stderr.flush()
        return error.exit_code if isinstance(error, UserError) else 1


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import in the block what makes hundreds of thousands of objects: PyTorch and transformers.

    Python's garbage collector would look through them again and again, a fifth of the seconds that they take; nor does
    it look at them afterwards.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
