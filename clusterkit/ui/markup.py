"""HTML from parts; all that is not markup is escaped, so names and messages cannot inject any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape


class Html(str):
    """A string that is markup."""

    __slots__ = ()


def safe(value: object) -> Html:
    """Return markup unchanged, and anything else as escaped text."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(*parts: object) -> Html:
    """Join parts; None adds nothing."""
    return Html("".join(safe(part) for part in parts if part is not None))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element. Attributes: `cls` is class, `data_x` is data-x; None omits one, True writes only its name."""
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = {"cls": "class"}.get(key, key.replace("_", "-"))
        written += f" {label}" if value is True else f' {label}="{escape(str(value))}"'
    if name in ("meta", "link", "input"):
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def json_data(value: object, **attributes: object) -> Html:
    """Return JSON for a script of the page; `<` is escaped, so no text can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", **attributes)


def table(header: Sequence[object], rows: Sequence[Sequence[object]], cls: str = "") -> Html:
    """Return a table whose first column names the rows, in a box that scrolls on narrow screens."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), cls=f"scroll {cls}".strip(), tabindex="0")
