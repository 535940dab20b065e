"""Parser of allocation_mode: one pass over the text; every error names its character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from trainer.allocation import (
    ROLLOUT_BACKENDS,
    TAILS,
    TRAINING_BACKENDS,
    Allocation,
    AllocationError,
    Dialect,
    Layout,
    Part,
)

_DEGREES = {"d": "data", "s": "shard", "t": "tensor", "m": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_LETTERS_OF = {"sglang": "dtp", "vllm": "dtp", "fsdp": "dstc", "megatron": "dtpce", "archon": "dtpce"}
_CALL = re.compile(r"\*|\w+_(?:gen|inf|train)")
_HEAD = re.compile(r"[A-Za-z_*][\w-]*(?=[.:\[])")
_TAIL = re.compile(rf"(?:{'|'.join(TAILS)})(?!\w)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SETTING = re.compile(r"(?P<key>[\w.]+)=(?P<value>[^\s;]*)")
_LARGEST_DIGITS = 6
_EXAMPLES = "such as sglang.d4p1m1+d2p2m1, sglang:d4t1+fsdp:d4, or rollout.backend=sglang:d4 actor.backend=fsdp:d4"


def parse(text: str) -> Allocation:
    """Read an allocation in any dialect. Raises AllocationError, with a caret under the wrong character."""
    text = re.sub(r"\s", " ", text)
    if not text.strip():
        raise AllocationError(text, 0, "an empty allocation_mode", f"write one {_EXAMPLES}")
    if text.strip() in ("manual", "heuristic", "search"):
        raise AllocationError(text, 0, f"{text.strip()} leaves the layout open", f"say it, {_EXAMPLES}")
    return _read_engines(text) if "=" in text else _Reader(text, 0, len(text)).whole()


class _Reader:
    """Recursive descent over text[start:end]. `dialect` becomes known with the first sign that only one of them has."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.text, self.at, self.end = text, start, end
        self.dialect: Dialect | None = None
        self.starts: dict[int, int] = {}  # part number -> its first character
        self.parts = 0

    def whole(self) -> Allocation:
        groups: list[tuple[Part, ...]] = []
        tail = ""
        while True:
            tail_start = self.at
            if groups and (tail := self.tail()):
                break
            groups.append(self.group())
            if not self.taken("+"):
                break
        if self.at < self.end:
            raise self.wrong("this should be '+', '|' or the end of the text")
        self._check_engines(groups, tail, tail_start)
        return Allocation(
            tuple(tuple(_without_usual_name(part) for part in group) for group in groups),
            tail,
            self.dialect or Dialect.DOTS,
        )

    def tail(self) -> str:
        self.spaces()
        found = _TAIL.match(self.text, self.at, self.end)
        if found is None:
            return ""
        self.at = found.end()
        self.spaces()
        return found[0]

    def group(self) -> tuple[Part, ...]:
        parts = [self.part()]
        sign = self.peek()
        if sign in ("|", ","):
            while self.peek() == sign:
                sign_at = self.at
                self.at += 1
                self.speaks(Dialect.COLON if sign == "|" else Dialect.DOTS, sign_at)
                parts.append(self.part())
        first = self.parts - len(parts)
        for number, part in enumerate(parts[1:], first + 1):
            if part.gpus != parts[0].gpus:
                raise self.wrong(
                    f"engines that share GPUs need equally many: this one takes {part.gpus}, the first {parts[0].gpus}",
                    at=self.starts[number],
                )
        return tuple(parts)

    def part(self) -> Part:
        self.spaces()
        start = self.starts[self.parts] = self.at
        self.parts += 1
        head = _HEAD.match(self.text, self.at, self.end)
        if head is None:
            name = self.name() if self.peek() == "[" else ""
            if name:
                self.expect(":")
                self.speaks(Dialect.COLON, start)
            return self._checked(Part("", self.degrees("dtmpce"), name), start)
        self.at = head.end()
        word = head[0]
        if self.peek() == ":" and _CALL.fullmatch(word):
            self.speaks(Dialect.DOTS, start)
            self.at += 1
            return Part("", self.degrees("dtmp"), word)
        if word not in (*ROLLOUT_BACKENDS, *TRAINING_BACKENDS):
            raise self._unknown_backend(word, start)
        return self._of_backend(word, start)

    def _of_backend(self, backend: str, start: int) -> Part:
        name = self.name() if self.peek() == "[" else ""
        if self.peek() == "." and not name:
            self.speaks(Dialect.DOTS, self.at)
            if backend not in ROLLOUT_BACKENDS:
                raise self.wrong(
                    f"the dotted form names only what generates ({', '.join(ROLLOUT_BACKENDS)})",
                    f"write {backend}: with a colon, and the other engine too",
                )
            self.at += 1
        else:
            self.speaks(Dialect.COLON, self.at)
            self.expect(":")
        if backend in TRAINING_BACKENDS and re.compile(r"\(|attn:").match(self.text, self.at, self.end):
            return self._with_experts(backend, name)
        letters = _LETTERS_OF[backend] + ("m" if self.dialect is Dialect.DOTS else "")
        return self._checked(Part(backend, self.degrees(letters, backend), name), start)

    def _with_experts(self, backend: str, name: str) -> Part:
        if backend == "fsdp":
            raise self.wrong("FSDP has no expert parallelism", "use megatron: or archon:")
        closed = self.taken("(")
        self.expect("attn:")
        attention = self.degrees("cdtp", backend)
        self.expect("|")
        ffn_at = self.at
        self.expect("ffn:")
        experts = self.degrees("detp", backend)
        if closed:
            self.expect(")")
        # Experts are one more cut through the same GPUs here, so e counts.
        if experts.gpus * experts.expert != attention.gpus:
            raise self.wrong(
                f"attn is laid out on {attention.gpus} GPUs and ffn on {experts.gpus * experts.expert}: they are the "
                "same GPUs",
                at=ffn_at,
            )
        if experts.pipeline != attention.pipeline:
            raise self.wrong("attn and ffn need the same p: a stage holds both", at=ffn_at)
        return Part(backend, attention, name, experts)

    def degrees(self, letters: str, backend: str = "") -> Layout:
        """`d4p1m1` in any order; each letter once."""
        found: dict[str, int] = {}
        self.spaces()
        while (letter := self.peek()).isalpha():
            degree = _DEGREES.get(letter)
            if degree is None or letter not in letters:
                raise self._bad_letter(letter, letters, backend)
            if degree in found:
                raise self.wrong(f"{degree} parallelism is given twice")
            if letter == "m":
                self.speaks(Dialect.DOTS, self.at)
            self.at += 1
            found[degree] = self.number(letter)
        if not found:
            raise self.wrong("a layout is missing here", f"letters with numbers, {_EXAMPLES}")
        return Layout(**found)

    def number(self, letter: str) -> int:
        digits = re.compile(r"\d*").match(self.text, self.at, self.end)
        assert digits is not None
        if not digits[0]:
            raise self.wrong(f"{letter} needs a number of at least 1")
        if digits[0].startswith("0"):
            raise self.wrong(f"{letter}{digits[0]}: a degree is at least 1 and has no leading zero")
        if len(digits[0]) > _LARGEST_DIGITS or not digits[0].isascii():
            raise self.wrong(f"{letter} is too large, or not in plain digits")
        self.at = digits.end()
        return int(digits[0])

    def name(self) -> str:
        self.speaks(Dialect.COLON, self.at)
        self.expect("[")
        found = _NAME.match(self.text, self.at, self.end)
        if found is None:
            raise self.wrong("a name is made of letters, digits and _, and begins with no digit")
        self.at = found.end()
        self.expect("]")
        return found[0]

    def speaks(self, dialect: Dialect, at: int) -> None:
        """Note that this sign belongs to one dialect; two in one text are a mistake."""
        if self.dialect not in (None, dialect):
            raise self.wrong(
                f"this is the {dialect} form, and what stands before is the {self.dialect} form",
                f"write all of it in one form, {_EXAMPLES}",
                at,
            )
        self.dialect = dialect

    def peek(self) -> str:
        return self.text[self.at] if self.at < self.end else ""

    def spaces(self) -> None:
        while self.peek() == " ":
            self.at += 1

    def taken(self, sign: str) -> bool:
        self.spaces()
        found = self.text.startswith(sign, self.at) and self.at + len(sign) <= self.end
        self.at += len(sign) if found else 0
        return found

    def expect(self, sign: str) -> None:
        if not self.taken(sign):
            raise self.wrong(f"'{sign}' is missing here")
        self.spaces()

    def wrong(self, problem: str, fix: str = "", at: int | None = None) -> AllocationError:
        return AllocationError(self.text, self.at if at is None else at, problem, fix)

    def _bad_letter(self, letter: str, letters: str, backend: str) -> AllocationError:
        whose = f" of {backend}" if backend else ""
        if letter == "m" and "t" in letters:
            return self.wrong("tensor parallel is written t in this form", "m belongs to the dotted form")
        if letter == "s":
            return self.wrong(f"shards (s) are no part{whose} here", "write the training side as fsdp:dNsM")
        if letter in _DEGREES:
            return self.wrong(
                f"{_DEGREES[letter]} parallelism ({letter}) is no part{whose} here",
                "FSDP shards instead of a pipeline: give its GPUs to d" if (backend, letter) == ("fsdp", "p") else "",
            )
        known = ", ".join(f"{one} {_DEGREES[one]}" for one in letters)
        return self.wrong(f"'{letter}' is no kind of parallelism{whose}: {known}")

    def _unknown_backend(self, word: str, start: int) -> AllocationError:
        near = get_close_matches(word, (*ROLLOUT_BACKENDS, *TRAINING_BACKENDS), n=1, cutoff=0.5)
        return self.wrong(
            f"'{word}' is no engine: {', '.join(ROLLOUT_BACKENDS)} generate, {', '.join(TRAINING_BACKENDS)} train",
            f"did you mean {near[0]}?" if near else "",
            start,
        )

    def _checked(self, part: Part, start: int) -> Part:
        layout = part.layout
        if layout.shard and layout.data % layout.shard:
            raise self.wrong(
                f"s{layout.shard} does not divide d{layout.data}: FSDP shards over s of the d ranks, and the others "
                "are replicas",
                at=start,
            )
        if layout.shard == layout.data:  # one replica, as without it
            part = replace(part, layout=replace(layout, shard=0))
        if layout.expert > 1 and layout.gpus % (layout.pipeline * layout.expert):
            raise self.wrong(
                f"p{layout.pipeline} x e{layout.expert} does not divide the {layout.gpus} GPUs of this layout", at=start
            )
        return part

    def _check_engines(self, groups: Sequence[tuple[Part, ...]], tail: str, tail_start: int) -> None:
        parts = [part for group in groups for part in group]
        calls = self.dialect is Dialect.DOTS
        training = [part for part in parts if not part.generates]
        if tail and training:
            raise self.wrong(f"+{tail} means that nothing is trained, and this text trains too", at=tail_start)
        if tail and not any(part.generates for part in parts):
            raise self.wrong(f"+{tail} needs an engine that generates", at=tail_start)
        seen: set[str] = set()
        for number, part in enumerate(parts):
            if part.name in seen:
                raise self.wrong(f"the name {part.name} is given twice", at=self.starts[number])
            seen |= {part.name} - {""}
            if len(parts) > 2 and not part.name and not calls:
                raise self.wrong(
                    "of three and more engines each needs a name", "such as fsdp[actor]:d4", self.starts[number]
                )
        for generates, verb in ((True, "generate"), (False, "train")):
            nameless = [n for n, part in enumerate(parts) if part.generates is generates and not part.name]
            if len(nameless) > 1:
                raise self.wrong(f"two engines that {verb}: give them names", at=self.starts[nameless[1]])
        if calls and len(groups) > 2:
            raise self.wrong("the dotted form has at most two sides", at=self.starts[len(groups[0]) + len(groups[1])])


