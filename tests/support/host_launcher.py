"""Starts the ranks of one host by forking: torchrun's processes would each import torch, in seconds.

host_launcher.py FIRST_RANK COUNT ARGUMENTS    of the trainer; MASTER_ADDR, MASTER_PORT and WORLD_SIZE are set
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401  which DistributedDataParallel imports, in seconds

from tests.support import hosts_trainer


def run(first: int, count: int, arguments: list[str]) -> int:
    """Run the ranks until all have ended or one has failed; the supervisor ends the others with this process."""
    ranks = set()
    for local_rank in range(count):
        if not (pid := os.fork()):
            os.environ |= {"RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank)}
            _train(arguments)
        ranks.add(pid)
    while ranks:
        pid, status = os.wait()
        if status:
            return 1
        ranks.discard(pid)
    return 0


def _train(arguments: list[str]) -> None:
    status = 1
    try:
        hosts_trainer.train(Path(arguments[0]), *map(int, arguments[1:]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
