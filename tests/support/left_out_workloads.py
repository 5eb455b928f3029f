"""A training job that goes back and leaves data out, and the loop over an order without that data."""

import torch
from torch.utils.data import Dataset

import holdfast
from holdfast.engine import trouble_rule
from holdfast.store import open_store

SAMPLES, BATCH_SIZE, EPOCHS = 48, 4, 3


class NoisyPoints(Dataset):
    def __init__(self):
        self.points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.points[index] + 0.01 * torch.randn(4)


def loader_of(workers=0, **options):
    arguments = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3, "num_workers": workers}
    return holdfast.DataLoader(NoisyPoints(), **arguments | options)


class LeavingOutJob:
    """A job with dropout and Adam, whose losses by iteration are those of its newest lineage."""

    def __init__(self, store, *, workers=0, loader=None, **options):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.loader = loader if loader is not None else loader_of(workers)
        self.losses = {}
        self.session = holdfast.Session(
            "job", store=store, model=self.model, optimizer=self.optimizer, **{"every": 5, "keep": 50} | options
        )

    def update(self, batch):
        return update(self.model, self.optimizer, batch)

    def run(self, before_step=lambda job, iteration: None, until=None, accumulate=1, lineage=1):
        """Train to the end, or `until` an iteration of a `lineage` has ended.

        `before_step` is called with the number of the iteration that ends.
        """
        batches = self.session.batches(self.loader, epochs=EPOCHS)
        for number, batch in enumerate(batches, start=1):
            loss = self.update(batch)
            if number % accumulate:
                continue
            iteration = self.session.iteration + 1
            self.losses = {each: loss for each, loss in self.losses.items() if each < iteration} | {
                iteration: loss
            }
            self.session.wait()
            before_step(self, iteration)
            self.session.step(loss=loss)
            if until is not None and (self.session.lineage, self.session.iteration) >= (lineage, until):
                self.session.wait()
                return self
        self.session.close()
        return self

    def kill(self):
        """As if the process had been killed between two iterations."""
        self.session._close("SIGKILL")
        return self


def update(model, optimizer, batch):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def losses_without(left_out, *, workers=0, **options):
    """Return the losses of a plain loop over an order without the batches of these numbers."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer, loader = torch.optim.Adam(model.parameters(), 1e-2), loader_of(workers, **options)
    numbered = enumerate(batch for _ in range(EPOCHS) for batch in loader)
    losses = [update(model, optimizer, batch) for number, batch in numbered if number not in left_out]
    return dict(enumerate(losses, start=1))


def restore_once(at, when, **how):
    """Return a function for `run` that restores `at` when iteration `when` of the first lineage ends."""

    def before_step(job, iteration):
        if iteration == when and job.session.lineage == 1:
            job.session.restore(at, **how)

    return before_step


class NumberedPoints(NoisyPoints):
    def __getitem__(self, index):
        return super().__getitem__(index), index


def train_ranks(stage, store, when, batches=0, bad_rank=None):
    """Train on each rank; return the samples of each iteration, and those of a loop that leaves none out.

    After iteration `when` rank 0 asks for a restore; or the loss of `bad_rank` is not finite, until one happens.
    """

    def loader():
        return holdfast.DataLoader(NumberedPoints(), batch_size=BATCH_SIZE, shuffle=True, seed=3)

    trouble_rule.AGREE_EVERY_SECONDS = 0.0  # each boundary decides, also the first after a restore
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    session = holdfast.Session(
        "job",
        store=store,
        every=1,
        on_trouble="off" if bad_rank is None else "restore",
        model=model,
        optimizer=optimizer,
    )
    seen, at = {}, 0
    for points, numbers in session.batches(loader(), epochs=EPOCHS):
        iteration = session.iteration + 1
        seen = {each: samples for each, samples in seen.items() if each < iteration} | {
            iteration: numbers.tolist()
        }
        loss = update(model, optimizer, points)
        session.wait()
        if bad_rank is not None:
            is_bad = iteration >= when and session.lineage == 1 and session.rank == bad_rank
            session.step(loss=float("nan") if is_bad else loss)
            continue
        if iteration == when and session.lineage == 1:
            at = max(int(each[:12]) for each in open_store(store).checkpoints("job"))
            session.restore(at, skip_batches=batches)
        session.step()
    lineage = session.lineage
    session.close()
    again = loader()
    everything = [numbers.tolist() for _ in range(EPOCHS) for _, numbers in again]
    return {"at": at, "lineage": lineage, "samples": list(seen.values()), "all": everything}


def start_ranks_of_which_one_cannot(stage, store):
    """Restore without some data and end; start again, with a loader on rank 1 that cannot leave it out."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def begin(loader):
        session = holdfast.Session("job", store=store, every=1, model=model, optimizer=optimizer)
        return session, session.batches(loader, epochs=EPOCHS)

    def loader():
        return holdfast.DataLoader(NumberedPoints(), batch_size=BATCH_SIZE, shuffle=True, seed=3)

    def train(session, batches, until):
        samples = []
        for points, numbers in batches:
            samples.append(numbers.tolist())
            update(model, optimizer, points)
            session.wait()
            if session.iteration + 1 == 6 and session.lineage == 1:
                newest = max(int(each[:12]) for each in open_store(store).checkpoints("job"))
                session.restore(newest, skip_batches=1)
            session.step()
            if (session.lineage, session.iteration) >= until:
                return samples
        return samples

    session, batches = begin(loader())
    train(session, batches, (2, 0))
    session._close("SIGKILL")
    other = loader()
    if session.rank == 1:
        other.leave_out = lambda *_: (_ for _ in ()).throw(ValueError("not here"))
    session, batches = begin(other)
    at, samples = session.iteration, train(session, batches, (3, session.iteration + 2))
    lineage = session.lineage
    session.close()
    again = loader()
    everything = [numbers.tolist() for _ in range(EPOCHS) for _, numbers in again]
    return {"at": at, "lineage": lineage, "samples": samples, "all": everything}
