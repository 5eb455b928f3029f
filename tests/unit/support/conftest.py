"""Fixtures of these tests."""

from __future__ import annotations

from tests.support.agent_fixtures import crowd as crowd
from tests.support.agent_fixtures import moto as moto
from tests.support.agent_fixtures import rclone as rclone
from tests.support.agent_fixtures import strangers as strangers
