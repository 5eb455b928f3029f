"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.command_fixtures import holdfast as holdfast
from tests.support.command_fixtures import server as server
