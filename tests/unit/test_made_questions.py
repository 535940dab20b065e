"""Questions that are made from documents by rule: what is asked, and what proves it."""

from __future__ import annotations

import pytest

from clusterkit.data.datasets.cloze import BLANK, Maker
from trainer.tasks.evidence import best_sentence, has_words, sentences
from trainer.tasks.hotpotqa_data import Document, document_key


def document(title: str, text: str) -> Document:
    return Document(title, title, text, document_key(title, text))


PIER = document(
    "Anna Pier", "Anna Pier was born in 1931 in the old harbour. She later worked for Vollmer Works as a clerk."
)
WORKS = document(
    "Vollmer Works", "Vollmer Works made clocks for the navy. The company was founded by Otto Brandt in 1902."
)


def test_a_blank_is_filled_by_words_of_the_sentence_that_proves_it() -> None:
    made = list(Maker([PIER, WORKS], 1).questions(9))
    clozes = [one for one in made if one.kind == "cloze"]

    assert {one.answer for one in clozes} >= {"Anna Pier", "Vollmer Works", "1931", "Otto Brandt"}
    for one in clozes:
        assert one.answer in one.evidence[0]
        assert one.evidence[0] in one.documents[0].text
        assert BLANK in one.question or one.question.endswith("?")
        assert one.answer not in one.question.partition("“")[2].replace(one.documents[0].title, "")


def test_half_of_the_questions_ask_with_a_question_word_in_place_of_a_blank() -> None:
    made = [one for seed in range(20) for one in Maker([PIER, WORKS], seed).questions(9)]
    asked = {one.question: one.answer for one in made if BLANK not in one.question}

    assert asked["Who was born in 1931 in the old harbour?"] == "Anna Pier"
    assert asked["Anna Pier was born in what year in the old harbour?"] == "1931"
    assert asked["Vollmer Works was founded by who in 1902?"] == "Otto Brandt"
    chains = [question for question, answer in asked.items() if "X" in question and answer == "Otto Brandt"]
    assert chains == ["Anna Pier later worked for X as a clerk. X was founded by who in 1902?"]
    assert 0.3 * len(made) < sum(BLANK in one.question for one in made) < 0.7 * len(made)


def test_pronouns_of_a_later_part_and_blanks_of_the_text_itself_are_left_alone() -> None:
    text = (
        "They bought the Silver Mine in 1911 from the old county. Name of the owner of Silver Mine in 1931: ____ Smith."
    )
    made = [one for seed in range(20) for one in Maker([document("Notes, part 2", text)], seed).questions(9)]

    assert made
    assert not any("Notes, part 2 bought" in one.question for one in made)
    assert all(one.evidence[0].startswith("They bought") and one.question.count(BLANK) <= 1 for one in made)


def test_people_and_things_are_compared_by_what_their_first_sentences_say() -> None:
    texts = {
        "Ada Holm": "Ada Holm (born 4 May 1950) is a Swedish painter. She lives in Umea.",
        "Bo Krag": "Bo Krag (12 June 1911 \u2013 3 July 1980) was a Danish writer. His novels are long.",
        "Cai Lund": "Cai Lund (born May 9, 1961) is a Swedish actor. He is tall.",
        "Dry Wells": "Dry Wells (1975) is a Swedish novel. It has no end.",
        "Dovre Works": "Dovre Works is a steel mill in Norway.",
        "Elm Mill": "Elm Mill was a steel mill in Wales.",
        "Fir Hall": "Fir Hall is a country house in Kent.",
        "Gull Rock": "Gull Rock is a country estate and steel mill in Kent.",
    }
    documents = [document(title, text) for title, text in texts.items()]
    made = [one for seed in range(40) for one in Maker(documents, seed).questions(9) if one.kind == "comparison"]
    found = {one.question: one.answer for one in made}

    assert found["Who was born first, Ada Holm or Bo Krag?"] == "Bo Krag"
    assert found["Who is older, Cai Lund or Ada Holm?"] == "Ada Holm"
    assert found["Are Ada Holm and Cai Lund of the same nationality?"] == "yes"
    assert found["Were Bo Krag and Cai Lund both from the same country?"] == "no"
    assert found["Are Fir Hall and Dovre Works both a steel mill?"] == "no"
    assert found["Which is a country house, Fir Hall or Dovre Works?"] == "Fir Hall"
    for one in made:
        assert {name for name in texts if name in one.question} == {d.title for d in one.documents}
        assert all(d.text.startswith(sentence) for d, sentence in zip(one.documents, one.evidence, strict=True))
    assert not any("Dry Wells" in question and ("born" in question or "older" in question) for question in found)
    assert not any("mill" in question and "Mill" in answer for question, answer in found.items())  # its name tells it
    assert "no" not in {a for q, a in found.items() if "Gull Rock" in q and "steel mill" in q}  # it is both


