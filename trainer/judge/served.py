"""The reader behind a server: what it is asked, and how its answers are read."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.config_parts import JudgeConfig
from trainer.errors import UserError
from trainer.judge.cache import AnswerCache
from trainer.judge.client import ChatClient, Timeouts, UnreachableError, verify_chat, verify_model
from trainer.judge.reader import TooLate, Unanswered, words_of
from trainer.judge.servers import judge_urls, judges_folder
from trainer.paths import cache_folder, user_name
from trainer.serving import registry

log = logging.getLogger(__name__)

ANSWER_RULES = """Answer the question from the memory below and from nothing else. Answer as briefly as the question \
allows. Where the memory says how answers are to look, keep to that; put a label or number that is asked for into \
\\boxed{{}}. Where the memory does not hold the answer, say that you do not know.

## core
{core}

## semantic
{semantic}

## episodic
{episodic}"""

AGREES = """Does the answer say what the correct answer says? Other words are fine, and so is more than was asked for; \
a part of it is not enough. Reply with yes or no and nothing else.

Question: {question}
Correct answer: {gold}
Answer: {answer}"""

WORTH = """An agent keeps a memory of a long text. core: what matters throughout. semantic: facts, definitions, \
labels, rules. episodic: what happened, and when. Is the entry below a valid one of its store: clear on its own, \
concrete, free of empty phrases and of instructions or tool syntax, and of the right kind? Reply with one JSON object \
and nothing else: {{"VALID": true or false}}

Store: {store}
Entry: {content}"""

# The verdict alone: a reason after it would not shape it, and cost tokens.
VERDICT_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "schema": {
            "type": "object",
            "properties": {"VALID": {"type": "boolean"}},
            "required": ["VALID"],
            "additionalProperties": False,
        },
    },
}
AGREES_TOKENS = 50
TRIES = 2
_THINK_END = "</think>"
_YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class ServedReader:
    """Reader over a ChatClient. top_k: entries of each store that a question is answered from."""

    def __init__(
        self, client: ChatClient, top_k: int, answer_tokens: int, answer_temperature: float, verdict_tokens: int
    ) -> None:
        self.client, self.top_k = client, top_k
        self.answer_tokens, self.answer_temperature = answer_tokens, answer_temperature
        self.verdict_tokens = verdict_tokens
        self._schema = True

    async def answer(self, question: str, memory: dict[str, Any]) -> str:
        """See Reader; shows half as many entries each time the request is too long for the server."""
        found = {
            store: list(ranking_of(tuple(memory[store].items()), self.top_k).best(question).values())
            for store in ("semantic", "episodic")
        }
        count = max(map(len, found.values()))
        while True:
            shown = {store: "\n".join(f"- {text}" for text in texts[:count]) for store, texts in found.items()}
            rules = ANSWER_RULES.format(
                core=memory["core"] or "(empty)", **{store: text or "(empty)" for store, text in shown.items()}
            )
            messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
            try:
                reply = await self.client.chat(
                    messages, max_tokens=self.answer_tokens, temperature=self.answer_temperature, **_NO_THINKING
                )
            except Unanswered as problem:
                if not count or isinstance(problem, TooLate):
                    self.client.counters["judge_unanswered"] += 1
                    raise
                count //= 2
                self.client.counters["judge_shortened"] += 1
                continue
            return after_thinking(reply)

    async def agrees(self, question: str, gold: str, answer: str) -> bool:
        """See Reader; asks a second time where the reply is neither yes nor no."""
        prompt = AGREES.format(question=question, gold=gold, answer=answer)
        return await self._verdict(prompt, read_yes_no, AGREES_TOKENS, 0.0, {})

    async def worth_keeping(self, store: str, content: str, chunk: str) -> bool:  # noqa: ARG002 (judged on its own)
        """See Reader; asks a second time where the reply holds no verdict."""
        prompt = WORTH.format(store=store, content=content)
        return await self._verdict(prompt, read_verdict, self.verdict_tokens, 0.1, {"response_format": VERDICT_SCHEMA})

    def counts(self) -> dict[str, float]:
        """See Reader."""
        taken, self.client.counters = self.client.counters, Counter()
        return {name: float(value) for name, value in taken.items()}

    async def _verdict(
        self,
        prompt: str,
        read: Callable[[str], bool | None],
        tokens: int,
        temperature: float,
        form: dict[str, Any],
    ) -> bool:
        reply = why = ""
        for attempt in range(TRIES):
            extra = form if self._schema else {}
            # A second try that is the same request would be found in the cache.
            messages = [{"role": "user", "content": prompt + "\n\nReply in English." * attempt}]
            try:
                reply = await self.client.chat(
                    messages, max_tokens=tokens, temperature=temperature, **extra, **_NO_THINKING
                )
            except Unanswered as problem:
                if not extra or isinstance(problem, TooLate):
                    why = str(problem)
                    break
                self._schema = False  # a server that knows no schemas is asked without
                continue
            if (verdict := read(reply)) is not None:
                return verdict
            self.client.counters["judge_unreadable"] += 1
        self.client.counters["judge_unanswered"] += 1
        raise Unanswered(why or f"no verdict in {reply[:100]!r}")


def after_thinking(text: str) -> str:
    """The text after the model's thoughts, where there are any."""
    return text.rpartition(_THINK_END)[2].strip()


