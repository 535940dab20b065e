"""The dialect of every kind of inference server."""

from __future__ import annotations

from trainer.engines.dialect import Dialect, Kind
from trainer.engines.sglang_dialect import SGLangDialect
from trainer.engines.vllm_dialect import VLLMDialect


def make_dialect(kind: Kind, adapters: bool = False) -> Dialect:
    """The dialect of a kind of server. adapters: see `Dialect.adapters`."""
    dialect = SGLangDialect() if kind == "sglang" else VLLMDialect()
    dialect.adapters = adapters
    return dialect
