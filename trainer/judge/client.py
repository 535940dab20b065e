"""Chat requests to OpenAI-compatible servers that need not live as long as the run.

A request whose server is gone, slow or overloaded is sent again, to another server where there is one, until `wait_s`
seconds have passed since any server answered. Meanwhile the run waits, and logs that. Servers that are too slow get
fewer requests at a time; one that answers nothing while others do is asked seldom. A request that a server refuses, or
that is too late again and again while others are answered, fails alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import orjson

from trainer.connections import JSON, open_session
from trainer.errors import RunError, UserError
from trainer.judge.cache import AnswerCache, request_key
from trainer.judge.priority_limiter import PriorityLimiter
from trainer.judge.reader import TooLate, Unanswered

log = logging.getLogger(__name__)

KEY_VARIABLE = "CLUSTERKIT_JUDGE_KEY"
TELL_EVERY_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
OVERLOADED = 429
TOO_MUCH = (OVERLOADED, 503)
"""Statuses of a server that has too many requests."""
MOST_LATE = 8
"""Tries of a request that is too late each time while others are answered: 128 slots can be halved seven times."""
ASIDE_S = 60.0
"""A server that is silent while others answer is asked again after so long, by one request."""
SHOWN = 300
"""Characters of a server's own words in a message."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: connect for a connection, answer for one answer, wait for servers that are gone."""

    answer: float = 120.0
    wait: float = 3600.0
    connect: float = 10.0


