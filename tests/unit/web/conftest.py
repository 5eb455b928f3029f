"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.web_fixtures import agent as agent
from tests.support.web_fixtures import chromium as chromium
from tests.support.web_fixtures import client as client
from tests.support.web_fixtures import clock as clock
from tests.support.web_fixtures import open_page as open_page
from tests.support.web_fixtures import served as served
