"""Plan the files of `clusterkit data prepare reading`: questions made from documents, split before any is made.

    train/ dev/ test/    questions.jsonl and documents.jsonl each, in the schema of trainer.tasks.hotpotqa_data
    traces.jsonl         for trainer.type=sft: documents with the sentences that a memory should keep (train side only)

Questions of one split are made from its documents alone, and no document is in two splits.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterkit.data.datasets.build import BuildPlan, Output
from clusterkit.data.datasets.cloze import Made, Maker
from clusterkit.data.datasets.corpora import corpus_of, document_row, question_row
from clusterkit.data.datasets.distractors import Misleading, distractors_of
from clusterkit.data.datasets.inputs import TEXT, Input
from clusterkit.data.datasets.passages import Passage, some_of
from trainer.errors import UserError
from trainer.seeding import derive_seed, unit_interval
from trainer.tasks.evidence import MOST_SENTENCES, evidence_of
from trainer.tasks.hotpotqa_data import DOCUMENTS, GENERATED, QUESTIONS, Corpus, Document, Question, render
from trainer.tasks.hotpotqa_split import Side, Sides, draw_documents, split_three

SPLITS = ("train", "dev", "test")
TRACES = "traces.jsonl"
FEWEST_DOCUMENTS = 20
FEWEST_FILES = 20
"""With so many files whole files go to a split, with fewer their passages do."""
PART_ROWS = 5000
MOST_TIMES = 8
"""A question of a rare kind is in the traces, as a multiple of what questions are on average."""
FEWEST_QUESTIONS = 500
"""For training; with fewer they are learned by heart."""
MOST_REPEATS = 40
"""Traces of a question on average, each among other documents: so many as the default has of FEWEST_QUESTIONS."""
MOST_DIGITS = 9
MOST_SHOWN = 60
"""Characters of what was typed, in a message."""
MIXES = (*GENERATED, "real", "final")


@dataclass(frozen=True)
class ReadingShape:
    """How much is made."""

    per_document: int = 4  # cloze questions of a document, and chains that begin with it, at most
    traces: int = 20000  # lines of traces.jsonl, at most MOST_REPEATS times the questions; 0: none
    mix: tuple[float, ...] = (10, 20, 10, 30, 10, 20)
    """Parts of MIXES among them: the kinds of questions made by rule, real ones, and the final turn alone."""
    sizes: tuple[int, ...] = (2, 4, 8, 16)  # documents of a trace, drawn at random
    traced: float = 1.0
    """Share of the real training questions that traces are made of. The others are marked: reinforcement that is asked
    for real questions (task.real_share) then has questions that the supervised start has not seen."""
    distractors: float = 1.0  # share of the traces that are shown memories with sentences that mislead
    sentences: int = MOST_SENTENCES  # of such memories, at most


@dataclass(frozen=True, slots=True)
class Item:
    """A question, the sentence of each gold document that proves the answer, and where it comes from."""

    question: Question
    evidence: tuple[str, ...]


def parse_mix(text: str) -> tuple[float, ...]:
    """Read `cloze=60,chain=20,final=20`; what is not named is 0. Raises UserError."""
    parts = dict.fromkeys(MIXES, 0.0)
    for word in filter(None, (one.strip() for one in text.split(","))):
        name, _, value = word.partition("=")
        try:
            parts[name] = float(value) if name in parts else -1.0
        except ValueError:
            parts[name] = -1.0
        if not 0 <= parts[name] < 10**MOST_DIGITS:
            raise UserError(
                f"--trace-mix {_shown(text)}: write parts such as cloze=10,chain=20,fact=40,real=10,final=20"
            )
    if not sum(parts.values()):
        raise UserError(f"--trace-mix {text}: at least one part must be more than 0")
    return tuple(parts[name] for name in MIXES)


def mix_text(mix: Sequence[float]) -> str:
    """Write a mix as it is typed; one of a version with other kinds of questions as its numbers."""
    if len(mix) != len(MIXES):
        return ",".join(f"{part:g}" for part in mix)
    return ",".join(f"{name}={part:g}" for name, part in zip(MIXES, mix, strict=True) if part)


def sizes_text(sizes: Sequence[int]) -> str:
    """Write numbers of documents as they are typed."""
    return ",".join(map(str, sizes))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read `2,4,8,16`: numbers of documents, each at least 2. Raises UserError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= MOST_DIGITS and int(word) >= 2 for word in words):
        raise UserError(
            f"--trace-documents {_shown(text)}: write numbers from 2 on, of {MOST_DIGITS} digits at most, such as "
            "2,4,8,16"
        )
    return tuple(map(int, words))


def _shown(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def plan_reading(inputs: list[Input], shape: ReadingShape, share: float, seed: int) -> BuildPlan:
    """Split documents and questions, make questions from each split, and traces from the training side.

    Args:
        inputs: folders of HotpotQA files, files in that style, or text files.
        share: of documents and questions for test; dev gets as many.

    Raises:
        UserError: there are too few documents, or no question can be made of them.
    """
    if not 0 < share <= 0.4:
        raise UserError(f"--test-share {share}: dev gets as much as test, so choose more than 0 and at most 0.4")
    sides, left_out = _sides(inputs, share)
    prose = {passage.document.key for given in inputs for passage in given.passages}
    items = {name: _items(getattr(sides, name), shape, seed, prose) for name in SPLITS}
    items = _without_repeats(items)
    _require_enough(inputs, sides, items)
    learned = shape.traces and (shape.mix[MIXES.index("real")] or shape.mix[MIXES.index("final")])
    untraced = _untraced(items["train"], shape, seed) if learned else frozenset[str]()
    outputs = []
    for name in SPLITS:
        outputs.append(_questions(name, items[name], untraced))
        outputs.append(_documents(name, getattr(sides, name).pool))
    if shape.traces:
        traced = [item for item in items["train"] if item.question.id not in untraced]
        outputs.append(_traces(traced, sides.train, shape, seed))
    made = outputs[-1].count if shape.traces else 0
    settings: dict[str, Any] = {"test_share": share, "per_document": shape.per_document, "seed": seed}
    settings |= {"traces": made, "trace_mix": list(shape.mix), "trace_documents": list(shape.sizes)}
    settings |= {"traced_share": shape.traced} if untraced else {}
    if shape.distractors:
        settings |= {"trace_distractors": shape.distractors, "trace_sentences": shape.sentences}
    notes = [
        "No document and no question is in two splits; questions are made from the documents of their own split.",
        "form yes_no marks questions that are answered with yes or no: half of them is right by chance.",
        "evidence of real questions is chosen by a rule: the answer, the other document's title, words in common.",
    ]
    warnings = _warnings(inputs, shape, made, len(untraced), len(items["train"]), len(sides.train.pool))
    texts = {"trace_mix": mix_text, "trace_documents": sizes_text}
    return BuildPlan("reading", inputs, settings, outputs, left_out, notes, warnings, texts)


def _warnings(
    inputs: Sequence[Input], shape: ReadingShape, traces: int, untraced: int, training: int, documents: int
) -> list[str]:
    """Return what the user should know.

    Args:
        traces: how many are made.
        untraced: real training questions of which no trace is made.
        training: training questions.
        documents: training documents.
    """
    found = []
    if binary := [name for given in inputs for name in given.binary]:
        found.append(
            f"{len(binary)} files are not text and were left out ({some_of(binary)}): turn those that hold your texts "
            "into text files first (a PDF: pdftotext, .gz: gunzip)"
        )
    if training < FEWEST_QUESTIONS:
        found.append(
            f"there are only {training} training questions, which a run learns by heart: give more texts, or others "
            "beside them, to learn to read"
        )
    if traces < shape.traces:
        found.append(
            f"{TRACES} has {traces} examples, not {shape.traces}: {MOST_REPEATS} for each of the "
            f"{traces // MOST_REPEATS} questions that it is made of, among other documents each time"
        )
    if shape.traces and (more := [size for size in shape.sizes if size > documents]):
        found.append(
            f"--trace-documents {sizes_text(shape.sizes)}: train has only {documents} documents, and an example that "
            f"is to have {' or '.join(map(str, more))} has all of them: give more texts, or smaller numbers"
        )
    if shape.traced < 1:
        found.append(
            f"{untraced} real training questions are in no trace and have traced=false: task.real_share, which "
            "135M_read has, asks those alone."
            if untraced
            else "--traced-share changes nothing: no real training question would be in the traces."
        )
    return found


def _sides(inputs: list[Input], share: float) -> tuple[Sides, int]:
    questions: dict[str, Question] = {}
    documents: dict[str, Document] = {}
    passages: list[Passage] = []
    left_out = 0
    for given in inputs:
        if given.style == TEXT:
            passages += given.passages
            continue
        corpus, lost = corpus_of(given)
        left_out += lost
        questions.update((question.id, question) for question in corpus.questions)
        for document in (*corpus.documents, *(one for question in corpus.questions for one in question.own)):
            documents.setdefault(document.key, document)
    real_questions = [_with_kept(question, documents) for question in questions.values()]
    sides = split_three(Corpus(real_questions, list(documents.values())), share)
    passages = [passage for passage in passages if passage.document.key not in documents]
    parts = _split_passages(passages, share)
    train, dev, test = (_wider(getattr(sides, name), part) for name, part in zip(SPLITS, parts, strict=True))
    return replace(sides, train=train, dev=dev, test=test), left_out + sides.dropped


def _with_kept(question: Question, documents: Mapping[str, Document]) -> Question:
    """The question with the documents that are written: of those that read the same under several titles, one is."""
    own, gold = ([documents[one.key] for one in ones] for ones in (question.own, question.gold))
    return replace(question, own=tuple(own), gold=tuple(gold))


def _wider(side: Side, documents: Sequence[Document]) -> Side:
    return replace(side, pool=tuple(sorted((*side.pool, *documents), key=lambda d: d.key)))


def _split_passages(passages: Sequence[Passage], share: float) -> tuple[list[Document], ...]:
    """Divide by whole files, or by passages where files are few, or some so large that dev or test would be small."""
    distinct = {passage.document.key: passage for passage in passages}
    sizes = Counter(passage.file for passage in distinct.values())
    places, held = _places(sizes, share)
    by_file = len(sizes) >= FEWEST_FILES and min(held) >= share * len(distinct) / 2
    if not by_file:
        places, _ = _places(dict.fromkeys(distinct, 1), share)
    parts: tuple[list[Document], ...] = ([], [], [])
    for key, passage in distinct.items():
        parts[2 - places.get(passage.file if by_file else key, 2)].append(passage.document)
    return parts


def _places(sizes: Mapping[str, int], share: float) -> tuple[dict[str, int], list[int]]:
    """Choose groups of passages for test (0) and dev (1) by a hash, as long as they fit into their share.

    Returns:
        Their places, and how many passages each of the two has.
    """
    room = round(share * sum(sizes.values()))
    held, places = [0, 0], dict[str, int]()
    for name in sorted(sizes, key=lambda one: unit_interval("reading-group", one)):
        place = held.index(min(held))
        if held[place] + sizes[name] <= room:
            places[name] = place
            held[place] += sizes[name]
    return places, held


def _items(side: Side, shape: ReadingShape, seed: int, prose: Collection[str]) -> list[Item]:
    """Return the real questions of a side, and those made from its documents, in an order that looks random."""
    real = [Item(question, tuple(e.sentence for e in evidence_of(question))) for question in side.questions]
    made = [_item(one) for one in Maker(side.pool, seed, prose).questions(shape.per_document)]
    return sorted([*real, *made], key=lambda item: unit_interval("reading-order", item.question.id, seed))


def _item(made: Made) -> Item:
    question = Question(made.id, made.question, (made.answer,), made.documents, made.documents, made.kind)
    return Item(question, made.evidence)


def _without_repeats(items: dict[str, list[Item]]) -> dict[str, list[Item]]:
    """Drop what is asked with the same words in a held-out split, or has the same answer from the same sentences there.

    Documents that have a sentence in common may be in different splits.
    """
    asked, proved = set[str](), set[str]()
    kept: dict[str, list[Item]] = {}
    for name in reversed(SPLITS):
        kept[name], proofs = [], set[str]()
        for item in items[name]:
            words = _words(item.question.question)
            proof = "\n".join(map(_words, (item.question.answers[0], *item.evidence)))
            if words not in asked and proof not in proved:
                asked.add(words)
                proofs.add(proof)
                kept[name].append(item)
        proved |= proofs
    return {name: kept[name] for name in SPLITS}


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _require_enough(inputs: list[Input], sides: Sides, items: dict[str, list[Item]]) -> None:
    where = " and ".join(str(given.path) for given in inputs)
    total = sum(len(getattr(sides, name).pool) for name in SPLITS)
    if total < FEWEST_DOCUMENTS:
        raise UserError(
            f"{where}: {total} passages of text are too few to train on some and to test on others: add files, to "
            f"at least {FEWEST_DOCUMENTS} passages of a few sentences"
        )
    for name in SPLITS:
        if len(getattr(sides, name).pool) < 2 or not items[name]:
            raise UserError(
                f"{where}: no question can be made for {name} from its {len(getattr(sides, name).pool)} of {total} "
                "passages: add texts in English that have whole sentences with names, years or numbers, or raise "
                "--test-share"
            )


def _untraced(items: Sequence[Item], shape: ReadingShape, seed: int) -> frozenset[str]:
    """Ids of the real questions of which no trace is made: the share is exact, the choice is a hash."""
    real = [item.question.id for item in items if item.question.source not in GENERATED]
    real.sort(key=lambda name: unit_interval("reading-traced", name, seed))
    return frozenset(real[round(shape.traced * len(real)) :])


def _questions(split: str, items: Sequence[Item], untraced: frozenset[str]) -> Output:
    def make(number: int) -> dict[str, Any]:
        question, evidence = items[number].question, list(items[number].evidence)
        row = {**question_row(question), "evidence": evidence, "source": question.source, "form": question.form}
        return row | ({"traced": False} if question.id in untraced else {})

    return Output(f"{split}/{QUESTIONS}", len(items), make, "source", PART_ROWS)


def _documents(split: str, documents: Sequence[Document]) -> Output:
    return Output(f"{split}/{DOCUMENTS}", len(documents), lambda n: document_row(documents[n]), "kind", PART_ROWS)


def _traces(items: Sequence[Item], side: Side, shape: ReadingShape, seed: int) -> Output:
    """Plan traces: every question of a kind once before any comes again, each time among other documents."""
    made = [[item for item in items if item.question.source == kind] for kind in GENERATED]
    real = [item for item in items if item.question.source not in GENERATED]
    pools = [*made, real, items]
    parts: Sequence[float] = [part if pool else 0.0 for part, pool in zip(shape.mix, pools, strict=True)]
    if not sum(parts):
        raise UserError(
            "--trace-mix and --traced-share leave nothing: there is no question of the kinds that are named"
        )
    if asked := sum(parts[:-1]):  # kinds that there are none of leave their room to other questions, not to `final`
        parts = [*(part * sum(shape.mix[:-1]) / asked for part in parts[:-1]), parts[-1]]
    used = sum(len(pool) for pool, part in zip(pools[:-1], parts, strict=False) if part) or len(items)
    count = min(shape.traces, MOST_REPEATS * used)
    parts = _within(parts, [len(pool) for pool in pools[:-1]], count)
    kinds = _interleaved(parts, count)
    if sum(parts[:-1]):  # whole memories are of the same kinds
        pools[-1] = [pools[kind][n % len(pools[kind])] for kind, n in _interleaved(parts[:-1], len(items))]

    misleading = Misleading(side.pool) if shape.distractors else None

    def make(number: int) -> dict[str, Any]:
        kind, place = kinds[number]
        item = pools[kind][place % len(pools[kind])]
        question = item.question
        rng = random.Random(derive_seed("reading-trace", question.id, number, seed))
        row: dict[str, Any] = {"kind": MIXES[kind], "problem": question.question}
        titles = [document.title for document in question.gold]
        evidence = [list(pair) for pair in zip(titles, item.evidence, strict=True)]
        misled = unit_interval("reading-distractors", question.id, number, seed) < shape.distractors
        whole = MIXES[kind] == "final"
        found: list[tuple[str, str]] = []
        if misled or not whole:
            size = max(rng.choice(shape.sizes), len(question.gold))
            documents = draw_documents(rng, question, side, min(size, len(side.pool)))
            if misleading and misled:
                documents = _with_misleading(documents, question, misleading)
            rng.shuffle(documents)
            found = distractors_of(question, documents) if misled else []
        if whole:
            found = found[: max(shape.sentences - len(evidence), 0)]
            rng.shuffle(evidence)  # a memory has them in the order of the sections: their places tell nothing
        else:
            row["context"] = render(documents)
        if found:
            row["distractors"] = found
            if shape.sentences != MOST_SENTENCES:
                row["sentences"] = shape.sentences
        row["evidence"] = evidence
        row["answer"] = f"\\boxed{{{question.answers[0]}}}"
        return row

    return Output(TRACES, count, make, "kind", PART_ROWS)


def _with_misleading(documents: Sequence[Document], question: Question, misleading: Misleading) -> list[Document]:
    """Exchange up to half of the documents that are not gold for such as mislead; the question's own stay."""
    keys, own = {document.key for document in documents}, {document.key for document in question.own}
    drawn = [document for document in documents if document.key not in own]
    room = min(len(drawn), (len(documents) - len(question.gold)) // 2)
    found = misleading.documents(question, room, keys | own)
    kept = [document for document in documents if document.key in own] + drawn[len(found) :]
    return kept + found


def _within(parts: Sequence[float], sizes: Sequence[int], count: int) -> Sequence[float]:
    """Give less room to kinds of few questions, so that no handful of these is learned by heart.

    Args:
        parts: of every kind, and last of the answers from a whole memory, which are of all kinds.
        sizes: questions of every kind.
        count: lines.

    Returns:
        Parts with which no question comes more than MOST_TIMES, or MOST_TIMES as often as all of them on average.
    """
    free = [kind for kind, part in enumerate(parts[:-1]) if part]
    final = count * parts[-1] / sum(parts)
    rows = count - final
    most = MOST_TIMES * max(1.0, rows / max(sum(sizes[kind] for kind in free), 1))
    limited: dict[int, float] = {}
    while free:
        each = (rows - sum(limited.values())) / sum(parts[kind] for kind in free)
        over = [kind for kind in free if each * parts[kind] > most * sizes[kind]]
        if not over:
            break
        limited.update((kind, most * sizes[kind]) for kind in over)
        free = [kind for kind in free if kind not in limited]
    if not limited:
        return parts
    return [limited.get(kind, each * part) for kind, part in enumerate(parts[:-1])] + [final]


def _interleaved(parts: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Return (kind, number within its kind) of every line, so that any run of lines has the parts, nearly."""
    given = [0] * len(parts)
    found = []
    for number in range(count):
        kind = max(range(len(parts)), key=lambda k: parts[k] / sum(parts) * (number + 1) - given[k])
        found.append((kind, given[kind]))
        given[kind] += 1
    return found
