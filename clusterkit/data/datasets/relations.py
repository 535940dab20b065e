"""Forms of sentences that encyclopaedias have, what each says of its subject, and how people ask for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterkit.data.datasets.describing import HEAD

_WORD = r"(?>[A-Z0-9][\w\u2019'&.-]*\w)"
_CAPITAL = r"(?>[A-Z][\w\u2019'&-]*\w)"
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DAY = rf"(?:\d{{1,2}} {_MONTH} \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}})"
_YEAR = r"(?<![\d,./])(?<!\d, )(?:1\d|20)\d\d(?![\d,]\d)"
_DATE = rf"(?:{_DAY}|{_MONTH} \d{{4}}|{_YEAR})"
_LIFE = rf"(?:{_DAY}|(?<![\w.] ){_YEAR})"
_NAME = rf"(?!{_MONTH})(?>{_WORD}(?: (?:(?:of|the|of the|de|la|von|van|for|[A-Z]\.) )?{_WORD})*)"
_PERSON = rf"(?>{_CAPITAL}(?: (?:[A-Z]\.|de|la|von|van|di|{_CAPITAL}))* {_CAPITAL})"
_PLACE = rf"(?!{_MONTH})(?>{_CAPITAL}(?: {_CAPITAL})*(?:, (?:D\.C\.|(?:the )?{_CAPITAL}(?: {_CAPITAL})*))*)"
WORKS = "(?:film|movie|album|song|single|EP|novel|book|series|play|musical|opera|game|magazine|mixtape|documentary)"
SITES = (
    "(?:town|city|village|county|school|district|river|creek|lake|mountain|station|airport|university|college|museum|"
    "park|building|church|street|community|township|hospital|stadium|theat(?:er|re)|mall|restaurant|bridge|island|"
    "region|neighbou?rhood|suburb|municipality|commune|hotel|casino|area|house|peak|valley|road|arena|cemetery|castle|"
    "palace|zoo|garden|library|prison|farm|port|beach|bay|dam|reservoir|forest|located|situated)"
)
_NATION = r"[A-Z][a-z]+(?:ish|an|ese|ch|i)(?:-[A-Z][a-z]+)?"
_NOT_CALLED = r"(?:his|her|its|their|an?|the|then|both|several|of|by|in|for|with|to|from|on|fellow|former)\b"
_CALLED = rf"(?:the )?(?P<n>(?!and )(?:{_NATION} )?(?:(?!{_NOT_CALLED})[a-z][a-z/-]+ ){{1,4}})?"
"""What a name is called before it: "American rock band"."""
_NUMBER = "(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)"
_NO_WORK = (
    r"(?:fictional|character|rules|who|that|which|from|for|and|man|woman|civilian|citizen|champion|member|national|twin|"
    r"child|native|pair|par|dog|one|known|best|born|most)\b"
)


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact. pattern: finds what is asked for (group v) in what a sentence says of its subject.

    questions: with {x} where the subject goes, {n} where the pattern's group n goes (such a question is asked only
        where that is found). "date" and "birthday" are asked for where a day is known, "year" where no more is.
    noun: what is found, said by the subject ("the director of {x}").
    subject: person, thing or any.
    loose: whether what is found may be part of a longer name or list.
    """

    pattern: re.Pattern[str]
    questions: tuple[str, ...]
    noun: str = ""
    subject: str = "thing"
    loose: bool = False


def _by(verb: str, done: str, noun: str, *questions: str) -> Relation:
    """Who did something: "directed by Martin Brest"."""
    asked = (f"Who {done} {{x}}?", f"{{x}} was {verb} by whom?", f"Which {{n}} {done} {{x}}?", *questions)
    return Relation(
        re.compile(rf"(?<![\w-])(?<!executive ){verb} (?:[a-z]+ )?by {_CALLED}(?P<v>{_PERSON})"), asked, noun
    )


def _by_company(verb: str) -> Relation:
    """Which company did something: "published by Nintendo"."""
    return Relation(
        re.compile(rf"(?<![\w-]){verb} (?:[a-z]+ )?by (?:the )?(?P<v>{_NAME})"),
        (f"Who {verb} {{x}}?", f"By whom was {{x}} {verb}?", f"{{x}} was {verb} by whom?"),
        f"the company that {verb} {{x}}",
    )


def _at_date(verb: str) -> Relation:
    """When something happened: "founded in 1902"."""
    return Relation(
        re.compile(rf"(?<![\w-]){verb} (?:in|on) (?P<v>{_DATE})"),
        (f"In what year was {{x}} {verb}?", f"When was {{x}} {verb}?", f"{{x}} was {verb} in what year?"),
    )


def _how_many(noun: str) -> Relation:
    """How many there are of something: "has 30 rooms"."""
    return Relation(
        re.compile(
            rf"\b(?:has|have|had|contains|employs) (?:about |around |over |approximately |nearly )?"
            rf"(?P<v>\d[\d,]*|{_NUMBER}) (?:[a-z-]+ )?{noun}\b(?! of)"
        ),
        (f"How many {noun} does {{x}} have?", f"{{x}} has how many {noun}?"),
        loose=True,
    )


