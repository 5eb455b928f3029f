"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.end_to_end_fixtures import *  # noqa: F403
