"""The trainer dies while a checkpoint of it is being written."""

import signal
import subprocess
import sys

from holdfast.store import open_store
from tests.support import SUPPORT
from tests.support.faulty_store import hear
from tests.support.persist_job import JOB, faulty


def test_what_a_killed_trainer_was_writing_is_gone(tmp_path):
    faulty(tmp_path, "wait")
    with subprocess.Popen([sys.executable, SUPPORT / "killable_trainer.py", tmp_path]) as trainer:
        hear(tmp_path / "reached")
        trainer.send_signal(signal.SIGKILL)
    assert open_store(tmp_path).checkpoints(JOB) == []
