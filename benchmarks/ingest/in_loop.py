"""The cost of ten metrics per iteration in the training loop, with a server."""

from __future__ import annotations

import gc
import random
import time
import uuid

from .peers import METRICS, HoldfastPeer

CALLS = 5000


def log_call_seconds(port: int) -> list[float]:
    """Return the seconds of each call that reads ten numbers and queues them for the sender.

    A matrix product between two calls replaces the contents of the CPU caches, as training does.
    """
    import torch

    from holdfast.server_link.connection import ServerConnection
    from holdfast.telemetry.iteration_metrics import Iteration, MetricReader
    from holdfast.telemetry.reporter import Reporter, TrainingPosition

    torch.set_num_threads(1)
    name = uuid.uuid4().hex[:12]
    server, job = f"http://127.0.0.1:{port}", f"loop-{name}"
    reporter = Reporter(job, TrainingPosition())
    link = ServerConnection(
        server=server, token=HoldfastPeer.token, job=job, uid=name, attempt=1, rank=0, spool=None
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
    return seconds
