"""A small training job with the state that a resume can get wrong."""

import math
import signal
import subprocess
import sys

import torch
from torch.utils.data import Dataset

import holdfast


class RandomPoints(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.randn(8) + index / 96, torch.tensor(float(index % 7))


class Trainer:
    """Dropout, BatchNorm, a schedule, random augmentation, a value of the loop's own."""

    def __init__(self, store, *, seed=0, job="job", **options):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=5, gamma=0.9)
        self.loop = holdfast.Variables(best_loss=math.inf)
        self.session = holdfast.Session(
            job, store=store, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
            loop=self.loop, **{"every": 3} | options,
        )  # fmt: skip
        self.loader = holdfast.DataLoader(RandomPoints(), batch_size=8, shuffle=True, seed=1)
        self.losses: list[tuple[int, float]] = []

    def iterate(self, x, y):
        loss = (self.model(x).squeeze(1) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.loop.best_loss = min(self.loop.best_loss, loss.item())
        self.losses.append((self.session.iteration + 1, loss.item()))
        self.session.step(loss=loss)

    def run(self, until=36, after=lambda trainer: None):
        for x, y in self.session.batches(self.loader, epochs=3):
            self.iterate(x, y)
            self.settle()
            after(self)
            if self.session.iteration >= until:
                break
        return self

    def settle(self):
        """Waits for the checkpoint under way and its retention: a test then knows which iterations have one."""
        self.session.wait(300)
        assert self.session._saver.retention.wait_idle(300)

    def crash(self):
        """As if the process had been killed between two iterations: nothing more is saved or said."""
        self.session._close("SIGKILL")
        return self

    @property
    def link(self):
        return self.session._reporter.link


TRAIN = """
import os, signal, sys
sys.path[:0] = {path!r}
from tests.support.tiny_job import Trainer
def killed(trainer):
    print(*trainer.losses[-1], flush=True)
    if trainer.session.iteration == {until}:
        os.kill(os.getpid(), signal.SIGKILL)
Trainer(sys.argv[1]).run(after=killed)
"""


def killed_in_process(store, until):
    """The losses of a training process that is killed after an iteration."""
    program = TRAIN.format(path=sys.path, until=until)
    ended = subprocess.run([sys.executable, "-c", program, store], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return [(int(iteration), float(loss)) for iteration, loss in map(str.split, ended.stdout.splitlines())]
