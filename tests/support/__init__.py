"""Shared test support: fixtures, fakes, and programs that tests start as processes."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
"""The folder of the programs that tests start."""
