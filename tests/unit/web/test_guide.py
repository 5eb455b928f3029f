"""The guide: its pages, files and search, and the links of panels into it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast_web.guide import pages
from holdfast_web.guide.pages import Guide, Page, Part, Section, search

ROOT = Path(__file__).resolve().parents[3]
GUIDE = Guide(
    parts=[Part(title="Start", pages=["install", "internals/pages"])],
    pages={
        "index": Page(title="Holdfast", body="<h1>Holdfast</h1>", contents="", sections=[]),
        "install": Page(
            title="Install",
            body='<p>Take <code>pip</code>. <img src="../_images/plot.svg" alt=""></p>',
            contents="<ul><li>Extras</li></ul>",
            sections=[
                Section(anchor="install", title="Install", text="Take pip."),
                Section(anchor="extras", title="Extras", text="x" * 99 + " a <bucket>, the extra s3. " + "y" * 99),
            ],
        ),
        "internals/pages": Page(title="Pages", body="<p>how</p>", contents="", sections=[
            Section(anchor="pages", title="Pages", text="A bucket is also named here."),
        ]),
    },
    files={"_images/plot.svg": b"<svg/>"},
)  # fmt: skip


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make docs` writes, in another place."""
    monkeypatch.setattr(pages, "BUILT", tmp_path / "built.json")
    pages.BUILT.write_bytes(GUIDE.encode())


def test_a_page_has_its_text_the_navigation_and_its_neighbours(built, client):
    page = client.get("/guide/install/").text
    assert "Take <code>pip</code>" in page
    assert '<a href="/guide/install/" aria-current="page">Install</a>' in page
    assert '<a href="/guide/" rel="prev">← Holdfast</a>' in page
    assert '<a href="/guide/internals/pages/" rel="next">Pages →</a>' in page
    assert "<h1>Holdfast</h1>" in client.get("/guide/").text


def test_an_address_without_its_slash_leads_to_the_page_where_links_are_right(built, client):
    for address in ("/guide", "/guide/internals/pages"):
        answer = client.get(address, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, f"{address}/")


def test_only_files_of_the_guide_are_served(built, client):
    assert client.get("/guide/_images/plot.svg").text == "<svg/>"
    for path in (
        "_images/other.svg",
        "guide.json",
        "_images/../guide.json",
        "..%2f..%2fpyproject.toml",
        "%00",
        "nothing/",
    ):
        assert client.get(f"/guide/{path}").status_code == 404, path


def test_a_search_finds_sections_with_all_words_and_marks_the_first(built, client):
    page = client.get("/guide/search", params={"q": "bucket s3"}).text
    assert "1 section with “bucket s3”" in page
    assert 'href="/guide/install/#extras"' in page
    assert "&lt;<mark>bucket</mark>&gt;" in page
    assert client.get("/guide/search", params={"q": "nowhere"}).text.count("<mark>") == 0
    assert client.get("/guide/search").status_code == 200
    assert client.get("/guide/search", params={"q": "x" * 201}).status_code == 422


def test_words_of_titles_count_most():
    assert [(each.page, each.section.anchor) for each in search(GUIDE, "bucket pages")] == [
        ("internals/pages", "pages")
    ]
    assert [each.section.anchor for each in search(GUIDE, "extra")] == ["extras"]


def test_without_a_built_guide_one_line_says_how_to_build_it(tmp_path, monkeypatch, client):
    monkeypatch.setattr(pages, "BUILT", tmp_path / "nothing")
    for path in ("/guide/", "/guide/install/", "/guide/search?q=x"):
        assert "<code>make docs</code>" in client.get(path).text


def _anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as its builder makes them."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_help_of_panels_leads_to_sections_that_exist():
    links = {
        link
        for template in (ROOT / "web" / "holdfast_web").rglob("*.html")
        for link in re.findall(r"help_link\(\s*'([^']+)'", template.read_text())
    }
    assert len(links) > 20
    for link in links:
        page, _, anchor = link.partition("#")
        assert not anchor or anchor in _anchors(page), link
