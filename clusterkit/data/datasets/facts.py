"""What sentences of usual forms say about what a document is about, and questions in people's words that ask for it.

"Gigli is a 2003 American film directed by Martin Brest" says who directed Gigli: "Who directed Gigli?". The same
document is also "the 2003 American film directed by Martin Brest", and the man also "the director of Gigli".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterkit.data.datasets.asking import is_about_somebody, predicate_of
from trainer.tasks.evidence import has_words

_WORD = r"(?>[A-Z0-9][\w\u2019'&.-]*\w)"
_CAPITAL = r"(?>[A-Z][\w\u2019'&-]*\w)"
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DAY = rf"(?:\d{{1,2}} {_MONTH} \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}})"
_YEAR = r"(?<![\d,.])(?:1\d|20)\d\d(?![\d,]\d)"
_ONE = r"(?!,? and |, [A-Z]|\. [A-Z]| & )"
_NAME = rf"(?!{_MONTH})(?>{_WORD}(?: (?:(?:of|the|de|la|von|van|for|[A-Z]\.) )?{_WORD})*)"
_PERSON = rf"(?>{_CAPITAL}(?: (?:[A-Z]\.|de|la|von|van|di|{_CAPITAL}))* {_CAPITAL}){_ONE}"
_PLACE = rf"(?!{_MONTH})(?>{_CAPITAL}(?: {_CAPITAL})*(?:, {_CAPITAL}(?: {_CAPITAL})*)*)"
_WORKS = "(?:film|movie|album|song|single|EP|novel|book|series|play|musical|opera|game|magazine|mixtape|documentary)"
_SITES = (
    "(?:town|city|village|county|school|district|river|creek|lake|mountain|station|airport|university|college|museum|"
    "park|building|church|street|community|township|hospital|stadium|theat(?:er|re)|mall|restaurant|bridge|island|"
    "region|neighbou?rhood|suburb|municipality|commune|hotel|casino|area|house|peak|valley|road|arena|cemetery|castle|"
    "palace|zoo|garden|library|prison|farm|port|beach|bay|dam|reservoir|forest|located|situated)"
)
_NATION = r"(?:[A-Z][a-z]+(?:-[A-Z][a-z]+)? )?"
_HEAD = r"^(?: ?\([^()]*\))? (?:is|was|are|were) (?:also )?"
_BARRIERS = re.compile(
    r"\b(?:that|who|which|where|when|whose|whom|after|before|while|because|until|although|since|as|about|son|daughter|"
    r"brother|sister|based|also known|music|songs?|scripts?|screenplay|soundtrack|score|lyrics|theme)\b|;|\. |\bby\b"
)
_NOUN = re.compile(r"Th(?:e|is) ([a-z]+) ")
_NO_SUBJECT = ("List of ", "Lists of ", "Demographics of ", "History of ")
_NO_NAMES = frozenset(
    "American English British Canadian Australian Indian Award Awards Academy Emmy Grammy The".split()
)
_PREPOSITIONS = frozenset("in for with on at from to against by near of".split())
MOST_ANSWER_WORDS = 6
MOST_CHARACTERS = 600
"""Of a sentence: what is longer is a list, and takes the forms below long to search."""
MOST_DESCRIBING_WORDS = 18
FEWEST_DESCRIBING_WORDS = 5
MOST_CLAUSE_WORDS = 7
FEWEST_TELLING = 2
"""Names and years in a description."""
_TELLING = re.compile(r"[A-Z][\w'-]+|\d{4}")
_BORDER = re.compile(r",|\b(?:and|who|that|which|from|in|by|for|with|of|on|at|to)\b")
_OPEN_ENDS = frozenset(
    "and the a an by in from for with of on at to also first starring written born known best".split()
)


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact. pattern: finds what is asked for (group v) in what a sentence says of its subject.

    questions: with {x} where the subject goes. noun: what is found, said by the subject ("the director of {x}").
    subject: person, thing or any.
    """

    pattern: re.Pattern[str]
    questions: tuple[str, ...]
    noun: str = ""
    subject: str = "thing"


@dataclass(frozen=True, slots=True)
class Fact:
    """What a sentence says: its value stands in the sentence word for word."""

    relation: Relation
    value: str
    sentence: str

    def asked(self, subject: str, choice: float) -> str:
        """Return a question for the value. choice: 0 up to 1, which of the relation's questions."""
        questions = self.relation.questions
        question = questions[int(choice * len(questions))].format(x=subject)
        return question[0].upper() + question[1:]


