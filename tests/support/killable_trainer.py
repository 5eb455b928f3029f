"""Takes one checkpoint and then trains for ever: BACKEND and the directory of a store that waits.

With "heir", a process that it forked lives on and holds open whatever it did, until it is told to go.
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
