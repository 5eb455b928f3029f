"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.agent_fixtures import (
    ignore_preexisting_processes_and_threads as ignore_preexisting_processes_and_threads,
)
from tests.support.agent_fixtures import moto as moto
