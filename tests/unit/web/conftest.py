"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.web_fixtures import *  # noqa: F403
