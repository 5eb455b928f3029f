"""The glossary defines the terms of the pages, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.testclient import TestClient

from holdfast_web.shared.assets import STATIC
from holdfast_web.shared.glossary import TERMS
from tests.support.fake_agent import FakeAgent

GLOSSARY = Path(__file__).resolve().parents[3] / "docs" / "glossary.md"
TEMPLATES = sorted(STATIC.parent.rglob("*.html"))
SCRIPTS = sorted(path for path in STATIC.rglob("*.js") if "vendor" not in path.parts)

PLAIN = {
    "action", "actor", "address", "age", "after", "afterwards", "before", "browser", "category", "cause", "change",
    "continue", "continue as a new job", "created", "data", "definition", "deleted", "down", "duration",
    "elements", "end", "estimated time", "events", "expires", "free space", "from", "gpu-hours",
    "gpu-hours/day lost vs. optimum", "history", "host", "if", "kept", "last seen", "last sign-in", "last used",
    "longest iteration", "longest stall", "loss", "lost", "lowest", "maximum", "maximum per step", "name",
    "nan", "newest readable checkpoint", "now", "object", "other norm", "owner", "people", "permissions",
    "person", "location and its newest iteration", "position in the total", "productive", "rate", "reason",
    "resumes from",
    "repeat", "result", "revoke", "row", "scope", "share", "sign out", "sign-in method", "signed in", "size",
    "started", "state", "taken", "tensor", "this attempt", "time", "to", "total", "undo", "value", "verified",
    "vs. median",
    "after a restart",
    "changed", "enabled", "fired", "first", "free", "full in", "jobs writing", "limit", "linked",
    "load", "next start", "saved", "severity", "store", "stored", "then", "wait for checkpoints", "wait for data",
    "wait for ranks", "waiting", "when", "written per hour", "written",
}  # fmt: skip
"""Labels that need no definition."""
LABELS = re.compile(
    r'<th scope="col"[^>]*>(.*?)</th>|<dt>(?!.*<kbd>)(.*?)</dt>|class="lane-name">(.*?)<'
    r"""|heading\('\w+', '([^']+)'""",
    re.DOTALL,
)


def normal(label: str) -> str:
    """Reduce a label to its term: `Goodput, 1 h` and `Discarded (recoverable)` lose what follows the term."""
    return re.sub(r"[,(].*|\s+(measured|predicted)$", "", label).strip().lower().removesuffix("s")


def labels(template: str) -> set[str]:
    """Return the column headers, facts and lanes of a template."""
    template = re.sub(r'<dl class="keys">.*?</dl>', "", template, flags=re.DOTALL)
    template = re.sub(r"\{\{ term\('([^']+)'\) \}\}", r"\1", template)
    found = ("".join(groups) for groups in LABELS.findall(template))
    texts = (re.sub(r"\{[{%#].*?[}%#]\}|<[^>]+>", " ", text, flags=re.DOTALL) for text in found)
    return {normal(re.sub(r"\s+", " ", text).strip()) for text in texts} - {""}


def test_the_page_of_the_documentation_lists_the_same_terms() -> None:
    rows = re.findall(r"^\| (?!term )([^|]+) \| ([^|]+) \|$", GLOSSARY.read_text(), re.MULTILINE)
    assert rows == list(TERMS.items())
    assert list(TERMS) == sorted(TERMS, key=str.lower)


def test_every_label_of_a_page_is_a_term_or_plain() -> None:
    used = set().union(*(labels(path.read_text()) for path in TEMPLATES))
    plain = {normal(label) for label in PLAIN}
    terms = {normal(term) for term in TERMS}
    assert used - terms - plain == set()
    assert plain & terms == set()
    assert plain - used == set(), "labels that no page has any more"


def test_every_term_is_on_a_page() -> None:
    pages = " ".join(" ".join(path.read_text() for path in [*TEMPLATES, *SCRIPTS]).lower().split())
    states = "durable torn damaged silent"  # rendered from the data
    missing = [term for term in TERMS if normal(term) not in pages and term.lower() not in states]
    assert missing == []


def test_a_page_has_one_name_wherever_it_is_named(client: TestClient, agent: FakeAgent) -> None:
    job, fleet = client.get("/jobs/char-gpt").text, client.get("/").text
    assert '<a class="button small" href="/report">Overnight report</a>' in fleet
    assert '<a href="/jobs/char-gpt/report">overnight report</a>' in job
    for path in ("/report", "/jobs/char-gpt/report"):
        page = client.get(path).text
        assert "<title>Overnight report" in page
        assert "<h1>Overnight report</h1>" in page
    assert '<a href="#recovery">Recovery</a>' in job
    assert "<h2>Recovery</h2>" in client.get("/jobs/char-gpt/recovery").text
