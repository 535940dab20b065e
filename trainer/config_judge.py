"""Section of a RunConfig about who answers and judges for a memory's reward. See trainer/config.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trainer.config_parts import Section


class JudgeConfig(Section):
    """reward.name=memalpha: the frozen model that answers from a memory and judges what was written into it."""

    reader: Literal["server", "rules"] = "server"
    """server: a model behind an OpenAI-compatible server. rules: a few lines of code that know facts `KEY value`; for
    task.name=facts on a CPU."""
    url: str = ""
    """Server, as http://HOST:PORT or several with commas between; empty: the servers that `clusterkit serve judge`
    registered for this experiment and trial. A key that it asks for is read from CLUSTERKIT_JUDGE_KEY only."""
    model: str = ""
    """Name (or its last part) of the model that the server must serve; empty: the one that it serves, if it is one."""
    concurrency: Annotated[int, Field(ge=1)] = 128
    """Most requests that one process of the run has under way."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds for one answer; then the request is sent again."""
    wait_s: Annotated[float, Field(ge=0)] = 3600.0
    """Seconds that the run waits for servers that stopped answering before it ends; its checkpoints are kept."""
    top_k: Annotated[int, Field(ge=1)] = 20
    """Entries of each store that a question is answered from, the best ones by BM25."""
    answer_tokens: Annotated[int, Field(ge=1)] = 2048
    """Longest answer to a question."""
    answer_temperature: Annotated[float, Field(ge=0)] = 0.7
    """Sampling temperature of answers."""
    verdict_tokens: Annotated[int, Field(ge=8)] = 512
    """Longest verdict on an entry."""
    cache: bool = True
    """Keep answers and verdicts on disk (in the cache folder) by the content of the request."""

    @field_validator("url")
    @classmethod
    def _addresses(cls, url: str) -> str:
        for one in filter(None, (part.strip() for part in url.split(","))):
            if not one.startswith(("http://", "https://")) or "@" in one:
                raise ValueError(f"url {one!r} is no address such as http://10.0.0.5:30000 (and a key goes elsewhere)")
        return url

    @model_validator(mode="after")
    def _somebody_asks_the_server(self) -> JudgeConfig:
        if self.url and self.reader == "rules":
            raise ValueError("url names a server that judge.reader=rules never asks: set judge.reader=server as well")
        return self
