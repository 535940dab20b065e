"""RULER-style question answering: HotpotQA questions among as many documents as a length in tokens holds."""

from __future__ import annotations

from evaluation.suites.base import CountTokens, Suite
from evaluation.suites.hqa import build_items, hqa_suite
from trainer.tasks.hotpotqa_data import find_folder, load_corpus
from trainer.types import Task

SAMPLED_DOCUMENTS = 400


def text_qa_suite(tokens: int, folder: str | None, cache_dir: str = "", limit: int = 0) -> Suite:
    """ruler_qa@TOKENS: the rebuilt RULER-HQA items, with a length instead of a number of documents."""
    files = hqa_suite(2, folder, cache_dir).identity["files"]
    place = find_folder(folder, cache_dir)
    identity = {"kind": "ruler-qa-1", "tokens": tokens, "files": files, "limit": limit}

    def load(count: CountTokens) -> list[Task]:
        documents = load_corpus(place).documents[:SAMPLED_DOCUMENTS]
        rendered = "\n\n".join(f"Document {number}:\n{d.render()}" for number, d in enumerate(documents, 1))
        each = count(rendered) / len(documents)
        return build_items(place, max(int(tokens / each), 2), limit)

    return Suite(f"ruler_qa@{tokens}", "any_string", identity, load, True, 0, str(place))
