"""Accessibility checks of a page with axe-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Page

SOURCE = Path(__file__).parent / "axe-core-4.10.3" / "axe.min.js"
"""The file of the npm package, with its license. Tests use it; the server does not serve it."""
RUN = """async () => {
  const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
  const found = await axe.run(document, { resultTypes: ["violations"], runOnly: { type: "tag", values: tags } });
  return found.violations.map(({ id, help, nodes }) => ({
    id, help, nodes: nodes.map(({ html, failureSummary }) => `${html.slice(0, 200)}: ${failureSummary}`),
  }));
}"""


def violations(page: Page) -> list[dict[str, Any]]:
    """Evaluated by the browser's debugger, which no content security policy binds."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(SOURCE.read_text())
    return list(page.evaluate(RUN))
