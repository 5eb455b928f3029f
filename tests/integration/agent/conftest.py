"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.agent_fixtures import azurite as azurite
from tests.support.agent_fixtures import google as google
from tests.support.agent_fixtures import (
    ignore_preexisting_processes_and_threads as ignore_preexisting_processes_and_threads,
)
from tests.support.agent_fixtures import launcher as launcher
from tests.support.agent_fixtures import moto as moto
from tests.support.agent_fixtures import rclone as rclone
