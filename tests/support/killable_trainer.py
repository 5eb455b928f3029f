"""Take one checkpoint and wait to be killed: killable_trainer.py FOLDER."""

import signal
import sys
from pathlib import Path

from tests.support.faulty_store import FaultyStore
from tests.support.persist_job import PersistJob

if __name__ == "__main__":
    job = PersistJob(FaultyStore(Path(sys.argv[1]), "wait"))
    job.take()
    while True:
        signal.pause()
