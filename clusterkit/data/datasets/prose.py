"""Lines of a text file as blocks of prose (paragraphs, items of lists, rows of tables) whose sentences can be told.

What stands alone without a full stop must not run into the next sentence, and sentences that were pasted together
("… is accelerating.We would …") come apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from clusterkit.data.datasets.answers import FUNCTION_WORDS
from trainer.tasks.evidence import sentences

MOST_FRONT_MATTER = 60
"""Lines between two lines `---` at the beginning of a file."""
MOST_HEADING = 60
_SETTING = re.compile(r"[\w.-]+:(?:\s|$)")
_BULLET = re.compile(r"[-*+\u2022]\s+(?=\S)")
_NUMBERED = re.compile(r"(\d{1,3})[.)]\s+(?=\S)")
_EMPHASIS = re.compile(
    r"\*\*(?=[^*\s])([^*]+)(?<=[^*\s])\*\*|(?<![\w*])\*(?=[^*\s])([^*]+)(?<=[^*\s])\*(?![\w*])|"
    r"(?<!\w)_(?=[^_\s])([^_]+)(?<=[^_\s])_(?!\w)"
)
_MARK = re.compile(r"(?:(?<=[.!?\"\u201d\u2019')])|^)\s*(?:\[\d{1,3}\]\s*)+(?=[\"\u201c\u2018'(]?[A-Z]|$)")
_FOOTNOTE = re.compile(r"\s*\[\^[\w-]+\]:?")
_GLUED = re.compile(
    r"(?<![\w./@:-])(?P<word>[\w\u2019'-]{0,60}[\w)])[.!?]+(?P<closed>[\"\u201d\u2019)\]]*)"
    r"(?P<opened>[\"\u201c\u2018(]?)(?=(?P<next>[A-Z][a-z\u2019']*)(?:[\s,;:.!?-]|$))"
)
_DATED = re.compile(
    r"((?:January|February|March|April|May|June|July|August|September|October|November|December) \d{4})"
    r"(?=[(\"\u201c]?[A-Z][a-z])"
)
_ENDED = re.compile(
    r"(?:(?<![\w.])(?:[A-Za-z]\.){2,}|\b(?:Inc|Ltd|Co|Corp|Jr|Sr)\.)[\"\u201d\u2019)]* (?=([A-Z]\w*))|"
    r"\b(?:am|was|did|do|have|had|can|could|would|should|than|will) I\.[\"\u201d\u2019)]* (?=[A-Z])"
)
"""Abbreviations, and the word I, that end a sentence where a word such as "The" follows."""
_UNENDED = re.compile(r"(?:^|[\s(])(?:vol|vols|pp?|eds?|cf|fig|figs|chap|etc|no|nos)\.\)?$")
_STILL_GLUED = re.compile(
    r"[\w)][.!?][\"\u201d\u2019)\]]*[A-Z][a-z]+|[a-z)]\.\d{1,2} [A-Z]|"
    rf"[a-z](?:{'|'.join(sorted(word for word in FUNCTION_WORDS if len(word) > 1))})(?![A-Za-z])"
)
"""Two sentences that were not told apart, or a heading before one ("Two RoutesThere's"); some names look so, too."""
_OPEN_LINE = re.compile(r"[.!?,;:\u2026\u2014\u2013-][\"\u201d\u2019')\]]*$")


def without_front_matter(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines without what stands between two lines `---` at the beginning, as in many Markdown files."""
    rest = iter(lines)
    begun = list(islice(rest, 1))
    if begun and begun[0].strip() == "---":
        for line in islice(rest, MOST_FRONT_MATTER):
            begun.append(line)
            if line.strip() in ("---", "..."):
                settings = [one for one in begun if _SETTING.match(one)]
                others = [one for one in begun if one.strip() and one[:1] not in " \t-#." and one not in settings]
                begun = begun if others or not settings else []
                break
    return chain(begun, rest)


