"""Build docs/ into the pages that the server shows under /guide; a wheel contains them if they have been built.

Sphinx converts the pages; the server puts its own frame around them, so nothing of a theme is kept.

    python -m tools.guide
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from holdfast_web.guide.pages import BUILT, Guide, Page, Part, Section

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILES = ("_images", "_downloads")
"""Folders of what pages show or offer."""
_WORD = re.compile(r'<span class="pre">([^<]*)</span>')
"""Literal text is split into words that do not break, which doubles its size."""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        sphinx = Sphinx(DOCS, DOCS, made, made / ".doctrees", "json", warningiserror=True, status=None)
        sphinx.build()
        if sphinx.statuscode:
            sys.exit("the guide is not built: see the warnings above")
        BUILT.write_bytes(guide(sphinx.env, made).encode())


def guide(env: BuildEnvironment, made: Path) -> Guide:
    parts = [
        Part(title=str(tree["caption"]), pages=[page for _, page in tree["entries"]])
        for tree in env.get_doctree("index").findall(addnodes.toctree)
    ]
    names = ["index", *(page for part in parts for page in part.pages)]
    files = [path for folder in FILES for path in sorted((made / folder).rglob("*.*"))]
    return Guide(
        parts=parts,
        pages={name: _page(env, made, name) for name in names},
        files={path.relative_to(made).as_posix(): path.read_bytes() for path in files},
    )


def _page(env: BuildEnvironment, made: Path, name: str) -> Page:
    built = json.loads((made / f"{name}.fjson").read_text())
    return Page(
        title=env.titles[name].astext(),
        body=_WORD.sub(r"\1", built["body"]),
        contents=built["toc"] if built["display_toc"] else "",
        sections=list(_sections(env.get_doctree(name))),
    )


def _sections(document: nodes.document) -> Iterator[Section]:
    """Yield the sections of a page without those in them, for the search."""
    for section in document.findall(nodes.section):
        title, *rest = section.children
        text = " ".join(part.astext() for part in rest if not isinstance(part, nodes.section))
        yield Section(anchor=section["ids"][0], title=title.astext(), text=" ".join(text.split()))


if __name__ == "__main__":
    main()
