"""HTML put together from parts; whatever is not markup already is escaped, so that no name or message can be."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


class Html(str):
    """Text that is markup."""

    __slots__ = ()


def safe(value: object) -> Html:
    """Markup as it is; anything else as escaped text."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(*parts: object) -> Html:
    """Parts one after another; None is nothing."""
    return Html("".join(safe(part) for part in parts if part is not None))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. Attributes: `cls` is class, `data_x` is data-x; None leaves one out, True writes its name alone."""
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = {"cls": "class"}.get(key, key.replace("_", "-"))
        written += f" {label}" if value is True else f' {label}="{escape(str(value))}"'
    if name in ("meta", "link", "input"):
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def table(header: Sequence[object], rows: Sequence[Sequence[object]], cls: str = "") -> Html:
    """A table whose first column names the rows, in a box that scrolls where the screen is narrow."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), cls=f"scroll {cls}".strip(), tabindex="0")
