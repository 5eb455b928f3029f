"""Figures and how a person reads them, the same in the log, in the commands and on the pages."""

from __future__ import annotations

import json
from pathlib import Path

FORMATS: list[tuple[str, float, str]] = [
    (function, value, text)
    for function, cases in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
    for value, text in cases
]
"""(function, value, text); `format.test.mjs` reads the same file."""
