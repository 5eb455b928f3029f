"""`python -m benchmarks.codecs.incremental`: what incremental checkpoints of a `Session` store.

Each state is trained twice with the same batches, with a durable checkpoint after each of 60 updates, and nothing
is retired: plain, without links, and with `incremental="auto"`. Figures:

- `stored_ratio_…`: space of the plain store by space of the other, as the file system counts it.
- `restore_ratio`: time to load and verify the newest checkpoint, by that of the plain one.
- `dense_look_share`: share of the time of writing that looking for unchanged rows takes where there are none.
- `sent_ratio_sparse_embedding`: bytes that plain checkpoints send to a bucket, by those of the others, as a proxy
  in front of a server counts them. All plain checkpoints send as much: three of them are measured.
- `requests_incremental`: the most requests of a checkpoint after the first that name a base or region file.
"""

from __future__ import annotations

import collections
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import holdfast
from benchmarks.disk import space_bytes
from benchmarks.harness import median_seconds, record_calls, run, scratch
from holdfast.checkpoint import restore
from holdfast.incremental.planner import IncrementalPlanner
from holdfast.save import persister
from holdfast.store import open_store

CHECKPOINTS = 60
ROWS, WIDTH = 400_000, 32
CHANGED_SHARE = 0.005
Update = Callable[[int], None]
Job = Callable[[], tuple[dict[str, Any], Update]]


def embedding(draw: Callable[[torch.Generator], torch.Tensor]) -> Job:
    """A bag of embeddings with SparseAdam, of which each update changes the rows that are drawn."""

    def begin() -> tuple[dict[str, Any], Update]:
        torch.manual_seed(1)
        rows = torch.Generator().manual_seed(2)
        model = torch.nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)

        def update(_: int) -> None:
            optimizer.zero_grad()
            model(draw(rows)[None]).sum().backward()
            optimizer.step()

        return {"model": model, "optimizer": optimizer}, update

    return begin


