"""Take one checkpoint and wait to be killed: killable_trainer.py BACKEND FOLDER [heir].

With "heir", a forked child keeps the files of the trainer open until the test releases it.
"""

import os
import signal
import sys
from pathlib import Path

from tests.support.faulty_store import FaultyStore, hear, tell
from tests.support.persist_job import PersistJob

if __name__ == "__main__":
    job = PersistJob(FaultyStore(Path(sys.argv[2]), "wait"), sys.argv[1])
    snapshot = job.take()
    if "heir" in sys.argv:
        snapshot.wait_settled()
        if os.fork() == 0:
            hear(Path(sys.argv[2]) / "go")
            os._exit(0)
        tell(Path(sys.argv[2]) / "reached", "forked")
    while True:
        signal.pause()
