"""What documents are about, without its name: "the 2003 American film starring Ann Lee and Bo Ray".

The same words ask for the name: "Which 2003 American film stars Ann Lee and Bo Ray?".
"""

from __future__ import annotations

import re

from clusterkit.data.datasets.asking import predicate_of
from trainer.tasks.evidence import has_words

HEAD = r"^(?: ?\([^()]*\))?,? (?:is|was|are|were) (?:also )?"
MOST_WORDS = 18
FEWEST_WORDS = 5
MOST_CLAUSE_WORDS = 7
FEWEST_TELLING = 2
"""Names in a description, beyond nations: what has fewer could be said of many."""
_WHAT = re.compile(rf"{HEAD}(?:an?|the) (?P<what>(?!(?:name|part|one) )[^;()\"]+)(?P<more>.*)")
_BORDER = re.compile(r",|\b(?:and|who|that|which|from|in|by|for|with|of|on|at|to|starring)\b")
_ORDER = r"\b(?:first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|debut)\b"
_TELLING = re.compile(
    r"(?!(?:[A-Z][a-z]+(?:ish|an|ese|ch|i)\b(?! [A-Z])))[A-Z][\w'-]+(?: [A-Z][\w'-]+)*|"
    rf"{_ORDER}|\b(?:largest|oldest|only)\b"
)
_PREPOSITIONS = frozenset("in for with on at from to against near of".split())
_ASKED = re.compile(
    r"(?P<kind>(?:[\w'/-]+ ){0,6}?[a-z][a-z-]+),? "
    r"(?:(?:who|that|which) (?P<is>(?:is|was|are|were|has|had|[a-z]{2,}(?:ed|[^s]s))\b)|"
    r"(?P<done>directed|written|based|located|founded|published|created|produced|developed|recorded|released|formed|"
    r"built|designed|headquartered)\b|(?P<stars>starring)\b)"
)
_NOW = ("based", "located", "headquartered")


def description(name: str, first: str, value: str) -> str:
    """Return what a document is about without its name: "the 2003 American film starring Ann Lee and Bo Ray".

    Args:
        first: the document's first sentence.
        value: what must not stand in the description.

    Returns:
        str: empty where the sentence does not say what it is, or what could be said of many.
    """
    match = _WHAT.match(predicate_of(first, name))
    if match is None:
        return ""
    what = match["what"].rstrip(" .,").split()
    text = " ".join(what[:MOST_WORDS])
    cut = len(what) > MOST_WORDS or bool(match["more"])
    if has_words(text, value):
        text, cut = text[: text.index(value)], True
    while cut:  # back to a name: what ends elsewhere is part of something
        borders = [one.start() for one in _BORDER.finditer(text)]
        text = text[: borders[-1]].rstrip(" ,") if borders else ""
        cut = bool(text) and not text.rpartition(" ")[2][0].isupper()
    return f"the {text}" if len(text.split()) >= FEWEST_WORDS and _tells(text, name) else ""


def asked_by_description(name: str, first: str) -> str:
    """Return a question for the name of what a document is about: "Which film was directed by Ann Lee in Rome?"."""
    told = description(name, first, "").removeprefix("the ")
    match = _ASKED.match(told)
    if match is None or re.match(_ORDER, match["kind"]) or first.startswith(f"{name} are"):
        return ""
    rest = told[match.end() :]
    verb = match["is"] or (match["done"] and f"{'is' if match['done'] in _NOW else 'was'} {match['done']}") or "stars"
    return f"Which {match['kind']} {verb}{rest.replace(' and starring ', ' and stars ')}?"


def clause(sentence: str, subject: str, name: str) -> str:
    """Return what a sentence says of `name` as a clause: "Anna worked for Ray Ltd." as "Anna worked for".

    Args:
        sentence: one about `subject`, which it begins with.

    Returns:
        str: empty where `name` does not end a plain clause with a preposition.
    """
    before, found, after = sentence.partition(name)
    words = before.removesuffix("the ").split()
    whole = found and not re.match(r"\w| [A-Z]", after)
    plain = whole and before.removeprefix("The ").startswith(subject) and not re.search(r"[,;:()\"\u201c]", before)
    if not plain or len(words) - len(subject.split()) > MOST_CLAUSE_WORDS or words[-1] not in _PREPOSITIONS:
        return ""
    return " ".join(words)


def _tells(text: str, name: str) -> bool:
    """Whether a description has names enough behind the noun that it begins with, and not what it is called."""
    border = _BORDER.search(text)
    found = _TELLING.findall(text[border.start() :] if border else "")
    found += re.findall(f"^{_ORDER}", text)
    return len(found) >= FEWEST_TELLING and not any(has_words(text, word) for word in (name, name.rpartition(" ")[2]))
