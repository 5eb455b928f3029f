"""What a trainer learns from the supervisor above it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEGINS = """
import time
first_line = time.time()
from holdfast.system import supervisor_channel as supervision
print(supervision.attempt_began_at() <= first_line, supervision.attempt_began_at() > first_line)
"""


def begins(**environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    ran = subprocess.run([sys.executable, "-c", BEGINS], env=kept | environment, capture_output=True, check=True)
    return ran.stdout.decode().strip()


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc tells when a process started")
def test_an_attempt_that_a_supervisor_restarted_began_with_its_process_and_a_further_one_later() -> None:
    """The supervisor started something else long before: torchrun, or a script of several trainers."""
    assert begins(HOLDFAST_STARTED_AT="1.0", HOLDFAST_PREVIOUS_EXIT="killed by SIGKILL") == "True True"


@pytest.mark.parametrize("environment", [{}, {"HOLDFAST_STARTED_AT": "1.0"}])
def test_an_attempt_that_nothing_restarted_begins_when_it_reports(environment: dict[str, str]) -> None:
    assert begins(**environment) == "False True"
