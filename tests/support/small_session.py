"""A session over a model of a few weights."""

import torch

import holdfast


def session_of(store, **options):
    """(model, optimizer, session), with a checkpoint due after every iteration."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return (
        model,
        optimizer,
        holdfast.Session("m", store=store, every=1, model=model, optimizer=optimizer, **options),
    )


def iterate(model, optimizer, session):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    session.step()
