"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.agent_fixtures import *  # noqa: F403
