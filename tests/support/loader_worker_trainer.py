"""Train with loader workers that still run when the script ends; print their process ids.

loader_worker_trainer.py FOLDER START_METHOD

`live`, a workload of a fork server, waits to be killed instead: for `wait` after two batches, for `stuck` and
`stuck-without-handler` once each worker sleeps on a lock that is never released.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys

import torch

import holdfast
import tests.support.eager_torch  # noqa: F401


class LockedDataset(torch.utils.data.Dataset):
    def __init__(self, context, free):
        self.lock, self.asleep, self.free = context.Lock(), context.Semaphore(0), free
        self.lock.acquire()

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if index >= self.free:
            self.asleep.release()
            self.lock.acquire()
        return torch.tensor([float(index)])


def train(folder, method, wait=""):
    stuck = wait.startswith("stuck")
    dataset = LockedDataset(multiprocessing.get_context(method), 2 if stuck else 10_000)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    session = holdfast.Session(
        "workers",
        model=model,
        optimizer=optimizer,
        store=folder,
        grace=0 if wait == "stuck-without-handler" else None,
    )
    how = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    global batches  # alive when the interpreter exits, as in a script without functions
    batches = session.batches(holdfast.DataLoader(dataset, **how), epochs=None)
    for _ in range(2):
        model(next(batches)).sum().backward()
        optimizer.step()
        session.step()
    for _ in range(2 * stuck):
        dataset.asleep.acquire()
    return [each.pid for each in multiprocessing.active_children()]


def live(stage, folder, method, wait):
    stage.tell("workers", *train(folder, method, wait))
    while True:
        signal.pause()


if __name__ == "__main__":
    print(*train(*sys.argv[1:]), flush=True)