def _by(verb: str, done: str, noun: str, questions: Sequence[str] = ()) -> Relation:
    """Who did something: "directed by Martin Brest"."""
    asked = (f"Who {done} {{x}}?", f"{{x}} was {verb} by whom?", *questions)
    return Relation(re.compile(rf"\b{verb} (?:[a-z]+ )?by (?P<v>{_PERSON})"), asked, noun)


def _by_company(verb: str) -> Relation:
    """Which company did something: "published by Nintendo"."""
    return Relation(
        re.compile(rf"\b{verb} (?:[a-z]+ )?by (?:the )?(?P<v>{_NAME}){_ONE}"),
        (f"Who {verb} {{x}}?", f"Which company {verb} {{x}}?", f"{{x}} was {verb} by what company?"),
        f"the company that {verb} {{x}}",
    )


def _in_year(verb: str) -> Relation:
    """When something happened: "founded in 1902"."""
    return Relation(
        re.compile(rf"\b{verb} (?:in|on) (?:(?:the|early|late|{_MONTH}|\d{{1,2}},?) )*?(?P<v>{_YEAR})"),
        (f"In what year was {{x}} {verb}?", f"When was {{x}} {verb}?", f"What year was {{x}} {verb}?"),
    )


RELATIONS = (
    _by("directed", "directed", "the director of {x}", ("Who is the director of {x}?",)),
    _by("written", "wrote", "the writer of {x}", ("Who is the author of {x}?",)),
    _by("produced", "produced", "the producer of {x}"),
    _by("composed", "composed", "the composer of {x}", ("Who is the composer of {x}?",)),
    _by("created", "created", "the creator of {x}", ("Who is the creator of {x}?",)),
    _by("designed", "designed", "the designer of {x}"),
    _by("founded", "founded", "the founder of {x}", ("Who is the founder of {x}?",)),
    _by("hosted", "hosted", "the host of {x}", ("Who is the host of {x}?",)),
    _by("owned", "owns", "the owner of {x}", ("Who is the owner of {x}?",)),
    _by("portrayed", "portrayed", "who portrayed {x}", ("Who plays {x}?",)),
    _by("voiced", "voices", "who voices {x}"),
    *(_by_company(verb) for verb in ("published", "developed", "distributed", "manufactured", "operated", "released")),
    Relation(
        re.compile(rf"\b(?:album|song|single|EP|mixtape) (?:recorded |released )?by (?:the )?{_NATION}"
                   rf"(?:[a-z][a-z/-]+ )+(?P<v>{_NAME}){_ONE}"),
        ("Who recorded {x}?", "Which artist released {x}?", "{x} is by which artist?"),
        "the artist who recorded {x}",
    ),
    Relation(
        re.compile(rf"\b(?:novel|book|play|poem|opera|painting|story) (?:written )?by (?:the )?{_NATION}"
                   rf"(?:[a-z][a-z-]+ )*(?P<v>{_PERSON})"),
        ("Who wrote {x}?", "Who is the author of {x}?", "{x} is a work by which author?"),
        "the author of {x}",
    ),
    Relation(
        re.compile(rf"\b(?:airs|aired|broadcast|premiered) on (?:the )?(?P<v>{_NAME}){_ONE}"),
        ("Which network aired {x}?", "On what channel was {x} shown?"),
        "the network that aired {x}",
    ),
    *map(_in_year, ("founded", "established", "formed", "built", "completed", "opened", "launched", "incorporated")),
    Relation(
        re.compile(rf"\breleased (?:by [^,.;]*? )?(?:on|in) (?P<v>{_DAY}|{_MONTH} \d{{4}}|{_YEAR})"),
        ("When was {x} released?", "When did {x} come out?", "On what date was {x} released?"),
    ),
    Relation(
        re.compile(rf"{_HEAD}an? (?P<v>{_YEAR}) (?:[\w-]+ )*{_WORKS}\b"),
        ("In what year was {x} released?", "What year did {x} come out?", "{x} is from which year?"),
    ),
    Relation(
        re.compile(rf"\bborn (?:on )?(?:{_DAY} |in {_YEAR} |{_YEAR} )?(?:in|at) (?P<v>{_PLACE})"),
        ("Where was {x} born?", "In what place was {x} born?", "What is the birthplace of {x}?"),
        "the place where {x} was born",
        "person",
    ),
    Relation(
        re.compile(rf"\bborn (?:on )?(?P<v>{_DAY})"),
        ("When was {x} born?", "What is the birth date of {x}?", "What is the birthday of {x}?"),
        subject="person",
    ),
    Relation(
        re.compile(rf"^ ?\((?:[^()]*[;,] )??(?P<v>{_DAY}|{_YEAR}) *[-\u2013] *(?:{_DAY}|{_YEAR})"),
        ("When was {x} born?", "What is the birth date of {x}?"),
        subject="person",
    ),
    Relation(
        re.compile(rf"^ ?\([^()]*(?:{_DAY}|{_YEAR}) *[-\u2013] *(?P<v>{_DAY}|{_YEAR})\)"),
        ("When did {x} die?", "On what date did {x} die?"),
        subject="person",
    ),
    Relation(
        re.compile(rf"{_HEAD}an? (?:former |retired )?(?P<v>[A-Z][a-z]+(?:ish|an|ese|ch)) [a-z]"),
        ("What nationality is {x}?", "What is the nationality of {x}?", "{x} is of what nationality?"),
        subject="person",
    ),
    Relation(
        re.compile(rf"{_HEAD}an? (?:former |retired )?(?:[A-Z][\w-]+ )*(?:retired |former )?"
                   r"(?P<v>(?!fictional)[a-z]+(?: [a-z]+){0,2})(?= (?:who|from|for|best|known|born)\b|\.)"),
        ("What is the profession of {x}?", "What is {x}'s occupation?", "{x} works as what?"),
        subject="person",
    ),
    Relation(
        re.compile(r"\b(?:best|most|mainly|widely|well) known for (?:his |her |their )?(?:role |work )?(?:as |in )?"
                   r"(?P<v>(?!(?:with|in|on|as|being|having|both)\b)[^,.;()\"]+)"),
        ("What is {x} best known for?", "What is {x} known for?"),
        subject="any",
    ),
    Relation(
        re.compile(rf"{_HEAD}(?:an?|located|situated) (?:[\w-]+ ){{0,5}}?(?:(?<=located )|{_SITES} )in (?:the )?"
                   rf"(?P<v>{_PLACE})"),
        ("Where is {x} located?", "In what place is {x}?", "{x} is located in what place?"),
        "the place where {x} is located",
    ),
    Relation(
        re.compile(rf"\bin (?P<v>(?:{_WORD} )+County)\b"),
        ("In which county is {x} located?", "{x} is located in what county?", "What county is {x} in?"),
        "the county where {x} is located",
    ),
    Relation(
        re.compile(rf"\b(?:headquartered|headquarters|based|located|situated) (?:is |are )?(?:in|at) (?:the )?"
                   rf"(?P<v>{_PLACE})"),
        ("Where is {x} based?", "In what city is {x} based?", "Where is {x} located?"),
        "the place where {x} is based",
    ),
    Relation(
        re.compile(rf"\bband from (?P<v>{_PLACE})"),
        ("Where is {x} from?", "Where does {x} hail from?"),
        "the place that {x} is from",
    ),
    Relation(
        re.compile(rf"{_HEAD}an? (?:[\w-]+ ){{1,8}}?from (?P<v>{_PLACE})"),
        ("Where is {x} from?", "Where does {x} come from?"),
        "the place that {x} is from",
        "person",
    ),
    Relation(
        re.compile(r"\bpopulation (?:of the \w+ )?(?:was|of|is)(?: about| around| approximately| over)? "
                   r"(?P<v>\d[\d,]+\d)(?![.,]?\d)"),
        ("What is the population of {x}?", "How many people live in {x}?", "{x} has a population of how many?"),
    ),
    Relation(
        re.compile(rf"{_HEAD}the (?:[a-z]+ )?(?:capital|seat)(?: city)?(?: and [a-z ]+)? of (?:the )?(?P<v>{_NAME})"),
        ("{x} is the capital of what?", "What is {x} the capital of?"),
    ),
    Relation(
        re.compile(rf"\bnamed (?:after|for|in honou?r of) (?:the )?(?P<v>{_NAME})"),
        ("Who or what is {x} named after?", "{x} was named after whom?"),
        "what {x} is named after",
        "any",
    ),
    Relation(
        re.compile(rf"\b(?:attended|studied at|graduated from|educated at) (?:the )?(?P<v>{_NAME}){_ONE}"),
        ("Which school did {x} attend?", "Where did {x} study?", "What university did {x} attend?"),
        "the school that {x} attended",
        "person",
    ),
    Relation(
        re.compile(rf"\b(?:plays|played) (?:[a-z-]+ )*?for (?:the )?(?P<v>{_NAME}){_ONE}"),
        ("Which team did {x} play for?", "{x} played for what team?"),
        "the team that {x} played for",
        "person",
    ),
    Relation(
        re.compile(rf"\b(?:is|was) married to (?:[a-z]+ )*(?P<v>{_PERSON})"),
        ("Who is {x} married to?", "Who is the spouse of {x}?"),
        "the spouse of {x}",
        "person",
    ),
    Relation(
        re.compile(rf"\bmember of (?:the )?(?:[a-z]+ )*(?P<v>{_NAME}){_ONE}"),
        ("{x} is a member of what?", "What is {x} a member of?", "Which group does {x} belong to?"),
        "what {x} is a member of",
        "any",
    ),
    Relation(
        re.compile(rf"\b(?:stars|starring) (?:[a-z]+ )*(?P<v>{_PERSON})"),
        ("Who stars in {x}?", "Which actor starred in {x}?"),
        "the star of {x}",
    ),
    Relation(
        re.compile(r"\bin the family (?P<v>[A-Z][a-z]+)"),
        ("Which family does {x} belong to?", "{x} belongs to what family?"),
    ),
)  # fmt: skip
"""In order: of several that find the same words, the first one counts."""


