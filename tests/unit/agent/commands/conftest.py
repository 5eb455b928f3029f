"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.command_fixtures import holdfast as holdfast
from tests.support.command_fixtures import no_polling_delay as no_polling_delay
from tests.support.command_fixtures import server as server
