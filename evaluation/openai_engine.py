"""An engine over one running server with OpenAI's completions route (vLLM, SGLang, llama.cpp and others).

It is asked with token ids and answers in text, which is tokenised again: good for scores, not for training.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import httpx

from evaluation.progress import say
from trainer.engines.base import EngineError
from trainer.engines.sharing import PrefixSharing
from trainer.errors import RunError, UserError
from trainer.types import Completion, SamplingParams

TRIES = 4
LOOK_SECONDS = 1.0
AWAY = (502, 503, 504)
"""Statuses of a proxy whose server is gone, and of a server that is starting."""
UNWANTED = (401, 403, 404)
"""Statuses that every other request would get, too: a wrong key, a model that is not served."""
REQUEST_SECONDS = 3600.0


class OpenAIEngine:
    """Engine over one server, whose weights never change.

    Args:
        tokenizer: tokenizer of the checkpoint that it is said to serve.
        wait_s: seconds to wait for a server that has answered before.
    """

    def __init__(self, url: str, tokenizer: Any, wait_s: float = 0.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(
                f"--server-url {url or '(nothing)'}: give the address of a running server, http://HOST:PORT"
            )
        key = os.environ.get("OPENAI_API_KEY")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.tokenizer = tokenizer
        self.model = ""
        self.wait_s = 0.0
        self._patience = wait_s
        self._away_since: float | None = None
        self.sharing = PrefixSharing(self._read_prefix, lambda _key: self.url)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(REQUEST_SECONDS, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None),
        )

    async def probe(self) -> str:
        """Ask which model it serves; from then on it is waited for. Raises RunError when it does not answer."""
        answer = await self._call("GET", "/v1/models", None)
        models = answer.get("data") or []
        if not models:
            raise RunError(f"{self.url} serves no model: start it with the checkpoint that is to be evaluated")
        self.model = str(models[0]["id"])
        self.wait_s = self._patience
        return self.model

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        """Sample one response. Raises RunError when the server is gone, EngineError when it refuses this request."""
        with self.sharing.member(key):
            sent = await self.sharing.ready(prompt_ids, key)
            answer = await self._complete(prompt_ids, params)
            self.sharing.answered(sent, self.url)
        choice = (answer.get("choices") or [{}])[0]
        ids = list(self.tokenizer(str(choice.get("text") or ""), add_special_tokens=False)["input_ids"])
        if choice.get("finish_reason") == "length":
            return Completion(ids, [0.0] * len(ids), "length", 0)
        ids.append(self.tokenizer.eos_token_id or 0)
        return Completion(ids, [0.0] * len(ids), "stop", 0)

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        """See `Engine`."""
        self.sharing.expect(prefix_ids, key)

    async def _complete(self, prompt_ids: list[int], params: SamplingParams) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed & (2**31 - 1),
        }
        if params.top_k > 0:
            body["top_k"] = params.top_k
        return await self._call("POST", "/v1/completions", body)

    async def _read_prefix(self, ids: list[int], key: str) -> str | None:  # noqa: ARG002 (there is one server)
        """Have ids read, for `PrefixSharing`; whether the server keeps them is its own affair."""
        try:
            await self._complete(ids, SamplingParams(1))
        except (EngineError, ServerGoneError):
            return None
        return self.url

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """Send a request until it is answered, waiting up to `wait_s` seconds for a server that is gone.

        Raises:
            ServerGoneError: it was gone for too long, or refuses every request.
            EngineError: it refuses this one request.
        """
        tries = 0
        while True:
            problem = ""
            try:
                response = await self._client.request(method, self.url + path, json=body)
            except httpx.HTTPError as error:
                away = f"the connection failed ({type(error).__name__} {error})".replace(" )", ")")
            else:
                if response.is_success:
                    self._back()
                    return dict(response.json())
                problem = f"it answered {response.status_code}: {response.text[:300]}"
                away = problem if response.status_code in AWAY else ""
            if away:
                await self._wait(away)
                continue
            self._back()
            if response.status_code in UNWANTED:
                raise ServerGoneError(f"{self.url}{path}: {problem}. Put that right, then the same command goes on")
            tries += 1
            if tries == TRIES or (response.status_code < 500 and response.status_code != httpx.codes.TOO_MANY_REQUESTS):
                raise EngineError(f"{self.url}{path}: {problem}")
            await asyncio.sleep(0.5 * 2**tries)

    async def _wait(self, problem: str) -> None:
        """Wait between two tries. Raises ServerGoneError when the server was gone for too long."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            if self.wait_s:
                say(f"{self.url} does not answer: {problem}. Waiting for it for up to {self.wait_s:.0f} s")
        if now - self._away_since >= self.wait_s:
            waited = f", for {self.wait_s:.0f} s now" if self.wait_s else ""
            raise ServerGoneError(
                f"{self.url} does not answer{waited}: {problem}. To go on: start the server again, then the same "
                "command"
            )
        await asyncio.sleep(min(LOOK_SECONDS, self.wait_s))

    def _back(self) -> None:
        if self._away_since is not None:
            self._away_since = None
            say(f"{self.url} answers again")


class ServerGoneError(RunError):
    """The server does not answer, or refuses every request."""