def facts_of(name: str, text: str, sentences: Sequence[str]) -> Iterator[Fact]:
    """Yield what the sentences of a document say about `name`, which it is about; each value once."""
    if name.startswith(_NO_SUBJECT):
        return
    somebody = is_about_somebody(text)
    found = set[str]()
    for sentence in sentences:
        if len(sentence) > MOST_CHARACTERS:
            continue
        said = predicate_of(sentence, name)
        if sentence.startswith("The population "):
            said = sentence.removeprefix("The")
        elif (noun := _NOUN.match(sentence)) and not has_words(sentences[0].lower(), noun[1]):
            continue  # "The screenplay" of a film is another subject
        for relation in RELATIONS:
            if not said or relation.subject == ("thing" if somebody else "person"):
                continue
            match = relation.pattern.search(said)
            if match is None or _BARRIERS.search(said[: match.start()]):
                continue
            value = match["v"].strip()
            if value in found or not _can_be_asked_for(value, name):
                continue
            found.add(value)
            yield Fact(relation, value, sentence)


def _can_be_asked_for(value: str, name: str) -> bool:
    words = value.split()
    return (
        len(words) <= MOST_ANSWER_WORDS
        and not value.endswith(("'s", "\u2019s"))
        and not (len(words) > 1 and words[-1] in _NO_NAMES)
        and words[-1] not in _OPEN_ENDS
        and not has_words(name, value)
        and not has_words(value, name)
    )