def _read_engines(text: str) -> Allocation:
    """`rollout.backend=sglang:d4t1 actor.backend=fsdp:d4`, with scheduling_strategy settings for shared GPUs."""
    parts: dict[str, Part] = {}
    starts: dict[str, int] = {}
    shares: dict[str, tuple[str, int]] = {}
    at = 0
    while at < len(text):
        if text[at] in " ;":
            at += 1
            continue
        found = _SETTING.match(text, at)
        if found is None:
            raise AllocationError(text, at, "this is no setting of the form engine.backend=…", f"write it {_EXAMPLES}")
        engine, _, setting = found["key"].partition(".")
        if setting in ("", "backend"):
            if engine in parts:
                raise AllocationError(text, at, f"{engine} is given twice")
            starts[engine] = at
            parts[engine] = _engine(text, engine, found.start("value"), found.end("value"))
        elif setting == "scheduling_strategy.target":
            shares[engine] = (found["value"], found.start("value"))
        elif setting != "scheduling_strategy.type" or found["value"] not in ("colocation", "separation"):
            raise AllocationError(
                text, at, f"{found['key']} says nothing about GPUs", "engine.backend, engine.scheduling_strategy.target"
            )
        at = found.end()
    return Allocation(_share(text, parts, starts, shares), "", Dialect.ENGINES)


