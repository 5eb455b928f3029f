"""A trainer whose loader still has its workers when the script ends; prints their process ids.

worker_ends.py FOLDER START_METHOD: waits to be killed after two batches, where START_METHOD is followed by `wait`.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys

import torch

import holdfast


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def main(folder, method, *wait):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    session = holdfast.Session("workers", model=model, optimizer=optimizer, store=folder)
    how = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    global batches  # alive when the interpreter exits, as in a script without functions
    batches = session.batches(holdfast.DataLoader(Numbers(), **how), epochs=None)
    for _ in range(2):
        model(next(batches)).sum().backward()
        optimizer.step()
        session.step()
    print(*(each.pid for each in multiprocessing.active_children()), flush=True)
    if wait:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
