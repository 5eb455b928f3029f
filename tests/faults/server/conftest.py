"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.server_fixtures import agent as agent
from tests.support.server_fixtures import client as client
from tests.support.server_fixtures import clock as clock
from tests.support.server_fixtures import database_kind as database_kind
from tests.support.server_fixtures import fresh_agent as fresh_agent
from tests.support.server_fixtures import serve as serve
from tests.support.server_fixtures import server_processes as server_processes
from tests.support.server_fixtures import settings as settings
from tests.support.server_fixtures import spawn_server as spawn_server
from tests.support.server_fixtures import stage as stage
