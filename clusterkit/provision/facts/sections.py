"""Split the probe's output at its headings."""

from __future__ import annotations

from dataclasses import dataclass, field

_KILLED = (124, 137)


@dataclass
class Section:
    """One part of the probe's output."""

    lines: list[str] = field(default_factory=list)
    exit_code: int | None = None  # None where the part is more than one command

    @property
    def timed_out(self) -> bool:
        """Whether its time limit ended it."""
        return self.exit_code in _KILLED

    @property
    def first(self) -> str:
        """Its first line that is not empty."""
        return next((line.strip() for line in self.lines if line.strip()), "")


class Sections(dict[str, Section]):
    """Sections by name; one that the probe did not print is empty."""

    def __missing__(self, key: str) -> Section:
        return Section()


def split(text: str) -> Sections:
    """Split the output at its headings; what comes before the first (a login banner) is dropped."""
    sections = Sections()
    current: Section | None = None
    for line in text.splitlines():
        if not line.startswith("@@"):
            if current is not None:
                current.lines.append(line)
        elif line.startswith("@@rc") and len(words := line.split()) == 3:
            sections.setdefault(words[1], Section()).exit_code = _int(words[2])
        else:
            current = sections.setdefault(line[2:].strip(), Section())
    return sections


def is_whole(sections: Sections) -> bool:
    """Return whether the probe ran to its end."""
    return "end" in sections


def _int(text: str, default: int = 0) -> int:
    try:
        return int(text)
    except ValueError:
        return default
