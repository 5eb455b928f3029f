"""`session.mark`: events of training on the timeline."""

import torch

from holdfast.protocol.field_types import MAX_ANNOTATION
from holdfast.protocol.wire import AnnotationReport
from holdfast.telemetry import reporter
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.small_session import iterate, session_of


def marks(session):
    return session._reporter.link.of(AnnotationReport)


def test_a_mark_is_reported_with_its_iteration_and_metrics(store, linked):
    model, optimizer, session = session_of(store, **linked)
    session.resume()
    iterate(model, optimizer, session)
    loss = torch.tensor(0.28741, requires_grad=True)
    session.mark("validation", val_loss=loss, accuracy=1, confusion=torch.zeros(2, 2), note="good")
    session.mark("epoch 1")
    session.close()
    found = marks(session)
    assert [(mark.iteration, mark.lineage) for mark in found] == [(1, 1)] * 2
    assert [mark.text for mark in found] == ["validation: val_loss 0.2874, accuracy 1", "epoch 1"]


def test_a_script_that_marks_everything_is_limited(store, linked, monkeypatch, caplog):
    monkeypatch.setattr(reporter, "MOST_MARKS", 3)
    session = session_of(store, **linked)[2]
    session.resume()
    for number in range(6):
        session.mark(f"batch {number}" + "!" * 1000)
    session.close()
    assert [mark.text[:7] for mark in marks(session)] == ["batch 0", "batch 1", "batch 2"]
    assert len(marks(session)[0].text) == MAX_ANNOTATION
    assert caplog.text.count("first 3 marks") == 1


def test_an_annotation_is_at_its_iteration_or_at_the_last(store, linked):
    model, optimizer, session = session_of(store, **linked)
    session.resume()
    for _ in range(3):
        iterate(model, optimizer, session)
    session.annotate("new data")
    session.annotate("learning rate halved", iteration=torch.tensor(2))
    for wrong in (99, "soon", -4):
        session.annotate("elsewhere", iteration=wrong)
    session.close()
    assert [(mark.text, mark.iteration) for mark in marks(session)] == [
        ("new data", 3),
        ("learning rate halved", 2),
        ("elsewhere", 3),
        ("elsewhere", 3),
        ("elsewhere", 0),
    ]
