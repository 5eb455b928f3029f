import pytest

from tests.support import persisting
from tests.support.multi_rank import crowd
from tests.support.object_servers import moto, rclone

__all__ = ["crowd", "moto", "rclone"]


@pytest.fixture(autouse=True)
def strangers():
    """What a test finds running is not what it has left running."""
    persisting.meet_strangers()
