"""What the benchmark of ingest sends is what an agent would."""

from __future__ import annotations

import msgspec
import numpy as np

from benchmarks.ingest.peers import METRICS, SAMPLES, STEPS, HoldfastPeer
from holdfast.protocol.wire import Batch


def test_every_body_is_a_batch_of_a_thousand_samples_that_goes_on_after_the_one_before():
    (post,) = HoldfastPeer().posts(port=1, clients=1, bodies=3)
    batches = [msgspec.msgpack.decode(body, type=Batch) for body in post.bodies]
    assert [batch.sequence for batch in batches] == [1, 2, 3]
    samples = [batch.samples for batch in batches]
    iterations = np.concatenate([np.frombuffer(columns.iteration, "<i8") for columns in samples])
    assert iterations.tolist() == list(range(1, 3 * STEPS + 1))
    assert {len(columns.metrics) * STEPS for columns in samples} == {SAMPLES}
    assert all(set(columns.metrics) == set(METRICS) for columns in samples)
