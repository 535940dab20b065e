"""Questions with a question word where something is missing, in place of a blank: "… was founded by who in 1902?".

The words stay in the order of the sentence, as in many questions that people wrote for two documents.
"""

from __future__ import annotations

import re

from clusterkit.data.datasets.answers import YEAR, is_person, number_word

BLANK = "____"
MOST_WORDS = 36
"""Words of a quoted sentence; a longer one is cut around its blank."""
_SOMEBODY = re.compile(r"\b(?:[Hh]e|[Ss]he|[Hh]is|[Hh]er)\b|\(born ")
_BEFORE_PLACES = frozenset("in at near from outside around throughout across".split())
_BEFORE_PEOPLE = frozenset(
    "by with actor actress actors director author writer singer composer producer player president king queen coach "
    "wife husband son daughter brother sister father mother starring stars and".split()
)
_PART = re.compile(r", part \d+$")
_PREDICATE = re.compile(r" (?:\(|[a-z]+ly )?(?:is|was|are|were|has|had|became|won|born|[a-z]+(?:ed|s))\b")
_HEADS = ['The "', "The \u201c", "The ", '"', "\u201c", ""]
"""What may stand before a subject's name."""
_CLOSING = {'"', "\u201d"}
_SUBJECT = re.compile(
    r"(?:It|He|She|They|Th(?:e|is) [a-z]+(?= (?:is|was|are|were|has|had|have|can|will|also|[a-z]+(?:ed|ly)|"
    r"(?:star|air|run|open|contain|feature|offer|serve|include|focus|follow)s)\b))(?= [a-z])"
)


def question_word(text: str, answer: str, blank: str, about: str = "") -> str:
    """Return what asks for an answer: "who", "what year" and so on.

    Args:
        text: the sentence with `blank` where the answer stood.
        about: a text about the answer, where it is a title.
    """
    said, _, after = text.partition(blank)
    before = re.findall(r"[\w'-]+", said.lower())[-1:]
    if answer[:1].isdigit():
        # What tells that it is a year may have been cut off.
        return number_word(said, answer, after) or ("what year" if YEAR.fullmatch(answer) else "how many")
    if about:
        return "who" if is_about_somebody(about) and " " in answer else "what"
    if (is_person(answer) and not said.endswith("St. ")) or (before and before[0] in _BEFORE_PEOPLE):
        return "whose" if answer.endswith(("'s", "\u2019s")) else "who"
    return "what place" if before and before[0] in _BEFORE_PLACES else "what"


def is_about_somebody(text: str) -> bool:
    """Whether a document seems to be about a person."""
    return _SOMEBODY.search(text) is not None


def asked(text: str, blank: str, word: str) -> str:
    """Return a sentence as a question: "____ is a town." as "What is a town?"."""
    question = text.replace(blank, word).rstrip(" .!;:,") + "?"
    return question[:1].upper() + question[1:]


def asked_of(text: str, blank: str, word: str, name: str, is_subject: bool = True) -> str:
    """Return a sentence of a document as a question that names it. `is_subject`: pronouns in it mean that name."""
    named_text = named(text, name) if is_subject else text
    return asked(named_text, blank, word) if name in named_text else f"About {name}: {asked(text, blank, word)}"


def named(text: str, name: str) -> str:
    """Return a sentence with what it is about in place of a pronoun at its beginning: "She lives" as "Anna lives".

    The title of a later part of a text is not what its pronouns mean.
    """
    subject = None if name in text or _PART.search(name) else _SUBJECT.match(text)
    return name + text[subject.end() :] if subject else text


def chained(first: str, second: str, blank: str, word: str, name: str) -> str:
    """Return two sentences as one question about what the second one says; empty where it has no plain subject.

    Args:
        first: a sentence with `blank` where `name` stood: "Anna worked for ____."
        second: a sentence about `name` with `blank` where the answer stood: "The company was founded by ____."

    Returns:
        str: "Anna worked for something that was founded by who?", or where more follows the name "… worked for X as a
        clerk. X was founded by who?"
    """
    if second.startswith(f"{name} "):
        rest = second[len(name) :]
    elif subject := _SUBJECT.match(second):
        rest = second[subject.end() :]
    else:
        return ""
    if name in rest or not _PREDICATE.match(rest):
        return ""
    before, _, after = first.partition(blank)
    if not after.strip(" .!;:,") and before and not rest.startswith(" ("):
        return asked(f"{before}something that{rest}", blank, word)
    return f"{first.replace(blank, 'X')} {asked(f'X{rest}', blank, word)}"


def clip(masked: str) -> str:
    """Return a sentence with a blank, cut to MOST_WORDS words around it."""
    words = masked.split()
    if len(words) <= MOST_WORDS:
        return masked
    middle = next(place for place, word in enumerate(words) if BLANK in word)
    start = max(0, min(middle - MOST_WORDS // 2, len(words) - MOST_WORDS))
    end = start + MOST_WORDS
    return ("… " if start else "") + " ".join(words[start:end]) + (" …" if end < len(words) else "")


def predicate_of(sentence: str, name: str) -> str:
    """Return what a sentence says of `name`, its subject: " is a town."; empty where its subject is something else."""
    for head in _HEADS:  # not a pattern of the name: compiling one takes longer than all else that is asked of it
        if sentence.startswith(head + name):
            rest = sentence[len(head) + len(name) :]
            for said in (rest[1:], rest) if rest[:1] in _CLOSING else (rest,):
                if said.startswith((" ", ",", "(")):
                    return said
    start = _SUBJECT.match(sentence)
    return sentence[start.end() :] if start else ""
