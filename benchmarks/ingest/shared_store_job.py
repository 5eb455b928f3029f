"""The jobs of `shared_store`: forked from one process, so that torch is imported once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import holdfast
from holdfast.system.files import Files

from .shared_store import INTERVAL, ITERATION_SECONDS, PIECE_BYTES, STATE_BYTES, SlowStore, job_names


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name in job_names(int(sys.argv[2])):
        if not os.fork():
            _train(name, folder)
    while True:
        os.wait()


def _train(name: str, folder: Path) -> None:
    slow, write = SlowStore(folder / "rate"), Files.write

    def write_slowly(files: Files, fd: int, data: memoryview, at: int) -> int:
        count = write(files, fd, data, at)  # which may be less than all
        for start in range(0, count, PIECE_BYTES):
            slow.take(min(PIECE_BYTES, count - start))
        return count

    Files.write = write_slowly  # type: ignore[assignment,method-assign]
    model = torch.nn.Linear(STATE_BYTES // 4 - 1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with holdfast.Session(
        name, store=str(folder / "store"), model=model, optimizer=optimizer, every=INTERVAL, retention="last 2"
    ) as session:
        session.resume()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        while True:
            optimizer.step()
            session.step(loss=1.0)
            time.sleep(ITERATION_SECONDS)


if __name__ == "__main__":
    main()
