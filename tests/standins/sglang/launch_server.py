"""Starts tests/weightserver.py with SGLang's command line: a run's hosts start it as they would start SGLang."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from weightserver import Faults, Weights, listen


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp-size", type=int, required=True)
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--enable-memory-saver", action="store_true")
    given, _ = parser.parse_known_args()
    faults = Faults(memory_saver=given.enable_memory_saver, tensor_parallel=given.tp_size)
    weights = Weights(given.model_path, faults)
    weights.version = given.weight_version
    listen(weights, given.host, given.port).serve_forever()


main()
