"""Run a command for which flock fails, or says yes and does nothing, as on some network file systems.

    python nolocks.py ERRNO COMMAND…       0: it succeeds without any effect

It stands in for such mounts, which take a kernel with their file system and a server. The answer is the kernel's own
(seccomp), so the command and all its children get it from every file.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

NUMBERS = {"x86_64": (0xC000003E, 73), "aarch64": (0xC00000B7, 32)}
"""What the kernel calls the processor, and flock, by `uname -m`."""
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2


def words(error: int) -> tuple[str, ...]:
    """Words before a command that run it so."""
    return (sys.executable, str(Path(__file__).resolve()), str(error))


def main(error: int, command: list[str]) -> None:
    arch, flock = NUMBERS[os.uname().machine]
    program = [
        (LOAD, 0, 0, 4),
        (EQUAL, 0, 3, arch),
        (LOAD, 0, 0, 0),
        (EQUAL, 0, 1, flock),
        (RETURN, 0, 0, ERRNO | error),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    description = struct.pack("@HP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, description, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