def read_yes_no(text: str) -> bool | None:
    """The first yes or no; None where there is neither, or both are named at once."""
    reply = {word.lower() for word in _YES_NO.findall(after_thinking(text)[:200])}
    return None if len(reply) != 1 else reply == {"yes"}


def read_verdict(text: str) -> bool | None:
    """VALID of the first JSON object that has it; None where there is none."""
    text = after_thinking(text)
    decoder, position = json.JSONDecoder(strict=False), 0
    while (position := text.find("{", position)) >= 0:
        try:
            value, _ = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found = {str(key).upper(): item for key, item in value.items()}.get("VALID")
            words = {True: True, False: False, "true": True, "false": False, "yes": True, "no": False}
            if isinstance(found, bool | str):
                return words.get(found.lower() if isinstance(found, str) else found)
        position += 1
    return None


def find_urls(config: RunConfig) -> Sequence[str]:
    """Addresses of the servers: judge.url, else those that are registered for the trial."""
    if config.judge.url:
        return addresses(config.judge.url)
    return judge_urls(registry_of(config))


def addresses(text: str) -> list[str]:
    """Addresses in a text with commas between them."""
    return [url.strip().rstrip("/") for url in text.split(",") if url.strip()]


def registry_of(config: RunConfig) -> Path:
    """Folder where the servers of this run are registered."""
    return judges_folder(config.fileroot, user_name(), config.experiment_name, config.trial_name)


def make_served_reader(config: RunConfig) -> ServedReader:
    """The reader of a run.

    Raises:
        UserError: no server is named or registered, none can be reached, or one serves another model.
    """
    judge = config.judge
    urls = find_urls(config)
    if not urls:
        raise UserError(
            f"no judge is registered for {config.experiment_name}/{config.trial_name} and answers (none in "
            f"{registry_of(config)}): start one with `clusterkit serve judge "
            f"{config.experiment_name}/{config.trial_name} --model-path {judge.model or 'NAME'}`, "
            "on a cluster with --cluster NAME, or name a server with judge.url=http://HOST:PORT"
        )
    bases = set() if judge.url else {one.base for one in registry.read(registry_of(config)) if one.state == "ready"}
    weights = bases.pop() if len(bases) == 1 else ""
    return connect(judge, urls, lambda: find_urls(config), cache_folder(config), weights)


def connect(
    judge: JudgeConfig, urls: Sequence[str], again: Callable[[], Sequence[str]], cache: Path, weights: str = ""
) -> ServedReader:
    """Make a reader over servers.

    Args:
        again: addresses for later requests: servers may come back elsewhere.
        weights: digest of what they serve, where it is known: another model may have the name one day.

    Raises:
        UserError: no server answers a chat, or one serves another model than is wanted or than the others.
    """
    names, away = [], None
    for url in urls:
        try:
            name = verify_model(url, judge.model)
            verify_chat(url, name, judge.timeout_s)
            names.append(name)
        except UnreachableError as error:
            away = error
            log.warning("%s; the run begins with the others", error)
    if away is not None and not names:
        raise away
    if len(set(names)) > 1:
        raise UserError(f"the judges serve different models ({', '.join(names)}): let all of them serve one")
    place = re.sub(r"[^\w.-]", "_", names[0]) + (f"-{weights[:12]}" if weights else "")
    kept = AnswerCache(cache / "judge" / place) if judge.cache else None
    client = ChatClient(again, names[0], judge.concurrency, Timeouts(judge.timeout_s, judge.wait_s), kept)
    return ServedReader(client, judge.top_k, judge.answer_tokens, judge.answer_temperature, judge.verdict_tokens)


class Ranking:
    """The entries of one store, indexed once for many questions.

    BM25 in Lucene's form (Kamphuis et al. 2020), whose weights are never negative: with the few entries of a memory
    the original formula gives a word that half of them hold a weight of zero.
    """

    def __init__(self, entries: dict[str, str], top_k: int) -> None:
        self.entries, self.top_k = entries, top_k
        tokens = [words_of(text) for text in entries.values()]
        self._index = None
        if len(entries) > top_k and any(tokens):
            from trainer.bm25 import bm25s  # noqa: PLC0415 (numpy and more, which a store of few entries has no use for)

            self._index = bm25s.BM25(method="lucene")
            self._index.index(tokens, show_progress=False)

    def best(self, question: str) -> dict[str, str]:
        """At most `top_k` entries, the best first; all of them, in order, where there are no more than that."""
        names = list(self.entries)
        if len(names) <= self.top_k:
            return dict(self.entries)
        if self._index is None:  # no entry holds a word
            return {name: self.entries[name] for name in names[: self.top_k]}
        known = [word for word in words_of(question) if word in self._index.vocab_dict]
        if not known:  # nothing to go by: the newest ones
            return {name: self.entries[name] for name in names[-self.top_k :]}
        found, _ = self._index.retrieve([known], k=self.top_k, show_progress=False)
        return {names[int(number)]: self.entries[names[int(number)]] for number in found[0]}


@lru_cache(maxsize=128)
def ranking_of(entries: tuple[tuple[str, str], ...], top_k: int) -> Ranking:
    """A store's ranking, kept for the next question: indexing some hundred entries takes as long as many questions."""
    return Ranking(dict(entries), top_k)