def description(name: str, first: str, value: str) -> str:
    """Return what a document is about without its name: "the 2003 American film directed by Martin Brest".

    Args:
        first: the document's first sentence.
        value: what must not stand in the description.

    Returns:
        str: empty where the sentence does not say what it is, or what could be said of many.
    """
    match = re.match(rf"{_HEAD}(?:an?|the) (?P<what>[^;()\"]+)", predicate_of(first, name))
    if match is None:
        return ""
    what = match["what"].rstrip(" .,").split()
    text = " ".join(what[:MOST_DESCRIBING_WORDS])
    if cut := has_words(text, value):
        text = text[: text.index(value)]
    if cut or len(what) > MOST_DESCRIBING_WORDS:
        borders = [one.start() for one in _BORDER.finditer(text)]
        text = text[: borders[-1]] if borders else ""
    words = text.rstrip(" .,").split()
    while words and (words[-1] in _OPEN_ENDS or words[-1].endswith("ed")):
        words.pop()
    text = " ".join(words).rstrip(" .,")
    if len(words) < FEWEST_DESCRIBING_WORDS or len(_TELLING.findall(text)) < FEWEST_TELLING or has_words(text, name):
        return ""
    return f"the {text}"


def clause(sentence: str, subject: str, name: str) -> str:
    """Return what a sentence says of `name` as a clause: "Anna worked for Ray Ltd." as "Anna worked for".

    Args:
        sentence: one about `subject`, which it begins with.

    Returns:
        str: empty where `name` does not end a plain clause with a preposition.
    """
    before, found, _ = sentence.partition(name)
    words = before.removesuffix("the ").split()
    plain = found and before.removeprefix("The ").startswith(subject) and not re.search(r"[,;:()\"\u201c]", before)
    if not plain or len(words) - len(subject.split()) > MOST_CLAUSE_WORDS or words[-1] not in _PREPOSITIONS:
        return ""
    return " ".join(words)
