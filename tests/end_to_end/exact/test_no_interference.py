"""Training beside Holdfast is the training without it, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import holdfast
from tests.support.exact_job import DEVICE, ExactJobModel
from tests.support.training_log import Log, bits, digest, first_difference, rng_record

ITERATIONS = 300


def train(store: Path | None, **options: Any) -> tuple[Log, int]:
    """What a script does that draws its own batches from a torch loader; and how many checkpoints it left."""
    for each in (random.seed, numpy.random.seed, torch.manual_seed):
        each(3)
    model = ExactJobModel().to(DEVICE)
    body = [p for p in model.parameters() if p.dtype == torch.float32]
    optimizer = torch.optim.AdamW(body, lr=1e-2)
    head = torch.optim.SGD(model.head.parameters(), lr=1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ITERATIONS)
    data = torch.utils.data.TensorDataset(torch.randn(100, 6), torch.randn(100))
    loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
    session = None
    if store is not None:
        session = holdfast.Session(
            "job", store=store, model=model, optimizer=optimizer, head=head, schedule=schedule, **options
        )
    log: Log = {}
    for _ in range(ITERATIONS // len(loader)):
        for points, targets in loader:
            optimizer.zero_grad()
            head.zero_grad()
            points, targets = points.to(DEVICE), targets.to(DEVICE)
            loss = (model(points * (1 + 0.1 * random.random())) - targets).square().mean()
            loss.backward()
            optimizer.step()
            head.step()
            schedule.step()
            log[len(log) + 1] = {
                "loss": bits(loss.item()),
                "parameters": digest(dict(model.named_parameters())),
                "buffers": digest(dict(model.named_buffers())),
                "gradients": digest([parameter.grad for parameter in model.parameters()]),
                "optimizers": digest([optimizer.state_dict(), head.state_dict(), schedule.state_dict()]),
                **rng_record(),
            }
            if session is not None:
                session.step(loss=loss)
                if session.iteration % 10 == 0:  # however slow the disk is
                    session.wait(300)
    taken = 0
    if session is not None:
        session.close()
        taken = sum(path.name[:12].isdecimal() for path in (store / "job").iterdir())
    return log, taken


@pytest.fixture(scope="module")
def alone() -> Log:
    return train(None)[0]


@pytest.mark.parametrize("options", [{}, {"max_in_flight": 2}], ids=str)
def test_three_hundred_iterations_are_the_same_with_holdfast_and_without(options, alone, tmp_path):
    log, taken = train(tmp_path, every=1, keep=10**6, **options)
    assert len(log) == ITERATIONS
    assert taken > ITERATIONS / 20, "nearly nothing was written while it trained"
    assert first_difference(alone, log) is None