@dataclass(slots=True)
class ChatClient:
    """Client of servers that all serve one model.

    urls: addresses of the servers; called for every request, so that servers at new addresses are found.
    model: its name on the servers.
    concurrency: most requests in flight; fewer while servers are slow (see `PriorityLimiter`).
    patience: deadlines.
    cache: known answers.
    counters: requests, retries and so on since the last `ServedReader.counts`.
    """

    urls: Callable[[], Sequence[str]]
    model: str
    concurrency: int = 128
    patience: Timeouts = field(default_factory=Timeouts)
    cache: AnswerCache | None = None
    counters: Counter[str] = field(default_factory=Counter)
    _loop: asyncio.AbstractEventLoop | None = None
    _http: aiohttp.ClientSession | None = None
    _closer: asyncio.Task[None] | None = None
    _slots: PriorityLimiter | None = None
    _pending: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    _turn: int = 0
    _answered: float = 0.0
    _answers: dict[str, float] = field(default_factory=dict)
    _aside: dict[str, float] = field(default_factory=dict)
    _reported_at: float = 0.0

    async def chat(self, messages: list[dict[str, str]], **options: Any) -> str:
        """The text of one answer; the same request under way or answered before is not sent twice.

        Raises:
            Unanswered: the server refuses this request.
            TooLate: no server can answer it in time.
            RunError: no server has answered for `patience.wait` seconds, or they serve another model now.
        """
        request = {"model": self.model, "messages": messages, **options}
        key = request_key(request)
        request["seed"] = int(key[:7], 16)
        self._bind()
        self.counters["judge_requests"] += 1
        if self.cache is not None and (known := self.cache.get(key)) is not None:
            self.counters["judge_cached"] += 1
            return known
        if (other := self._pending.get(key)) is not None:
            self.counters["judge_cached"] += 1
            return await asyncio.shield(other)
        future = self._pending[key] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else need have waited
        try:
            answer = await self._send(request)
        except BaseException as error:
            future.set_exception(error if isinstance(error, Exception) else Unanswered("given up"))
            raise
        else:
            future.set_result(answer)
        finally:
            del self._pending[key]
        if self.cache is not None:
            self.cache.put(key, answer)
        return answer

    def _bind(self) -> None:
        """Open connections on the running event loop: they belong to one, and a run has several in turn."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop, self._pending = loop, {}
        self._slots = PriorityLimiter(self.concurrency)
        timeout = aiohttp.ClientTimeout(total=self.patience.answer, sock_connect=self.patience.connect)
        self._http = open_session(timeout=timeout, headers=headers() | JSON)
        self._closer = loop.create_task(_close_at_the_end(self._http))

    async def _send(self, request: dict[str, Any]) -> str:
        assert self._slots is not None
        began, pause, lost, late = time.monotonic(), FIRST_PAUSE_S, False, 0
        while True:
            async with self._slots:
                while True:
                    sent = time.monotonic()
                    try:
                        return await self._ask_each(request, verify=lost)
                    except _LostError as error:
                        lost, slow = True, error.slow
                        late += slow and self._answered > sent
                        if late == MOST_LATE:
                            raise TooLate(f"{error}, {late} times, while others were answered") from error
                        self._tell(str(error), since=max(began, self._answered))
                    if slow:
                        break  # gives the slot back: it may be one too many
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _ask_each(self, request: dict[str, Any], *, verify: bool) -> str:
        """The answer of the first server that gives one. Raises _LostError for the last where none does."""
        assert self._slots is not None
        problem = _LostError("no server is registered")
        for url in self._in_turn():
            sent = time.monotonic()
            try:
                answer = await self._ask(url, request, verify=verify)
            except _LostError as error:
                problem, verify = _LostError(f"{url}: {error}", slow=error.slow), True
                self.counters["judge_retries"] += 1
                if error.silent and self._answers.get(url, 0.0) < sent < self._answered:
                    self._set_aside(url, str(error))
                elif error.slow:
                    self._ask_fewer(sent)
                continue
            self._answered = self._answers[url] = time.monotonic()
            if self._aside.pop(url, 0.0):
                log.warning("the judge at %s answers again", url)
            self._slots.widen()
            if self._reported_at:
                log.warning("the judge answers again; the run goes on")
                self._reported_at = 0.0
            return answer
        raise problem

    def _ask_fewer(self, sent: float) -> None:
        assert self._slots is not None
        before = self._slots.allowed
        if self._slots.narrow(sent, time.monotonic()):
            log.warning(
                "%d requests at a time are too many for the judge: %d from now on, and more as it answers "
                "(judge.concurrency is the most, judge.timeout_s how long an answer may take)",
                before,
                self._slots.allowed,
            )

    def _in_turn(self) -> list[str]:
        urls = list(self.urls())
        self._turn += 1
        first = self._turn % len(urls) if urls else 0
        now = time.monotonic()
        due = [url for url in urls if url in self._aside and self._aside[url] <= now]
        self._aside |= dict.fromkeys(due, now + ASIDE_S)
        return sorted(urls[first:] + urls[:first], key=lambda url: (url not in due, url in self._aside))

    def _set_aside(self, url: str, problem: str) -> None:
        """Ask others first: else half of all requests wait for `patience.answer`, and fewer are sent at a time."""
        if url not in self._aside:
            log.warning(
                "the judge at %s does not answer (%s) while others do: they are asked in its place, and it once in "
                "%.0f s. Look at its log: it has more requests than it can answer in time, or is to be started again",
                url,
                problem,
                ASIDE_S,
            )
        self._aside[url] = time.monotonic() + ASIDE_S

    def _tell(self, problem: str, since: float) -> None:
        now = time.monotonic()
        waited = now - since
        if waited >= self.patience.wait:
            raise RunError(
                f"the judge has not answered for {waited:.0f} s ({problem}): start it again (clusterkit serve judge, "
                "or your own server), then the same command; the run goes on from its recover checkpoint. judge.wait_s "
                "sets how long a run waits"
            )
        if now - self._reported_at >= TELL_EVERY_S or not self._reported_at:
            self._reported_at = now
            log.warning(
                "the judge does not answer (%s): the run waits, up to %.0f s more, and goes on when it is back",
                problem,
                self.patience.wait - waited,
            )

    async def _ask(self, url: str, request: dict[str, Any], *, verify: bool) -> str:
        try:
            if verify:  # another server may have come back at this address
                _, listing = await self._call("GET", f"{url}/v1/models")
                served = served_models(orjson.loads(listing))
                if self.model not in served:
                    raise RunError(
                        f"the judge at {url} came back with {', '.join(served) or 'no model'} in place of "
                        f"{self.model}: start it with the same model, then the same command; the run goes on"
                    )
            status, content = await self._call("POST", f"{url}/v1/chat/completions", orjson.dumps(request))
        except aiohttp.ConnectionTimeoutError as error:
            raise _LostError(f"no connection within {self.patience.connect:g} s", silent=True) from error
        except TimeoutError as error:
            raise _LostError(f"no answer within {self.patience.answer:g} s", slow=True, silent=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _LostError(f"{type(error).__name__} {error}".strip()) from error
        except ValueError as error:
            raise _LostError(f"its list of models is not JSON ({error})") from error
        text = content.decode("utf-8", "replace")
        if status == OVERLOADED or status >= 500:
            raise _LostError(f"status {status}: {text[:SHOWN]}", slow=status in TOO_MUCH)
        require_key(status, url)
        if status >= 400:
            raise Unanswered(f"status {status}: {text[:SHOWN]}")
        try:
            text = orjson.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Unanswered(f"no chat completion: {text[:200]!r}") from error
        return str(text or "")

    async def _call(self, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and content of one answer."""
        assert self._http is not None
        async with self._http.request(method, url, data=body, allow_redirects=False) as answer:
            return answer.status, await answer.read()


