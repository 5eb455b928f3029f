"""What must never be in a page, looked for in the templates themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast_web.shared.assets import STATIC

TEMPLATES = sorted(STATIC.parent.rglob("*.html"))
SCRIPTS = sorted(path for path in STATIC.rglob("*.js") if "vendor" not in path.parts)

FORBIDDEN = {
    "an inline script": r"<script(?![^>]*\bsrc=)",
    "an inline style sheet": r"<style",
    "an inline style": r"\sstyle\s*=",
    "a handler in an attribute": r"\son[a-z]+\s*=",
    "hx-on": r"hx-on",
    "a js: value": r"""["']js:""",
    "a javascript: address": r"javascript:",
    "a filter on a trigger": r"""hx-trigger="[^"]*\[""",
    "markup that is declared safe": r"\|\s*safe\b|autoescape\s+false",
    "something of another site": r"""(?:src|href|action)=["'](?:https?:)?//""",
}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_template_keeps_to_what_the_content_security_policy_allows(path: Path) -> None:
    text = path.read_text()
    found = [name for name, pattern in FORBIDDEN.items() if re.search(pattern, text)]
    assert found == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_template_has_lines_of_at_most_120_columns(path: Path) -> None:
    assert max(map(len, path.read_text().splitlines())) <= 120


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_makes_no_markup_and_no_code_from_text(path: Path) -> None:
    markup = r"innerHTML\s*=|outerHTML\s*=|insertAdjacentHTML|document\.write"
    code = r"\beval\(|new Function|setAttribute\(\"style"
    assert re.findall(f"{markup}|{code}", path.read_text()) == []


def test_the_rules_find_what_they_look_for() -> None:
    bad = (
        '<script>x</script><style></style><p style="x" onclick="y" hx-on:click="z" hx-vals=\'js:{}\'>'
        '<a href="javascript:x" hx-trigger="keyup[key]">{{ x | safe }}</a><img src="//elsewhere/x">'
    )
    assert [name for name, pattern in FORBIDDEN.items() if not re.search(pattern, bad)] == []
