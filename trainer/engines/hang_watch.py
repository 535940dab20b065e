"""Finds servers that hang: they take requests and answer none, though their health endpoint answers.

A server may be silent for long without hanging: in a long turn under load, or while kernels are compiled. So it is
given up only where nothing was answered for twice the limit: first by silence, then although it was asked all the time
whether its engine does anything.
"""

from __future__ import annotations

import asyncio
import time

from trainer.engines.base import EngineError
from trainer.engines.dialect import Dialect
from trainer.engines.http import RefusedError, Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.errors import UserError

LOOK_SECONDS = 5.0
ASKS = 4
"""So often it is asked at least: one question may be lost, or this process be stopped until its time is over."""


async def watch_for_hangs(engine: ServedEngine, seconds: float) -> None:
    """Give up servers that hang (`Server.hang`), until cancelled; whoever started them starts them again.

    An update of the weights has limits of its own: nothing is asked of servers that it may have paused.

    Args:
        seconds: the limit; 0: none.
    """
    while seconds:
        await asyncio.sleep(min(LOOK_SECONDS, seconds / 4))
        if not engine.held:
            silent = [server for server in engine.pool.usable() if _silent(server) > seconds]
            await asyncio.gather(*(_ask(engine, server, seconds) for server in silent))


def _silent(server: Server) -> float:
    """Seconds for which it has answered none of the requests that it has."""
    return time.monotonic() - server.owing if server.in_flight else 0.0


async def _ask(engine: ServedEngine, server: Server, seconds: float) -> None:
    """Ask a silent server whether it works; it hangs where neither that nor a request is answered within `seconds`."""
    since, waited, each = server.owing, 0.0, seconds / ASKS
    while waited < seconds:
        began = time.monotonic()
        if await _works(engine.dialect, engine.pool, server, each):
            server.owing = time.monotonic()
        else:
            await asyncio.sleep(min(1.0, each))
        if server.problem or server.owing != since or not server.in_flight or engine.held:
            return
        waited += min(time.monotonic() - began, each)
    server.hang(
        f"it hangs: for {time.monotonic() - since:.0f} s it has answered none of its {server.in_flight} requests, nor "
        "whether it works"
    )


async def until_it_hangs(dialect: Dialect, server: Server, seconds: float) -> str:
    """Ask a server now and then whether it works, and return how it hangs once it has not said so for `seconds`.

    For a server whose requests come from others, such as a judge: nobody here knows what it owes.
    """
    pool, waited, each = ServerPool(dialect.health_path), 0.0, seconds / ASKS
    try:
        while waited < seconds:
            began = time.monotonic()
            working = await _works(dialect, pool, server, each)
            await asyncio.sleep(each if working else min(1.0, each))
            # Of a time in which this process was stopped no more counts than one question.
            waited = 0.0 if working else waited + min(time.monotonic() - began, each)
    finally:
        await pool.close()
    return f"it hangs: for {waited:.0f} s it has not answered whether it works"


async def _works(dialect: Dialect, pool: ServerPool, server: Server, seconds: float) -> bool:
    """Whether it says so, or cannot be asked: nothing can be said then."""
    server.in_flight += 1  # until it is at nothing its GPU memory is not taken away, and SGLang samples a token
    try:
        await dialect.check_working(pool, server, seconds)
    except RefusedError:
        return True
    except EngineError:
        return False
    except UserError:  # of this process, such as too many open files
        return True
    finally:
        server.in_flight -= 1
    return True
