"""How often an agent reports."""

from itertools import count
from types import SimpleNamespace

import pytest

from holdfast.protocol.wire import Ack
from holdfast.server_link import batch_sender
from holdfast.server_link.batch_sender import MOST_REPORT_SECONDS, BatchSender, ReportInterval
from holdfast.server_link.event_queue import EventQueue
from holdfast.server_link.http_client import RequestFailed


@pytest.mark.parametrize(
    ("answer_seconds", "least", "most"), [(0.0, 1.0, 1.0), (0.1, 1.0, 1.0), (0.6, 2.9, 3.0), (60.0, 9.9, 10.0)]
)
def test_a_server_that_is_slow_to_answer_gets_reports_less_often(monkeypatch, answer_seconds, least, most):
    now, numbers = [0.0], count(1)

    def ingest(payload, sequence, *, limit_seconds):
        now[0] += answer_seconds
        return Ack(acked=next(numbers), version=1)

    monkeypatch.setattr(batch_sender, "monotonic", lambda: now[0])
    sender = BatchSender(
        SimpleNamespace(ingest=ingest),
        EventQueue("job", "uid", 1, 0, None),
        flush_seconds=1.0,
        on_ack=lambda ack: None,
        on_contact=lambda: None,
    )
    assert sender._pause() == 1.0
    for _ in range(20):
        sender._tick()
    assert next(numbers) == 21  # each was a heartbeat
    assert least <= sender._pause() <= most


def test_while_a_slow_server_is_lost_events_go_to_disk_as_often_as_before(monkeypatch):
    now, lost = [0.0], []

    def ingest(payload, sequence, *, limit_seconds):
        if lost:
            raise RequestFailed("it does not answer")
        now[0] += 3.0
        return Ack(acked=sequence, version=1)

    monkeypatch.setattr(batch_sender, "monotonic", lambda: now[0])
    sender = BatchSender(
        SimpleNamespace(ingest=ingest, server="http://127.0.0.1"),
        EventQueue("job", "uid", 1, 0, None),
        flush_seconds=1.0,
        on_ack=lambda ack: None,
        on_contact=lambda: None,
    )
    for _ in range(20):
        sender._tick()
    assert sender._pause() > 9.0
    lost.append(True)
    sender._tick()
    assert sender._pause() <= 1.0


def test_a_server_that_puts_reports_off_gets_them_less_and_less_often_and_one_that_recovers_as_before():
    interval = ReportInterval(1.0)
    seconds = []
    for answer in [None] * 20 + [0.01] * 20:
        interval.note_answer(answer)
        seconds.append(interval.seconds)
    assert seconds[:20] == sorted(seconds[:20])
    assert 0.9 * MOST_REPORT_SECONDS < seconds[19] <= MOST_REPORT_SECONDS
    assert seconds[-1] == 1.0
