"""One of two ranks that meet by `env://`; in its first start, rank HELD waits in an iteration for the file `go`.

env_ranks_trainer.py FOLDER HELD
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.support.eventually import eventually

ITERATIONS, HELD_AT = 8, 4


def main(folder: Path, held: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, name = dist.get_rank(), f"start-{dist.get_rank()}-"
    is_first = not list(folder.glob(f"{name}*"))
    (folder / f"{name}{os.getpid()}").touch()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with holdfast.Session("pair", model=model, optimizer=optimizer, store=str(folder / "store")) as session:
        session.resume()
        while session.iteration < ITERATIONS:
            if is_first and rank == held and session.iteration == HELD_AT:
                (folder / "held").touch()
                eventually((folder / "go").exists)
            loss = model(torch.ones(4, 4)).square().mean()
            loss.backward()
            optimizer.step()
            session.step(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
