"""asyncssh, imported without the parts that nobody here has a use for: a fifth of what its import costs.

All modules of this package take asyncssh from here.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOADER_CACHE = Path("/etc/ld.so.cache")


@contextmanager
def _quick_search_for_libraries() -> Iterator[None]:
    """asyncssh looks for two optional libraries in a way that starts compilers and linkers where they are missing.

    One that the loader's cache does not mention is missing, unless the user has named further folders.
    """
    try:
        known = _LOADER_CACHE.read_bytes()
    except OSError:  # another system
        known = b""
    if not known or "LD_LIBRARY_PATH" in os.environ:
        yield
        return
    thorough = ctypes.util.find_library
    ctypes.util.find_library = lambda name: thorough(name) if f"/lib{name}.so".encode() in known else None
    try:
        yield
    finally:
        ctypes.util.find_library = thorough


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Let an optional module count as not installed."""
    absent = module not in sys.modules
    if absent:
        sys.modules[module] = None  # type: ignore[assignment]  # what Python itself provides for this
    try:
        yield
    finally:
        if absent:
            del sys.modules[module]


# SSH with X.509 certificates: OpenSSH has none, and we trust none.
with _quick_search_for_libraries(), _without("asyncssh.crypto.x509"):
    import asyncssh
    from asyncssh.encryption import get_default_encryption_algs
    from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs

__all__ = ["asyncssh", "get_default_certificate_algs", "get_default_encryption_algs", "get_default_public_key_algs"]