def uniform(generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(ROWS, generator=generator)[: int(ROWS * CHANGED_SHARE)]


def zipf(generator: torch.Generator) -> torch.Tensor:
    """Draw as many rows by Zipf's law, with repetition."""
    weights = 1 / torch.arange(1, ROWS + 1, dtype=torch.float64)
    return torch.multinomial(weights, int(ROWS * CHANGED_SHARE), replacement=True, generator=generator)


class Ring(torch.nn.Module):
    """A buffer of observations, written in turn, and the network that learns from it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("observations", torch.zeros(200_000, 64))
        self.net = torch.nn.Linear(64, 64)


def ring() -> tuple[dict[str, Any], Update]:
    torch.manual_seed(1)
    model = Ring()
    optimizer = torch.optim.AdamW(model.parameters())
    count = int(len(model.observations) * CHANGED_SHARE)

    def update(number: int) -> None:
        places = torch.arange(number * count, (number + 1) * count) % len(model.observations)
        model.observations[places] = torch.randn(count, 64)
        optimizer.zero_grad()
        model.net(model.observations[places]).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, update


def forked_ring() -> tuple[dict[str, Any], Update]:
    """The same buffer in NumPy, which a fork writes."""
    rows = np.zeros((200_000, 64), np.float32)
    count, random = int(len(rows) * CHANGED_SHARE), np.random.default_rng(1)

    def update(number: int) -> None:
        rows[np.arange(number * count, (number + 1) * count) % len(rows)] = random.random((count, 64))

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    loop = holdfast.Variables(observations=rows)
    return {"model": model, "optimizer": optimizer, "loop": loop, "host_state": "fork"}, update


def layers(*, is_frozen: bool) -> Job:
    """A network with AdamW: only adapters on a frozen base, or all weights."""

    def begin() -> tuple[dict[str, Any], Update]:
        torch.manual_seed(1)
        base = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).requires_grad_(not is_frozen)
        model = torch.nn.ModuleDict({"base": base, "adapter": torch.nn.Linear(1024, 4)})
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])

        def update(_: int) -> None:
            optimizer.zero_grad()
            model["adapter"](base(torch.randn(4, 1024))).square().mean().backward()
            optimizer.step()

        return {"model": model, "optimizer": optimizer}, update

    return begin


def train(job: Job, store: str | Path, checkpoints: int, **options: Any) -> Iterator[int]:
    """Train with a checkpoint after each update but the first; yield the number of each that is durable."""
    objects, update = job()
    options = {"every": 10**9, "keep": checkpoints + 1} | options
    with holdfast.Session("job", store=store, **options, **objects) as session:
        session.resume()
        update(0)
        session.step()
        session.wait(120)  # until memory for checkpoints is allocated
        for number in range(1, checkpoints + 1):
            update(number)
            session.checkpoint()
            session.step()
            (outcome,) = session.wait(120)
            assert outcome.is_durable, outcome
            yield number


def stored(job: Job, root: Path, checkpoints: int, **options: Any) -> int:
    """Train; return the space that the store takes, with all checkpoints."""
    collections.deque(train(job, root, checkpoints, **options), 0)
    return space_bytes(root)


def sent(job: Job, folder: Path, checkpoints: int, **options: Any) -> tuple[list[int], list[int]]:
    """Train with a bucket as store; return the bytes sent and the requests for layered files, by checkpoint."""
    from tests.support import object_servers

    requests, found = list[tuple[str, int]](), list[list[tuple[str, int]]]()
    server = object_servers.Moto(folder)
    with object_servers.running(server), object_servers.S3FaultProxy(server.address) as proxy:

        def record(request: object_servers.ProxiedRequest) -> None:
            requests.append((request.path.partition("?")[0], len(request.body)))
            proxy.requests.clear()  # they hold all bytes

        proxy.rules.append(record)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with mock.patch.dict("os.environ", clean | object_servers.variables(proxy.address), clear=True):
            for _ in train(job, f"s3://{object_servers.BUCKET}/sent", checkpoints, **options):
                found.append([each for each in requests if not each[0].endswith(f"/{object_servers.BUCKET}/")])
                requests.clear()
    sizes = [sum(size for _, size in each) for each in found]
    layered = [sum(path.endswith((".base", ".rows")) for path, _ in each) for each in found]
    return sizes, layered


def load(root: Path) -> None:
    """Load and verify the newest checkpoint."""
    store = open_store(root)
    restore.load(store, "job", store.checkpoints("job")[-1])


def look_share(root: Path, checkpoints: int) -> float:
    """Return the share of the writers' time in which a dense state is looked at."""
    looking, writing = record_calls(IncrementalPlanner, "plan"), record_calls(persister, "write_checkpoint")
    stored(layers(is_frozen=False), root, checkpoints, incremental="auto")
    return sum(looking) / sum(writing)


def main(checkpoints: int = CHECKPOINTS, rounds: int = 5, folder: Path | None = None) -> dict[str, float]:
    """Measure each state.

    Args:
        folder: where the stores are; default: the temporary directory
    """
    jobs = {
        "sparse_embedding": embedding(uniform),
        "zipf_embedding": embedding(zipf),
        "ring_buffer": ring,
        "forked_ring_buffer": forked_ring,
        "lora": layers(is_frozen=True),
    }
    found: dict[str, float] = {}
    for name, job in jobs.items():
        with scratch(folder) as place:
            plain, other = place / "plain", place / "incremental"
            with mock.patch.dict("os.environ", {"HOLDFAST_DISABLE": "links"}):
                plain_bytes = stored(job, plain, checkpoints, incremental=False)
            other_bytes = stored(job, other, checkpoints, incremental="auto")
            seconds, plain_seconds = median_seconds(rounds, partial(load, other), partial(load, plain))
        found |= {
            f"stored_ratio_{name}": plain_bytes / other_bytes,
            f"restore_ratio_{name}": seconds / plain_seconds,
        }
        print(f"{name}: plain {plain_bytes / 1e6:,.0f} MB, incremental {other_bytes / 1e6:,.0f} MB", flush=True)
    with scratch(folder) as place:
        sizes, _ = sent(embedding(uniform), place, 3, incremental=False)
        plain_bytes = checkpoints * statistics.median(sizes)
        sizes, layered = sent(embedding(uniform), place, checkpoints, incremental="auto")
    print(f"bucket: plain {plain_bytes / 1e6:,.0f} MB sent, incremental {sum(sizes) / 1e6:,.0f} MB", flush=True)
    found |= {"sent_ratio_sparse_embedding": plain_bytes / sum(sizes), "requests_incremental": max(layered[1:])}
    with scratch(folder) as place:  # last: it replaces functions
        return found | {"dense_look_share": look_share(place, checkpoints)}


if __name__ == "__main__":
    run(main)