def blocks_of(lines: Sequence[str]) -> Iterator[str]:
    """Yield the blocks of a paragraph, each as one line: items of lists, rows of tables, headings and the rest.

    Args:
        lines: those between two blank ones.
    """
    longest = max(map(len, lines), default=0)
    kept: list[str] = []
    listed = False
    for place, line in enumerate(lines):
        text = line.strip().lstrip("> ") if line.lstrip().startswith(">") else line.strip()
        bullet, number = _BULLET.match(text), _NUMBERED.match(text)
        item = bullet or (number and (not kept or listed or number[1] == "1"))
        following = lines[place + 1].strip() if place + 1 < len(lines) else ""
        begins = not kept or kept[-1].endswith((".", "!", "?"))
        alone = (text.startswith("|") and text.endswith("|")) or (begins and _is_heading(text, following, longest))
        if kept and (item or alone):
            yield _as_prose(kept)
            kept, listed = [], False
        if alone and not item:
            yield _as_prose([text])
        else:
            kept.append(text[bullet.end() :] if bullet else text)
            listed = listed or bool(item)
    if kept:
        yield _as_prose(kept)


def joined(text: str, more: str) -> str:
    """Return two texts as one, with a line break where the end of a sentence would not be seen between them."""
    if not text:
        return more
    last, first = text.rpartition("\n")[2][-100:], more[:100]
    apart = len(sentences(f"{last} {first}")) == len(sentences(last)) + len(sentences(first))
    return f"{text}{' ' if apart else chr(10)}{more}"


def whole_sentences(text: str) -> list[str]:
    """Cut a text into sentences; what ends in an abbreviation of references ("vol.") goes on in the next."""
    found: list[str] = []
    for line in text.split("\n"):
        open_ = False
        for sentence in sentences(line):
            if open_:
                found[-1] += f" {sentence}"
            else:
                found.append(sentence)
            open_ = bool(_UNENDED.search(sentence))
    return found


def is_one_sentence(text: str) -> bool:
    """Whether what was cut out as a sentence may be asked about: no row of a table, no question, nothing glued."""
    return not (text.startswith("|") or text.endswith("?") or _STILL_GLUED.search(text))


def _is_heading(line: str, following: str, longest: int) -> bool:
    """Whether a line that begins a block stands alone: short, without punctuation, and a new sentence below it."""
    short = len(line) <= min(MOST_HEADING, longest / 2, 0.75 * len(following)) or (
        len(line) <= MOST_HEADING and line.isupper()
    )
    begins = following.lstrip("\"\u201c\u2018'([")[:1]
    return short and not _OPEN_LINE.search(line) and (begins.isupper() or begins.isdigit())


def _as_prose(lines: Sequence[str]) -> str:
    text = " ".join(" ".join(lines).split())
    text = _EMPHASIS.sub(lambda match: match[1] or match[2] or match[3], text)
    text = _FOOTNOTE.sub("", text)
    text = _MARK.sub(" ", text)
    text = _DATED.sub(r"\1" + "\n", text)
    return _ENDED.sub(_ended, _apart(text)).strip()


def _ended(match: re.Match[str]) -> str:
    return match[0][:-1] + "\n" if match[1] is None or match[1] in FUNCTION_WORDS else match[0]


def _apart(text: str) -> str:
    """Put a space between sentences that have none, unless it may be a name such as "Node.Js", code or a link."""
    found: list[str] = []
    done = ticks = quotes = 0
    for match in _GLUED.finditer(text):
        word, closed, opened = match["word"], match["closed"], match["opened"]
        place = match.start("closed")
        ticks += text.count("`", done, place)
        quotes += text.count('"', done, place)
        found.append(text[done:place])
        done = place
        plain = not closed and not opened
        named = plain and not (len(word) > 1 and (word[0].islower() or match["next"] in FUNCTION_WORDS))
        if named or ticks % 2 or (closed.endswith("]") and opened == "("):
            continue
        if closed.endswith('"') and quotes % 2 == 0:  # that begins what follows
            closed, opened = closed[:-1], '"'
        found.append(f"{closed} {opened}")
        done = match.end()
        quotes += match[0].count('"')
    return "".join(found) + text[done:]