def _engine(text: str, engine: str, start: int, end: int) -> Part:
    reader = _Reader(text, start, end)
    if start == end:
        raise AllocationError(text, start - 1, f"{engine} has no backend", "such as sglang:d4 or fsdp:d4")
    part = reader.part()
    if reader.at < end:
        raise reader.wrong("one engine per setting: this should be its end")
    if not part.backend or reader.dialect is not Dialect.COLON:
        raise AllocationError(text, start, f"{engine} needs a backend with a colon", "such as sglang:d4 or fsdp:d4")
    return _without_usual_name(replace(part, name=engine))


def _without_usual_name(part: Part) -> Part:
    """`sglang[rollout]` and `sglang` are one thing."""
    return replace(part, name="") if part.name == ("rollout" if part.generates else "actor") else part


def _share(
    text: str, parts: dict[str, Part], starts: dict[str, int], shares: dict[str, tuple[str, int]]
) -> tuple[tuple[Part, ...], ...]:
    groups: dict[str, list[Part]] = {engine: [part] for engine, part in parts.items() if engine not in shares}
    for engine, (target, at) in shares.items():
        if engine not in parts:
            raise AllocationError(text, at, f"{engine} has no backend of its own", f"add {engine}.backend=fsdp:d4")
        if target not in groups:
            raise AllocationError(text, at, f"{target} is no engine that others can share GPUs with")
        if parts[engine].gpus != groups[target][0].gpus:
            raise AllocationError(
                text,
                starts[engine],
                f"engines that share GPUs need equally many: {engine} takes {parts[engine].gpus}, {target} "
                f"{groups[target][0].gpus}",
            )
        groups[target].append(parts[engine])
    return tuple(tuple(group) for group in groups.values())
