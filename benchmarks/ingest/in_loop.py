"""What handing ten metrics to the session costs the training loop, with a server that takes them."""

from __future__ import annotations

import gc
import random
import statistics
import time
import uuid

from .peers import METRICS, Holdfast

CALLS = 5000


def log_call_seconds(port: int) -> tuple[float, float]:
    """p50 and p99 of reading ten numbers, and queueing them for the sender; between two calls a matrix product
    drives what they left out of the nearest caches, as training does."""
    import torch

    from holdfast.server_link.connection import ServerConnection
    from holdfast.telemetry.iteration_clock import Iteration, MetricReader
    from holdfast.telemetry.reporter import Reporter, TrainingPosition

    torch.set_num_threads(1)
    name = uuid.uuid4().hex[:12]
    reporter = Reporter(f"loop-{name}", TrainingPosition())
    reporter.link = ServerConnection(
        server=f"http://127.0.0.1:{port}",
        token=Holdfast.token,
        job=f"loop-{name}",
        uid=name,
        attempt=1,
        rank=0,
        spool=None,
    )
    reporter.link.start()
    reader, chance, weights = MetricReader(), random.Random(1), torch.randn(384, 384)
    seconds = []
    gc.freeze()
    for number in range(1, CALLS + 1):
        weights @ weights
        metrics = {name: chance.random() for name in METRICS}
        measured = Iteration(number, 1, time.time(), 0.01, None)
        before = time.perf_counter()
        reader.add(measured, metrics)
        for iteration, values in reader.ready(wait=False):
            reporter.sample(iteration, values)
        seconds.append(time.perf_counter() - before)
    reporter.link.close()
    return statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
