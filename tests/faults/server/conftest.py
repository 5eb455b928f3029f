"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.server_fixtures import *  # noqa: F403
