"""What may be asked for in a sentence of prose: where a name begins, who is a person, and which numbers are years."""

from __future__ import annotations

import re

FUNCTION_WORDS = frozenset(
    "A An The This That These Those Some Any All Both Each Every Either Neither No None Another Other Such Many Most "
    "Much Few Several I He She It We You They Me Him Her Us Them My Your His Its Our Their Someone Everyone Nobody "
    "Something Nothing Everything Who Whom Whose What Whatever Which Why How When Whenever Where Wherever And Or Nor "
    "But So Yet If Unless Because Although Though Whereas While Whether Than Once About Above According Across After "
    "Against Along Among Around As At Before Behind Below Besides Between Beyond By Despite During Except For From In "
    "Inside Into Like Of Off On Onto Outside Over Since Through Throughout Till To Toward Towards Under Unlike Until "
    "Up Upon Versus Via With Within Without Actually Again Almost Already Also Always Anyway Apparently Certainly "
    "Clearly Currently Especially Even Eventually Ever Finally Fortunately Furthermore Generally Hence Here However "
    "Immediately Indeed Initially Instead Just Later Maybe Meanwhile Moreover Nearly Never Nevertheless Not Now "
    "Nowadays Obviously Occasionally Often Only Originally Otherwise Perhaps Possibly Presumably Previously Probably "
    "Really Recently Roughly Similarly Simply Sometimes Soon Still Subsequently Suddenly Then There Therefore Thus "
    "Today Too Typically Ultimately Unfortunately Usually Yes Am Is Are Was Were Be Been Do Does Did Has Have Had Can "
    "Could Might Must Should Would Let Approximately Exactly".split()
)
"""With a capital, as they begin a sentence. May and Will are names as often."""
_ARTICLES = frozenset(("The", "A", "An", "the", "of"))
_CONTRACTION = re.compile(r"n['\u2019]t$|['\u2019](?:m|ve|ll|re|d)$")
_BEGINNING = re.compile(r"(?:^|[.?!:;)\]\u2026\u2014]|--)[\s\"\u201c(\[]*$|[\"\u201c(\[]$")
_CLOSED = re.compile(r"[,.]?[\"\u201d]")
FIRST_NAMES = frozenset(
    "Aaron Adam Alan Albert Alex Alexander Alfred Alice Amanda Amy Andrea Andrew Angela Ann Anna Anne Anthony Arthur "
    "Barbara Ben Benjamin Bill Bob Brian Carl Carol Caroline Catherine Charles Chris Christine Christopher Claire Dan "
    "Daniel David Deborah Dennis Diana Donald Dorothy Douglas Edward Eleanor Elizabeth Emily Emma Eric Evan Frank Fred "
    "Frederick Gary Geoff Geoffrey George Greg Hannah Harold Harry Helen Henry Howard Isaac Jack Jacob James Jane "
    "Janet Jason Jean Jeff Jennifer Jeremy Jessica Jim Jimmy Joan Joe John Jonathan Joseph Joshua Julia Julian Julie "
    "Justin Karen Karl Kate Katherine Keith Ken Kenneth Kevin Larry Laura Lawrence Leonard Linda Lisa Louis Louise "
    "Lucy Margaret Maria Marie Mark Martin Mary Matthew Max Michael Michelle Mike Nancy Nathan Neil Nicholas Nick "
    "Oliver Oscar Otto Patrick Paul Peter Philip Rachel Ralph Raymond Rebecca Richard Robert Roger Ronald Roy "
    "Russell Ruth Ryan Sam Samuel Sarah Scott Sean Simon Stephen Steve Steven Stuart Susan Ted Thomas Tim Timothy Tom "
    "Tony Trevor Walter Wayne William".split()
)
_PERSON = re.compile(r"(\w+)(?: (?:de|van|von))?(?: [A-Z][\w-]*(?:['\u2019][A-Z][\w-]*)?){1,2}(?:['\u2019]s?)?")
_NO_PERSON = frozenset(
    "University College School Institute Foundation Society Museum Library Hospital Church Hall House Center Centre "
    "Street Road Avenue Boulevard Square Park Bridge Airport County City Town Island Islands Lake River Bay Prize "
    "Award Awards Medal Cup Trophy Bowl Show Program Band Records Company Group Press Stadium Memorial Theatre Theater "
    "Building Trio Quartet Orchestra Springs Terrier".split()
)
_MONTH = (
    "(?:January|February|March|April|May|June|July|August|September|October|November|December|"
    "[Ss]pring|[Ss]ummer|[Aa]utumn|[Ff]all|[Ww]inter)"
)
YEAR = re.compile(r"1\d{3}|20\d\d|2100")
_BEFORE_YEARS = re.compile(
    r"\b(?:[Ii]n|(?<!population )(?<!total )(?<!elevation )(?<!capacity )(?<!height )(?<!number )[Oo]f|[Ss]ince|[Bb]y|"
    r"[Ff]rom|[Uu]ntil|[Dd]uring|[Bb]efore|[Aa]fter|[Bb]etween|[Ee]arly|[Ll]ate|[Mm]id|[Cc]irca|year) $|"
    rf"{_MONTH}(?: \d{{1,2}}(?:st|nd|rd|th)?)?,? $|\b[12]\d{{3}}(?: and | to |, | ?[-\u2013] ?)$"
)
_ONE_IN = re.compile(r"\b(?:[Oo]ne|\d+) (?:in|of) $")
_PLURALS = frozenset("people children men women feet percent million billion thousand".split())


