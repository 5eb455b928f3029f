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


class DurableJob:
    """A job whose every iteration is in a durable checkpoint.

    `make` returns the model and the parameters to train; a sample has as many `features`.
    """

    def __init__(self, store, make, features, **options):
        torch.manual_seed(0)
        self.model, trained = make()
        self.optimizer = torch.optim.AdamW(trained)
        self.session = holdfast.Session(
            "job", store=store, every=1, model=self.model, optimizer=self.optimizer, **options
        )
        self.session.resume()
        self.losses, self._features = [], features

    def run(self, iterations):
        for _ in range(iterations):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, self._features)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
            self.session.step()
            self.session.wait(300)
        return self

    def close(self):
        self.session.close()
        return self


def iterate(model, optimizer, session):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    session.step()
