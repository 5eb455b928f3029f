"""What the documentation says of the code is true."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import torch_internals

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGES = (
    "agent/holdfast", "series/holdfast_series", "server/holdfast_server", "web/holdfast_web",
    "migrations/holdfast_migrations",
)  # fmt: skip


def modules() -> Iterator[ast.Module]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            yield ast.parse(path.read_text())


def codes_of_notices() -> set[str]:
    """The literal codes that are reported, and the constants that hold some."""
    found = set()
    for module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                position = {"notice": 1, "_notice": 2}.get(name)
                words = [argument.value if isinstance(argument, ast.Constant) else None for argument in node.args]
                if position is not None and len(words) > position and isinstance(words[position], str):
                    found.add(words[position])
                found |= {
                    word.value.value
                    for word in node.keywords
                    if name == "Notice" and word.arg == "code" and isinstance(word.value, ast.Constant)
                }
    return found


def test_every_notice_is_in_the_troubleshooting_page() -> None:
    codes = codes_of_notices()
    assert {"torn", "damaged", "restore"} <= codes
    page = (DOCS / "troubleshooting.md").read_text()
    first_cells = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    listed = set(re.findall(r"`(\w+)`", first_cells))
    assert codes - listed == set()


@pytest.mark.parametrize(
    ("tool", "document"), [("configuration", "configuration.md"), ("http_api", "http-api.md")]
)
def test_a_generated_page_follows_from_the_declarations(tool: str, document: str) -> None:
    spec = importlib.util.spec_from_file_location(tool, ROOT / "tools" / f"{tool}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / document).read_text() == module.page()


def test_every_private_torch_api_is_documented_with_its_consequence() -> None:
    page = (DOCS / "internals" / "torch-internals.md").read_text()
    assert [
        each.name for each in torch_internals.PRIVATE_APIS if f"| {each.name} | {each.without}" not in page
    ] == []


@pytest.mark.parametrize("source", sorted(DOCS.glob("internals/*.md")), ids=lambda path: path.stem)
def test_files_that_an_internals_page_names_exist(source: Path) -> None:
    """Paths start at the root of the repository, or at that of a package: `store/s3.py`."""
    full = r"(?:agent|server|web|tests|migrations|tools|docs)/[\w/.-]+"
    short = r"(?:[\w-]+/)+[\w-]+\.(?:py|html|css|js|md)"
    named = set(re.findall(rf"`({full}|{short})`", source.read_text()))
    places = [ROOT, *(ROOT / package for package in PACKAGES)]
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


def test_what_the_guide_to_extensions_names_exists() -> None:
    page = (DOCS / "internals" / "extending.md").read_text()
    sources = [
        path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".html")
    ]
    sources += [ROOT / "pyproject.toml", ROOT / "Makefile", *(ROOT / "tools").glob("*.py")]
    known = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    spans = re.findall(r"`([^`\n]+)`", page)
    names = {span.partition("(")[0].split(".")[-1] for span in spans if re.fullmatch(r"[\w.]+(\(.*\))?", span)}
    files = {span for span in spans if re.fullmatch(r"[\w.-]+(/[\w.{}-]+)+/?", span)}
    assert names - known - {"py", "md", "toml"} == set()
    roots = ROOT, ROOT / "agent" / "holdfast", ROOT / "server" / "holdfast_server", ROOT / "web" / "holdfast_web"
    assert {name for name in files if not any((root / name).exists() for root in roots)} == set()


PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])


@pytest.mark.parametrize("source", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_headings_lead_to_one(source: Path) -> None:
    links = [link.partition("#") for link in re.findall(r"\]\(([\w./-]*#[^)\s]+)\)", source.read_text())]
    lost = [
        f"{page}#{heading}"
        for page, _, heading in links
        if heading not in anchors((source.parent / page).resolve() if page else source)
    ]
    assert lost == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    words = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w -]", "", heading).strip().replace(" ", "-") for heading in words}
