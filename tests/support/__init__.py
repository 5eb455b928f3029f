"""What tests share: fixtures, fakes, and the programs that run in other processes."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
"""The folder of the programs that tests start."""
