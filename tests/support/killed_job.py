"""A job with a loop of its own that is killed after an iteration and started again."""

import random

import torch

import holdfast


class Killed(Exception):
    """The process is gone."""


class Job:
    """A linear model; `end` is the end of an iteration, and the end of the process after iteration `dies`."""

    def __init__(self, store, dies=None):
        torch.manual_seed(0)
        random.seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = holdfast.DataLoader(torch.rand(40, 2), batch_size=2, shuffle=True, seed=1)
        self.session = holdfast.Session(
            "job", store=store, every=1, keep=1000, model=self.model, optimizer=self.optimizer,
            loop=holdfast.Variables(step=0),
        )  # fmt: skip
        self.dies, self.losses, self.steps = dies, {}, 0

    def backward(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward()
        return loss.detach()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self, loss):
        self.session.step(loss=loss)
        self.session.wait(300)
        self.losses[self.session.iteration] = loss.item()
        if self.session.iteration == self.dies:
            raise Killed


def run(loop, store, dies=None):
    job = Job(store, dies)
    try:
        loop(job)
    except Killed:
        job.session._close("SIGKILL")
    else:
        job.session.close()
    return job.losses


def is_exact(loop, path, dies):
    """Whether a job that is killed after an iteration has the losses of one that is not."""
    whole = run(loop, path / "whole")
    return {**run(loop, path / "killed", dies), **run(loop, path / "killed")} == whole
