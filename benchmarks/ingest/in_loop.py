"""The cost of ten metrics per iteration in the training loop, with a server."""

from __future__ import annotations

import gc
import random
import statistics
import time
import uuid

from .peers import METRICS, HoldfastPeer

CALLS = 5000


def log_call_seconds(port: int) -> tuple[float, float]:
    """Return p50 and p99 of reading ten numbers and queueing them for the sender.

    A matrix product between two calls replaces the contents of the CPU caches, as training does.
    """
    import torch

    from holdfast.server_link.connection import ServerConnection
    from holdfast.telemetry.iteration_metrics import Iteration, MetricReader
    from holdfast.telemetry.reporter import Reporter, TrainingPosition

    torch.set_num_threads(1)
    name = uuid.uuid4().hex[:12]
    reporter = Reporter(f"loop-{name}", TrainingPosition())
    link = ServerConnection(
        server=f"http://127.0.0.1:{port}",
        token=HoldfastPeer.token,
        job=f"loop-{name}",
        uid=name,
        attempt=1,
        rank=0,
        spool=None,
    )
    reporter.connect(link)
    link.start()
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
    link.close()
    return statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
