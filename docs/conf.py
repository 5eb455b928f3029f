"""How `make docs` turns this folder into pages."""

import tomllib
from pathlib import Path

project = "Holdfast"
author = "the Holdfast team"
version = release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The reference is built from the docstrings of the installed package.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# Links to code and examples lead out of this folder: to the repository, where these pages are read as well.
suppress_warnings = ["myst.xref_missing"]
html_theme = "furo"
html_title = "Holdfast"
html_favicon = "../web/holdfast_web/static/favicon.svg"


def setup(app):
    """Keep the docstrings of attributes: napoleon takes what stands before a colon in them for a type."""
    kept = {}

    def keep(app, what, name, obj, options, lines):
        if what in ("attribute", "data"):
            kept[name] = list(lines)

    def restore(app, what, name, obj, options, lines):
        if name in kept:
            lines[:] = kept.pop(name)

    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