RELATIONS = (
    _by("directed", "directed", "the director of {x}", "Who is the director of {x}?"),
    _by("written", "wrote", "the writer of {x}", "Who is the author of {x}?"),
    _by("produced", "produced", "the producer of {x}"),
    _by("composed", "composed", "the composer of {x}", "Who is the composer of {x}?"),
    _by("created", "created", "the creator of {x}", "Who is the creator of {x}?"),
    _by("designed", "designed", "the designer of {x}"),
    _by("founded", "founded", "the founder of {x}", "Who is the founder of {x}?"),
    _by("hosted", "hosted", "the host of {x}", "Who is the host of {x}?"),
    _by("owned", "owns", "the owner of {x}", "Who is the owner of {x}?"),
    _by("portrayed", "portrayed", "who portrayed {x}", "Who plays {x}?"),
    *(_by_company(verb) for verb in ("published", "developed", "distributed", "manufactured", "operated", "released")),
    Relation(
        re.compile(rf"\b(?:album|song|single|EP|mixtape) (?:recorded |released )?by {_CALLED}(?P<v>{_NAME})"),
        ("Who recorded {x}?", "Which artist released {x}?", "{x} is by which artist?", "Which {n} released {x}?"),
        "the artist who recorded {x}",
    ),
    Relation(
        re.compile(rf"\b(?:novel|book|play|poem|opera|story) (?:written )?by {_CALLED}(?P<v>{_PERSON})"),
        ("Who wrote {x}?", "Who is the author of {x}?", "{x} is a work by which author?", "Which {n} wrote {x}?"),
        "the author of {x}",
    ),
    Relation(
        re.compile(rf"\b(?:airs|aired|broadcast|premiered) on (?:the )?(?!\d)(?P<v>{_NAME})"),
        ("Which network aired {x}?", "On what channel was {x} shown?"),
        "the network that aired {x}",
    ),
    *map(_at_date, ("founded", "established", "formed", "built", "completed", "opened", "launched", "incorporated")),
    Relation(
        re.compile(rf"(?<![\w-])released (?:by [^,.;]*? )?(?:on|in) (?P<v>{_DATE})"),
        ("When was {x} released?", "When did {x} come out?", "On what date was {x} released?"),
    ),
    Relation(
        re.compile(rf"{HEAD}an? (?P<v>{_YEAR}) (?:[\w-]+ )*(?!novel|book|play|opera|magazine){WORKS}\b"),
        ("In what year was {x} released?", "What year did {x} come out?", "{x} is from which year?"),
        loose=True,
    ),
    Relation(
        re.compile(rf"\bborn (?:on )?(?:{_DAY},? |in {_YEAR},? |{_YEAR},? )?(?:in|at) (?P<v>{_PLACE})"),
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
        re.compile(rf"^ ?\((?:[^()]*[;,] )??(?P<v>{_LIFE}) *[-\u2013] *{_LIFE}\)"),
        ("When was {x} born?", "What is the birth date of {x}?", "In what year was {x} born?"),
        subject="person",
        loose=True,
    ),
    Relation(
        re.compile(rf"^ ?\((?:[^()]*[;,] )??{_LIFE} *[-\u2013] *(?P<v>{_DAY}|{_YEAR})\)"),
        ("When did {x} die?", "On what date did {x} die?", "In what year did {x} die?"),
        subject="person",
    ),
    Relation(
        re.compile(rf"{HEAD}an? (?:former |retired )?(?P<v>[A-Z][a-z]+(?:ish|an|ese|ch)) [a-z]"),
        ("What nationality is {x}?", "What is the nationality of {x}?", "{x} is of what nationality?"),
        subject="person",
        loose=True,
    ),
    Relation(
        re.compile(rf"{HEAD}an? (?:former |retired )?(?:[A-Z][\w-]+ )*(?:retired |former )?"
                   rf"(?P<v>(?!{_NO_WORK})[a-z]+(?: (?:and )?(?!{_NO_WORK})[a-z]+){{0,2}})"
                   r"(?= (?:who|from|for|best|known|born)\b|\.)"),
        ("What is the profession of {x}?", "What is {x}'s occupation?", "{x} works as what?"),
        subject="person",
    ),
    Relation(
        re.compile(rf"\bknown for (?:his|her) (?:role|portrayal) (?:as|of) (?:the )?(?P<v>{_NAME})"),
        ("Which role is {x} best known for?", "{x} is known for which role?"),
        subject="person",
    ),
    Relation(
        re.compile(r"\bknown for (?:his|her) (?P<v>(?!roles?|work|portrayal)(?:[^,.;()\"]|\"[^\"]*\")+ "
                   r"(?:[^,.;()\"]|\"[^\"]*\")+)(?=\.$|, (?:which|an?) )"),
        ("What is {x} best known for?", "What is {x} known for?"),
        subject="person",
        loose=True,
    ),
    Relation(
        re.compile(rf"{HEAD}(?:an?|located|situated) (?:[\w-]+ ){{0,5}}?(?:(?<=located )|{SITES} )in (?:the )?"
                   rf"(?P<v>{_PLACE})"),
        ("Where is {x} located?", "In which place is {x} located?", "{x} is located in what place?"),
        "the place where {x} is located",
    ),
    Relation(
        re.compile(rf"\bin (?P<v>(?:{_WORD} )+County)\b(?!.* County\b)"),
        ("In which county is {x} located?", "{x} is located in what county?", "What county is {x} in?"),
        "the county where {x} is located",
        loose=True,
    ),
    Relation(
        re.compile(rf"\b(?:headquartered|based) (?:in|at) (?:the )?(?P<v>{_PLACE})"),
        ("Where is {x} based?", "{x} is based in what place?", "Where are the headquarters of {x}?"),
        "the place where {x} is based",
    ),
    Relation(
        re.compile(rf"\b(?:located|situated) (?:in|at) (?:the )?(?P<v>{_PLACE})"),
        ("Where is {x} located?", "{x} is located in what place?"),
        "the place where {x} is located",
    ),
    Relation(
        re.compile(rf"\bband from (?P<v>{_PLACE})"),
        ("Where is {x} from?", "Where does {x} hail from?"),
        "the place that {x} is from",
    ),
    Relation(
        re.compile(rf"{HEAD}an? (?:[\w-]+ ){{1,8}}?(?<!retired )from (?P<v>{_PLACE})"),
        ("Where is {x} from?", "Where does {x} come from?"),
        "the place that {x} is from",
        "person",
    ),
    Relation(
        re.compile(r"(?<!combined )\bpopulation (?:of the \w+ )?(?:was|of|is)"
                   r"(?: about| around| approximately| over)? (?P<v>\d[\d,]+\d)(?![.,]?\d)"),
        ("What is the population of {x}?", "How many people live in {x}?", "{x} has a population of how many?"),
        loose=True,
    ),
    Relation(
        re.compile(r"\bcapacity (?:was|of|is)(?: about| around| approximately| over)? "
                   r"(?P<v>\d[\d,]+\d)(?![.,]?\d| beds)"),
        ("What is the capacity of {x}?", "{x} has a capacity of how many?"),
        loose=True,
    ),
    *map(_how_many, ("students", "employees", "stores", "rooms", "floors")),
    Relation(
        re.compile(rf"{HEAD}the (?:state |provincial )?capital(?: city)?(?: and [a-z ]+)? of (?:the )?(?P<v>{_NAME})"),
        ("{x} is the capital of what?", "What is {x} the capital of?"),
    ),
    Relation(
        re.compile(rf"{HEAD}the (?:county )?seat of (?P<v>(?:{_WORD} )+County)"),
        ("{x} is the seat of what county?", "What county has {x} as its seat?"),
        loose=True,
    ),
    Relation(
        re.compile(rf"\bnamed (?:after|for|in honou?r of) {_CALLED}(?P<v>{_NAME})"),
        ("Who or what is {x} named after?", "{x} was named after whom or what?", "Which {n} is {x} named after?"),
        "what {x} is named after",
        "any",
    ),
    Relation(
        re.compile(rf"\b(?:attended|studied at|graduated from|educated at) (?:the )?(?P<v>{_NAME})"),
        ("Which school did {x} attend?", "Where did {x} study?", "{x} attended which school?"),
        "the school that {x} attended",
        "person",
    ),
    Relation(
        re.compile(rf"\b(?:plays|played) (?:[a-z-]+ )*?for (?:the )?(?P<v>{_NAME})"),
        ("Which team did {x} play for?", "{x} played for what team?"),
        "the team that {x} played for",
        "person",
    ),
    Relation(
        re.compile(rf"\b(?:is|was) married to {_CALLED}(?P<v>{_PERSON})"),
        ("Who is {x} married to?", "Who is the spouse of {x}?", "Which {n} is {x} married to?"),
        "the spouse of {x}",
        "person",
    ),
    Relation(
        re.compile(rf"\bmember of (?:the )?(?:(?!family)[a-z]+ ){{0,2}}(?P<v>{_NAME})"),
        ("{x} is a member of what?", "What is {x} a member of?"),
        "what {x} is a member of",
        "any",
    ),
    Relation(
        re.compile(rf"(?<!guest )\b(?:stars|starring) (?:[a-z]+ )*(?P<v>{_PERSON})"
                   r"(?=\.$|,? (?:and )?(?:directed|written|produced|released)\b)"),
        ("Who stars in {x}?", "Which actor starred in {x}?"),
        "the star of {x}",
    ),
    Relation(
        re.compile(r"\bin the family (?P<v>[A-Z][a-z]+)"),
        ("Which family does {x} belong to?", "{x} belongs to what family?"),
    ),
)  # fmt: skip
"""In order: of several that find the same words, the first one counts."""
