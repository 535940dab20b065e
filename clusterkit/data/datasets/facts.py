"""What sentences of usual forms say about what a document is about (`relations`), and that they do say it.

"Gigli is a 2003 American film directed by Martin Brest" says who directed Gigli: "Who directed Gigli?". The same
document is also "the 2003 American film directed by Martin Brest", and the man also "the director of Gigli".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterkit.data.datasets.asking import is_about_somebody, predicate_of
from clusterkit.data.datasets.describing import HEAD
from clusterkit.data.datasets.relations import RELATIONS, SITES, WORKS, Relation
from trainer.tasks.evidence import has_words

_OTHERS = (
    "(?:band|duo|trio|group|company|chain|team|club|show|sitcom|manga|character|famil(?:y|ies)|organi[sz]ation|episode|"
    "genus|species|brand|label|newspaper|network|channel|dog|horse|award|festival|corporation|firm)s?"
)
_A_THING = re.compile(
    rf"{HEAD}(?:an?|the|one of the) (?:[\w'\u2019&/-]+,? ){{0,8}}?(?:{WORKS}|{SITES}|{_OTHERS})"
    r"(?= (?:by|in|of|from|that|which|about|for|at|on|with|[a-z]+(?:ed|ing))\b|[.,]|$)"
)
_A_PERSON = re.compile(
    rf"{HEAD}an? (?:(?!(?:by|of|in|from|for|with|that|which|about|on)\b)[\w'\u2019&/-]+,? ){{0,6}}?"
    r"(?:actor|actress|author|writer|novelist|poet|singer|songwriter|musician|director|producer|comedian|politician|"
    r"lawyer|player|footballer|cricketer|artist|painter|journalist|physicist|businessman|rapper|professor)\b"
    r"(?! [a-z]+ by)"
)
_BARRIERS = re.compile(
    r"\b(?:that|who|which|where|when|whose|whom|after|before|while|because|until|although|since|as|about|son|daughter|"
    r"brother|sister|films|based|also known|music|songs?|scripts?|screenplay|soundtrack|score|lyrics|theme|not|"
    r"formerly|previously|latter|adapt\w+|parody|sequel|prequel|remake|featur\w+|includ\w+|consist\w*)\b|"
    r"n't\b|;|\u2014|\. |\bby\b|[\"\u201c]|\b[a-z]{3,}\b[^(]*\("
)
"""What stands between a subject and what is said of it where that is said of something else."""
_IN_BRACKETS = re.compile(r" ?\([^()]*\)")
_PART_OF_MORE = re.compile(
    r"['\u2019\u2013\w/-]|\.? ?[A-Z]| \d|\. \w|,? (?:and|or|&) (?:the )?[A-Z]|, (?:the )?[A-Z]| (?:of )?(?:the )?[A-Z]|"
    r" [\"\u201c]|,? (?:and )?[a-z]+(?:er|or|ist|ian) [A-Z]| and (?:his|her) |"
    r" (?!(?:an?|the|and|or|but|as|in|on|at|to|of|for|from|with|by|since|until|before|after|when|while|where|who|whom|"
    r"which|that|under|over|during|through|throughout|is|was|has|had|between|near|along|alongside|about|because|"
    r"following|within|outside|then|later|now|first|also|featuring|starring|networks?|channel|[a-z]+ed|[a-z]+ly)\b)[a-z]"
)
"""What follows a name that is half of another one, what kind of thing follows it, or one of several."""
_A_NAME = re.compile(r"[A-Z][\w.\u2019'-]* $")
_GOES_ON = frozenset("Council Association Institute Society Academy Committee Center Centre Foundation School".split())
_NOUN = re.compile(r"Th(?:e|is) ([a-z]+) ")
NO_SUBJECT = ("List of ", "Lists of ", "Demographics of ", "History of ")
_NO_NAMES = frozenset(
    "American English British Canadian Australian Indian Award Awards Academy Emmy Grammy The".split()
)
_NO_ENDS = frozenset("and the a an by in from for with of on at to also first".split())
MOST_ANSWER_WORDS = 6
MOST_CHARACTERS = 600
"""Of a sentence: what is longer is a list, and takes the forms below long to search."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What a sentence says: its value stands in the sentence word for word. called: what is said before it."""

    relation: Relation
    value: str
    sentence: str
    called: str = ""

    def asked(self, subject: str, choice: float) -> str:
        """Return a question for the value. choice: 0 up to 1, which of the relation's questions."""
        year = self.value.isdigit() and len(self.value) == 4
        day = len(re.findall(r"\d+", self.value)) > 1
        fitting = [
            one
            for one in self.relation.questions
            if (self.called or "{n}" not in one)
            and (day or not re.search("date|birthday", one))
            and (year or "year" not in one)
        ]
        question = fitting[int(choice * len(fitting))].format(x=subject, n=self.called)
        return question[0].upper() + question[1:]


