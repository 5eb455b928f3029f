"""Fixtures for agent tests: ranks, object servers, leftover processes."""

import pytest

from tests.support import process_inspection
from tests.support.cloud_servers import azurite, google
from tests.support.multi_rank import launcher
from tests.support.object_servers import moto, rclone

__all__ = ["azurite", "google", "launcher", "moto", "rclone"]


@pytest.fixture(autouse=True)
def ignore_preexisting_processes_and_threads():
    """Leave out what ran before the test when it counts processes and threads."""
    process_inspection.record_preexisting_processes_and_threads()
