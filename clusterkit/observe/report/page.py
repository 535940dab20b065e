"""The page: one HTML document with style, script and data, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources

from clusterkit.evaluate.scores import scores_of
from clusterkit.observe.report import facts
from clusterkit.observe.report.heldout import heldout_of
from clusterkit.observe.report.plots import Plots, plots, tools
from clusterkit.observe.report.rollouts import rollouts_of
from clusterkit.observe.report.source import Run
from clusterkit.runs.status import Status
from clusterkit.ui.markup import Html, join, tag

SCRIPTS = ("texts.js", "plotdata.js", "plots.js", "tools.js", "heldout.js", "rollouts.js", "live.js")
"""Ours: one script in one scope, after the library."""


def document(title: str, content: Html, above: Html | None = None, live_s: float | None = None) -> str:
    """Return a whole page around `content`. `live_s`: seconds between requests for new content, for the dashboard."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=content_policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),  # else browsers ask for one
        tag("title", title),
        tag("style", Html(_asset("uplot/uPlot.min.css") + _asset("page.css"))),
    )
    body = tag("body", above, tag("main", content), tag("script", Html(_script())), data_live=live_s)
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


@cache
def content_policy() -> str:
    """Return a policy that allows only our script and no requests, so texts of a run can do no harm."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'"
    )


def content(runs: Sequence[Run], now: float, drawn: Plots | None = None, known: str = "") -> Html:
    """Return the content of the page of one run, or of several over one another.

    Args:
        now: Unix seconds.
        known: versions of the parts that the reader has, apart by blanks: these are then left out.
    """
    drawn = drawn or plots(runs)
    statuses = [run.status(now) for run in runs]
    learned = [
        ("closing", "Before and after", facts.final_evaluation(runs), True),
        ("heldout", "How held-out questions are read", heldout_of(runs), True),
    ]
    parts = [
        ("rollouts", "Rollouts", rollouts_of(runs), True),
        ("scores", "Scores of its checkpoints", scores_of([run.directory for run in runs]), True),
        ("settings", "Settings that differ", facts.different_settings(runs), True),
        ("restarts", "Restarts", facts.restarts(runs), True),
        ("checkpoints", "Checkpoints that are kept", facts.checkpoints(runs), False),
        ("warnings", "Warnings", facts.warnings(runs), True),
        ("origin", "Command, code and machine", facts.origins(runs), True),
        ("configuration", "Configuration", facts.all_settings(runs), False),
    ]
    return join(
        _header(runs, statuses, now),
        facts.key_numbers(runs, statuses),
        tools(runs) if drawn.some else None,
        _plots("plots", drawn.markup, drawn.version, known),
        *(_part(*one, known) for one in learned),
        _plots("more-plots", drawn.more, drawn.version, known) if drawn.more else None,
        *(_part(*one, known) for one in parts),
        _footer(runs),
    )


def _plots(name: str, markup: Html, version: str, known: str) -> Html:
    return tag("div", None if version in known.split() else markup, id=name, data_version=version)


def _part(name: str, title: str, markup: Html | None, is_open: bool, known: str) -> Html | None:
    """Return a part that folds, without its content where the reader has it; None without any."""
    if not markup:
        return None
    version = hashlib.sha256(markup.encode()).hexdigest()[:16]
    inside = None if version in known.split() else join(tag("summary", title), markup)
    return tag("details", inside, id=name, data_version=version, open=is_open)


def _header(runs: Sequence[Run], statuses: Sequence[Status], now: float) -> Html:
    names = [join(tag("b", run.name), " ", facts.badge(status)) for run, status in zip(runs, statuses, strict=True)]
    others = names[1:] if len(names) == 2 else [tag("b", f"{len(names) - 1} others")] if names[1:] else []
    title = join(names[0], *(join(tag("small", " against "), name) for name in others))
    return tag("header", tag("h1", title), tag("p", f"As of {facts.moment(now)}", cls="quiet"))


def _footer(runs: Sequence[Run]) -> Html:
    folders = [tag("div", tag("code", run.directory.logs)) for run in runs]
    damaged = sum(run.damaged for run in runs)
    note = tag("div", f"{damaged} damaged lines of metrics.jsonl were passed over.") if damaged else None
    return tag("footer", *folders, note)


@cache
def _script() -> str:
    licence, library = _asset("uplot/LICENSE"), _asset("uplot/uPlot.iife.min.js")
    own = "".join(map(_asset, SCRIPTS))
    return f'/* uPlot:\n{licence}*/\n{library}\n(() => {{\n"use strict";\n{own}}})();\n'


@cache
def _asset(name: str) -> str:
    return resources.files("clusterkit.observe.report").joinpath(name).read_text(encoding="utf-8")
