"""The built documentation: its pages, their order, and a search over their sections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

BUILT = Path(str(files("holdfast_web") / "guide" / "built.json"))

MOST_RESULTS = 30
AROUND = 90
"""Characters of an excerpt on each side of the first word found."""


class Section(msgspec.Struct, frozen=True):
    """What is searched: a section without those in it."""

    anchor: str
    title: str
    text: str


class Page(msgspec.Struct, frozen=True):
    title: str
    body: str
    """HTML."""
    contents: str
    """HTML: a list of the headings; empty for a page that has one."""
    sections: list[Section]


class Part(msgspec.Struct, frozen=True):
    """Pages under one heading of the navigation, in their order."""

    title: str
    pages: list[str]


class Guide(msgspec.Struct, frozen=True):
    parts: list[Part]
    pages: dict[str, Page]
    files: dict[str, bytes]
    """What pages show or offer, by its path below the guide."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def address(self, name: str) -> str:
        return "/guide/" if name == "index" else f"/guide/{name}/"

    def beside(self, name: str) -> tuple[str | None, str | None]:
        """Return the pages before and after one."""
        order = list(self.pages)
        at = order.index(name)
        return order[at - 1] if at else None, order[at + 1] if at + 1 < len(order) else None


@dataclass(frozen=True, kw_only=True)
class Result:
    page: str
    page_title: str
    section: Section
    before: str
    found: str
    after: str
    """The excerpt: what stands before and after the first word found."""


def built_guide() -> Guide | None:
    """Return the guide, or None if it has not been built."""
    return _read(BUILT) if BUILT.exists() else None


@cache
def _read(path: Path) -> Guide:
    return msgspec.json.decode(path.read_bytes(), type=Guide)


def search(guide: Guide, query: str) -> list[Result]:
    """Return the sections that contain all words of a query, the best first: words of titles count most."""
    words = query.lower().split()
    if not words:
        return []
    ranked = []
    for name, page in guide.pages.items():
        page_title = page.title.lower()
        for section in page.sections:
            title, text = section.title.lower(), section.text.lower()
            if all(word in title or word in text or word in page_title for word in words):
                in_titles = sum(20 * (word in title) + 10 * (word in page_title) for word in words)
                times = sum(min(text.count(word), 5) for word in words)
                if in_titles or times:
                    ranked.append((in_titles + times, name, section))
    ranked.sort(key=lambda each: -each[0])
    return [_result(guide, name, section, words) for _, name, section in ranked[:MOST_RESULTS]]


def _result(guide: Guide, name: str, section: Section, words: list[str]) -> Result:
    text, lowered = section.text, section.text.lower()
    at, word = min(((lowered.find(word), word) for word in words if word in lowered), default=(0, ""))
    begin, end = max(at - AROUND, 0), at + len(word)
    return Result(
        page=name,
        page_title=guide.pages[name].title,
        section=section,
        before=("…" if begin else "") + text[begin:at],
        found=text[at:end],
        after=text[end : end + AROUND] + ("…" if end + AROUND < len(text) else ""),
    )