def name_start(sentence: str, start: int, end: int) -> int:
    """Return where the name within a run of capitalised words begins; `end` where there is none.

    Words such as "Because" are no part of it where the run begins a sentence, "the" and "of" nowhere; what has a
    contraction is no name.
    """
    begins = _BEGINNING.search(sentence[:start]) and not (
        sentence[start - 1 : start] in ('"', "\u201c") and _CLOSED.match(sentence[end:])  # a title in quotes
    )
    words = sentence[start:end].split(" ")
    while words and (words[0] in _ARTICLES or (begins and (words[0] in FUNCTION_WORDS or _is_contraction(words[0])))):
        start += len(words.pop(0)) + 1
    return end if not words or any(map(_is_contraction, words)) else start


def is_person(name: str) -> bool:
    """Whether a name is a person's: a common first name and one or two words more, the last no "University"."""
    match = _PERSON.fullmatch(name)
    return match is not None and match[1] in FIRST_NAMES and name.rpartition(" ")[2] not in _NO_PERSON


def number_word(before: str, number: str, after: str) -> str:
    """Return what asks for a number between two parts of a sentence: "what year" or "how many".

    Returns:
        str: empty where it is part of a name ("Web 2.0"), or where nothing tells what it counts.
    """
    last = re.search(r"([A-Z][\w-]*) $", before)
    if last and last[1] not in FUNCTION_WORDS and not re.fullmatch(_MONTH, last[1]):
        return ""
    following = re.match(r"(?: ([a-z][a-z-]*))?(?: ([a-z][a-z-]*))?", after)
    first, second = following.groups("") if following else ("", "")
    many = _is_plural(first) or (first.capitalize() not in FUNCTION_WORDS and _is_plural(second))
    if YEAR.fullmatch(number):
        in_brackets = before.rfind("(") > before.rfind(")") and re.match(r" ?[),;\u2013-]", after)
        of_a_year = re.search(r"\b(?:[Aa]n?|[Tt]he|[Hh]is|[Hh]er|[Ii]ts|[Tt]heir) $", before) and re.match(
            r" [A-Za-z]", after
        )
        if in_brackets or (_BEFORE_YEARS.search(before) and not _ONE_IN.search(before)):
            return "" if _is_plural(first) else "what year"
        if of_a_year and not many and number > "18":
            return "what year"
        return "how many" if many else ""
    return "how many" if many or "." not in number else ""


def _is_contraction(word: str) -> bool:
    stem, found, rest = word.replace("\u2019", "'").partition("'")
    return bool(_CONTRACTION.search(word) or (found and rest == "s" and stem in FUNCTION_WORDS))


def _is_plural(word: str) -> bool:
    regular = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return word in _PLURALS or (regular and word.capitalize() not in FUNCTION_WORDS)
