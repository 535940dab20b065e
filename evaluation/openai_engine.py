"""An engine over one running server with OpenAI's completions route (vLLM, SGLang, llama.cpp and others).

It is asked with token ids and answers in text, which is tokenised again: good for scores, not for training.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx

from trainer.errors import RunError, UserError
from trainer.types import Completion, SamplingParams

TRIES = 4
REQUEST_SECONDS = 3600.0


class OpenAIEngine:
    """Engine protocol over `url`; weights are the server's own, and stay.

    tokenizer: of the checkpoint that the server is said to serve.
    """

    def __init__(self, url: str, tokenizer: Any) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(
                f"--server-url {url or '(nothing)'}: give the address of a running server, http://HOST:PORT"
            )
        key = os.environ.get("OPENAI_API_KEY")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.tokenizer = tokenizer
        self.model = ""
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(REQUEST_SECONDS, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None),
        )

    @property
    def version(self) -> int:
        """Always 0."""
        return 0

    async def probe(self) -> str:
        """Ask which model it serves. Raises RunError when it does not answer."""
        answer = await self._call("GET", "/v1/models", None)
        models = answer.get("data") or []
        if not models:
            raise RunError(f"{self.url} serves no model: start it with the checkpoint that is to be evaluated")
        self.model = str(models[0]["id"])
        return self.model

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:  # noqa: ARG002
        """Sample one response. Raises RunError when the server does not answer it."""
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
        answer = await self._call("POST", "/v1/completions", body)
        choice = (answer.get("choices") or [{}])[0]
        ids = list(self.tokenizer(str(choice.get("text") or ""), add_special_tokens=False)["input_ids"])
        if choice.get("finish_reason") == "length":
            return Completion(ids, [0.0] * len(ids), "length", 0)
        ids.append(self.tokenizer.eos_token_id or 0)
        return Completion(ids, [0.0] * len(ids), "stop", 0)

    async def pause(self) -> None:
        """Nothing to do: its weights stay."""

    async def resume(self) -> None:
        """Nothing to do: its weights stay."""

    async def health(self) -> bool:
        """Whether it answers."""
        try:
            await self.probe()
        except RunError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(0.5 * 2**attempt)
            try:
                response = await self._client.request(method, self.url + path, json=body)
            except httpx.HTTPError as error:
                problem = f"the connection failed ({type(error).__name__} {error})"
                continue
            if response.is_success:
                return dict(response.json())
            problem = f"it answered {response.status_code}: {response.text[:300]}"
            if response.status_code < 500 and response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
        raise ServerGoneError(f"{self.url}{path}: {problem}. Start the server again, then the same command to go on")


class ServerGoneError(RunError):
    """The server does not answer, or refuses."""
