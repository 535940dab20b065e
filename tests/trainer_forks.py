"""Starts trainers at the price of a fork: imports what `python -m trainer` imports once, then forks a child a command.

Every child is a process of its own that calls `trainer.__main__.main()`; it can be signalled and killed as any other.
Reads one JSON object a line ({"argv": [...], "console": path, "fill": [folder, bytes] or null, "fill_at": function: see
fulldisk.py}) and answers `pid N`, later `exit CODE`, where a negative code means a signal.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from fulldisk import fill_when_called

import trainer.launch.local  # noqa: F401 (the seconds that are saved)
from trainer.__main__ import main


def child(argv: list[str], console: str) -> int:
    out = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["trainer", *argv]
    return main()


def serve() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if not pid:
            code = 70
            try:
                if command["fill"]:
                    folder, free = command["fill"]
                    fill_when_called(Path(folder), free, command["fill_at"])
                code = child(command["argv"], command["console"])
            except SystemExit as error:
                code = int(error.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(f"pid {pid}", flush=True)
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.005)
        print(f"exit {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)


if __name__ == "__main__":
    serve()