def facts_of(name: str, text: str, sentences: Sequence[str]) -> Iterator[Fact]:
    """Yield what the sentences of a document say about `name`, which it is about; each value once."""
    first = sentences[0] if sentences else ""
    told = predicate_of(first, name) or predicate_of(first, name.partition(",")[0])
    a_thing = _A_THING.match(told) is not None
    a_person = "(born " in first or _A_PERSON.match(told) is not None
    somebody = a_person or (is_about_somebody(text) and not a_thing)
    surname = has_words(first.partition(" (")[0], name.rpartition(" ")[2])
    if name.startswith(NO_SUBJECT) or not (told or (somebody and surname)):
        return
    found = set[str]()
    for sentence in sentences:
        if len(sentence) > MOST_CHARACTERS:
            continue
        said = predicate_of(sentence, name)
        if sentence.startswith("The population "):
            said = sentence.removeprefix("The")
        elif (noun := _NOUN.match(sentence)) and not has_words(first.lower(), noun[1]):
            continue  # "The screenplay" of a film is another subject
        if not somebody and re.match(" [A-Z]", said):
            continue  # "Ray Lake Park" is not Ray Lake
        for relation in RELATIONS:
            if not said or relation.subject == ("thing" if somebody else "person"):
                continue
            match = relation.pattern.search(said)
            if match is None or _is_of_another(relation, said[: match.start()]):
                continue
            value, called = match["v"].strip(), (match.groupdict().get("n") or "").strip()
            if value in found or called.endswith("s") or not _can_be_asked_for(value, name):
                continue
            if not relation.loose and _is_part_of_more(value, said[match.end("v") :]):
                continue
            found.add(value)
            yield Fact(relation, value, sentence, called)


def _is_of_another(relation: Relation, before: str) -> bool:
    """Whether a sentence says something of another thing than its subject. before: what it says before that."""
    told = _IN_BRACKETS.sub("", before)
    return bool(_BARRIERS.search(told) or (relation.subject == "thing" and not relation.loose and _A_NAME.search(told)))


def _is_part_of_more(value: str, after: str) -> bool:
    """Whether a name is half of a longer one, or one of several. after: what follows it."""
    goes_on = value.rpartition(" ")[2] in _GOES_ON and re.match(" (?:on|for|in|to) ", after)
    return bool(goes_on or _PART_OF_MORE.match(_IN_BRACKETS.sub("", after)))


def _can_be_asked_for(value: str, name: str) -> bool:
    words = value.split()
    return (
        len(words) <= MOST_ANSWER_WORDS
        and "-based" not in words[0]
        and not value.endswith(("'s", "\u2019s"))
        and not (len(words) > 1 and words[-1] in _NO_NAMES)
        and words[-1] not in _NO_ENDS
        and not has_words(name.lower(), value.lower())
        and not has_words(value.lower(), name.lower())
    )