FACTS = {
    "Gigli": ("Gigli is a 2003 American comedy film directed by Martin Brest.", {
        "Who directed Gigli?": "Martin Brest", "In what year was Gigli released?": "2003",
        "Who directed the 2003 American comedy film?": None,  # there are many of these
    }),
    "Dry Sky": ('"Dry Sky" is a song by the British rock band Low Moon. It was released on 4 May 1999 by Ray.', {
        "Who recorded Dry Sky?": "Low Moon", "When was Dry Sky released?": "4 May 1999",
    }),
    "Low Moon": ("Low Moon are a rock band from Leeds, England, formed in 1990. The label was founded by Al Ray.", {
        "Where is Low Moon from?": "Leeds, England", "When was Low Moon formed?": "1990",
        "Who founded Low Moon?": None,  # the label is another subject
    }),
    "Martin Brest": ("Martin Brest (born August 8, 1951) is an American film director. He is best known for his "
                     "long comedies. He attended New York University.", {
        "When was Martin Brest born?": "August 8, 1951", "What nationality is Martin Brest?": "American",
        "What is the profession of Martin Brest?": "film director",
        "Where did Martin Brest study?": "New York University",
        "What is Martin Brest best known for?": "long comedies",
    }),
    "Elm Bay": ("Elm Bay is a small town in Kent County, Ohio. The population was 4,160 at the 2010 census. "
                "It is named after General Tom Elm.", {
        "What is the population of Elm Bay?": "4,160", "Where is Elm Bay located?": "Kent County, Ohio",
        "Who or what is Elm Bay named after?": "General Tom Elm",
    }),
    "Two Hands": ("Two Hands is a film directed by Ann Lee and Bo Ray, which Cy Orr produced. It is based on a novel "
                  "written by Di Poe.", {"Who directed Two Hands?": None, "Who wrote Two Hands?": None}),
    "Sun Ash": ("Sun Ash is a 1999 film directed by Ann Lee and starring Cy Orr. It was written by Swedish author Di "
                "Poe.", {
        "Which 1999 film was directed by Ann Lee and stars Cy Orr?": "Sun Ash",
        "Which Swedish author wrote Sun Ash?": "Di Poe",
    }),
    "Ray Inn": ("Ray Inn is a hotel in the Hill mountain range. It has 240 rooms. It is not owned by Bo Ray. It opened "
                "on May 3, 1902.", {
        "How many rooms does Ray Inn have?": "240", "When was Ray Inn opened?": "May 3, 1902",
        "In what year was Ray Inn opened?": None, "Where is Ray Inn located?": None, "Who owns Ray Inn?": None,
    }),
    "Eda Krag": ("Eda Krag (June 3, 1900 \u2013 1980) was a Danish stage and film actress, who won prizes. She was a "
                 "member of the Elm Council on Trade. She is best known for her role as Old Ann in plays.", {
        "When was Eda Krag born?": "June 3, 1900", "In what year did Eda Krag die?": "1980",
        "On what date did Eda Krag die?": None, "What is Eda Krag a member of?": None,
        "What is the profession of Eda Krag?": None, "Which role is Eda Krag best known for?": "Old Ann",
    }),
}  # fmt: skip


@pytest.mark.parametrize("title", FACTS)
def test_facts_are_asked_for_in_peoples_words_where_a_sentence_states_them_of_its_subject(title: str) -> None:
    text, wanted = FACTS[title]
    asked = {}
    for seed in range(60):
        for one in Maker([document(title, text)], seed).questions(9):
            if one.kind == "fact":
                asked[one.question] = one.answer
                assert has_words(one.evidence[0], one.answer)
                assert not has_words(one.question, one.answer)

    assert {question: asked.get(question) for question in wanted} == wanted


def test_facts_of_a_document_are_asked_for_by_what_another_says_of_it() -> None:
    band = "Low Moon are a British rock band from Leeds, England, formed in 1990."
    texts = {
        "Gigli": FACTS["Gigli"][0],
        "Martin Brest": FACTS["Martin Brest"][0],
        "Low Moon": band,
        "Ann Ash": "Ann Ash (born 1 May 1970) is a British singer from Elm Bay. She often sang abroad for Low Moon.",
        "Cold": "Cold is an album by the rock band Low Moon, released in 2004. On stage Low Moon have it by heart.",
    }
    made = [
        one
        for seed in range(60)
        for one in Maker([document(title, text) for title, text in texts.items()], seed).questions(9)
        if one.kind == "fact" and len(one.documents) == 2
    ]
    asked = {one.question: (one.answer, one.documents[-1].title) for one in made}

    assert asked["When was the director of Gigli born?"] == ("August 8, 1951", "Martin Brest")
    assert asked["Where is the band that Ann Ash often sang abroad for from?"] == ("Leeds, England", "Low Moon")
    assert asked["On stage X have it by heart. When was X formed?"] == ("1990", "Low Moon")
    for one in made:
        assert all(sentence in text.text for sentence, text in zip(one.evidence, one.documents, strict=True))
        assert not has_words(one.documents[0].text, one.answer)
        assert one.documents[-1].title not in one.question


def test_a_chain_asks_for_what_only_the_second_document_says_and_names_it_by_the_first() -> None:
    made = [one for seed in range(20) for one in Maker([PIER, WORKS], seed).questions(9) if one.kind == "chain"]
    chain = next(one for one in made if BLANK in one.question)

    assert [one.title for one in chain.documents] == ["Anna Pier", "Vollmer Works"]
    assert chain.answer in WORKS.text
    assert chain.answer not in PIER.text
    assert "Vollmer Works" not in chain.question
    assert f"worked for {BLANK} as a clerk" in chain.question
    assert chain.evidence[0] in PIER.text
    assert chain.evidence[1] in WORKS.text


def test_sentences_end_at_no_abbreviation_or_initial() -> None:
    text = 'Dr. A. B. Smith met U.S. Senator Hill. "It rained." Then they left St. Louis! Did they?'
    whole = ["Dr. A. B. Smith met U.S. Senator Hill.", '"It rained."', "Then they left St. Louis!", "Did they?"]
    assert sentences(text) == whole


def test_the_sentence_that_helps_holds_the_answer_or_the_way_to_it() -> None:
    assert best_sentence(WORKS, "Who founded the employer of Anna Pier?", ["Otto Brandt"], ["Anna Pier"]).startswith(
        "The"
    )
    assert best_sentence(PIER, "Who founded the employer of Anna Pier?", ["Otto Brandt"], ["Vollmer Works"]).startswith(
        "She"
    )
    assert best_sentence(PIER, "Was Anna born in a harbour?", ["no"], []).startswith("Anna")