async def _close_at_the_end(session: aiohttp.ClientSession) -> None:
    """Close the session when its event loop ends, which cancels this task."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await session.close()


class UnreachableError(UserError):
    """No judge answers at an address."""


class _LostError(Exception):
    """The server is gone, slow or overloaded, so another try may succeed.

    slow: it has too many requests. silent: the time for its answer or a connection has passed.
    """

    def __init__(self, problem: str, *, slow: bool = False, silent: bool = False) -> None:
        super().__init__(problem)
        self.slow, self.silent = slow, silent


def headers() -> dict[str, str]:
    """Headers of every request: the key, where there is one."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def require_key(status: int, url: str) -> None:
    """Raise UserError where a server did not answer for want of a key."""
    if status in (401, 403):
        raise UserError(f"the judge at {url} asks for a key: put it into the variable {KEY_VARIABLE}")


def served_models(listing: Any) -> list[str]:
    """Names in an answer of /v1/models. Raises ValueError for anything else."""
    try:
        return [str(model["id"]) for model in listing["data"]]
    except (KeyError, TypeError) as error:
        raise ValueError("no list of models") from error


def verify_model(url: str, expected: str, timeout: float = 10.0) -> str:
    """Name under which a server serves the wanted model.

    Args:
        expected: the model's name, or its last part (org/name, /models/name); empty: the only one that it serves.
        timeout: seconds.

    Raises:
        UnreachableError: the server cannot be reached, or is no such server.
        UserError: it serves another model.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=timeout, headers=headers(), trust_env=False)
        require_key(answer.status_code, url)
        answer.raise_for_status()
        served = served_models(answer.json())
    except (httpx.HTTPError, ValueError) as error:
        raise UnreachableError(
            f"the judge at {url} cannot be reached ({type(error).__name__}: {error}): start it (clusterkit serve judge "
            "--model-path NAME, or your own OpenAI-compatible server and judge.url=http://HOST:PORT), then this "
            "command again"
        ) from error
    matching = [name for name in served if not expected or name == expected or _last(name) == _last(expected)]
    if len(matching) == 1:
        return matching[0]
    raise UserError(
        f"the judge at {url} serves {', '.join(served) or 'nothing'}"
        + (
            f", not {expected}: start it with that model, or set judge.model"
            if expected
            else ": choose one with judge.model"
        )
    )


def verify_chat(url: str, model: str, timeout: float) -> None:
    """Ask for one token as a run does: a server that lists its model may still refuse chats.

    Raises:
        UnreachableError: no answer, or an error of the server; an overloaded server passes, it may answer later.
        UserError: it refuses chats.
    """
    request = {"model": model, "messages": [{"role": "user", "content": "Reply with yes."}], "max_tokens": 1}
    try:
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=request, timeout=timeout, headers=headers(), trust_env=False
        )
    except httpx.HTTPError as error:
        raise UnreachableError(
            f"the judge at {url} lists {model} and answers no chat ({type(error).__name__}: {error}): look at its log; "
            "judge.timeout_s is how long an answer may take"
        ) from error
    require_key(answer.status_code, url)
    if answer.is_success or answer.status_code == OVERLOADED:
        return
    refusal = f"the judge at {url} serves {model}, and answers a chat with status {answer.status_code}"
    if answer.status_code >= 500:
        raise UnreachableError(f"{refusal} ({answer.text[:SHOWN]}): look at its log, and start it again")
    raise UserError(f"{refusal} ({answer.text[:SHOWN]}): serve a model with a chat template over OpenAI's chat route")


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
