"""Pages of evaluations in a real browser: wrong answers can be opened and read; what a model wrote does no harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsers import PHONE
from evalparts import chat_checkpoint, problems_config

from clusterkit.evaluate.pages import write_pages
from evaluation.evaluate import evaluate

ATTACK = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"

# What reaches beyond the window, but for what can be scrolled within it.
TOO_WIDE = """() => [...document.querySelectorAll("body *")].filter((element) =>
  element.getBoundingClientRect().right > document.documentElement.clientWidth + 1 &&
  !element.closest(".scroll, table")).map((element) => element.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with the scores of two checkpoints of a run."""
    root = tmp_path_factory.mktemp("pages")
    data = root / "sums.jsonl"
    rows = [{"id": n, "problem": f"{ATTACK} What is {n} + {n}?", "answer": 2 * n} for n in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for step in (2, 10):
        model = chat_checkpoint(root / "actor" / f"epoch1epochstep{step}globalstep{step}", step)
        write_pages(evaluate(problems_config(model, data, root / "out", n_sampling=1)))
    return root / "out"


def test_wrong_answers_can_be_opened_and_read(output: Path, screen: Callable[..., Any]) -> None:
    shown = screen((output / "index.html").as_uri())
    assert shown.page.locator("figure svg circle").count() >= 2  # the curve over the two checkpoints
    shown.page.locator("table a").first.click()
    page = shown.page
    assert page.locator("h2", has_text="3 of 3 questions with a wrong answer").count() == 1
    first = page.locator("details", has_text="What is 0 + 0?").last
    text = first.locator("pre").first
    assert not text.is_visible()
    first.locator("summary").click()
    assert text.is_visible()
    assert ATTACK in text.inner_text()
    assert "greedy: wrong" in first.inner_text()
    prompt = page.locator("details", has_text="The first prompt, as it was sent")
    prompt.locator("summary").click()
    assert "Please reason step by step" in prompt.locator("pre").inner_text()
    assert page.title() != "taken"
    assert [line for line in shown.said if line.startswith("thrown")] == []
    assert all(url.startswith(("file:", "data:")) for url in shown.asked)


def test_a_page_fits_a_phone(output: Path, screen: Callable[..., Any]) -> None:
    (page,) = output.glob("*globalstep10-*/index.html")
    shown = screen(page.as_uri(), PHONE)
    for summary in shown.page.locator("summary").all():
        summary.click()
    assert shown.page.evaluate(TOO_WIDE) == []
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert shown.page.evaluate(wide) <= 0
