"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.crash_fixtures import stores as stores
from tests.support.crash_fixtures import strace as strace
from tests.support.crash_fixtures import trainers as trainers
