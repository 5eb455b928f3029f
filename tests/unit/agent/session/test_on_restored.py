"""`session.on_restored`, `session.logger_runs` and `session.url`."""

import logging

import torch

import holdfast
from holdfast.checkpoint.forking import fork
from holdfast.store import open_store
from tests.support.clock import FakeClock, train_by
from tests.support.fake_server_connection import FakeServerConnection
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.small_session import iterate, session_of


def trained(store, iterations, **options):
    """(model, optimizer, session) after `iterations` from the start, with a checkpoint of each."""
    model, optimizer, session = session_of(store, loop=holdfast.Variables(), **options)
    session.resume()
    for _ in range(iterations):
        iterate(model, optimizer, session)
        session.wait(300)
    return model, optimizer, session


def test_a_fresh_start_calls_no_callback(store):
    model, optimizer, session = session_of(store)
    calls = []
    session.on_restored(lambda *where: calls.append(where))
    session.resume()
    iterate(model, optimizer, session)
    session.close()
    assert calls == []


def test_a_callback_is_called_after_a_resume_with_the_state_in_place(store):
    trained(store, 3)[2].close()
    model, _, session = session_of(store, loop=holdfast.Variables())
    fresh, calls = model.weight.detach().clone(), []
    session.on_restored(
        lambda iteration, lineage: calls.append(
            (iteration, lineage, session.iteration, torch.equal(model.weight, fresh))
        )
    )
    assert calls == []
    session.resume()
    session.close()
    assert calls == [(3, 1, 3, False)]


def test_callbacks_registered_after_the_resume_are_called_at_once_with_where_it_went_back_to(store):
    trained(store, 3)[2].close()
    model, optimizer, session = session_of(store, loop=holdfast.Variables())
    calls = []
    session.resume()
    iterate(model, optimizer, session)
    session.on_restored(lambda *where: calls.append(("first", *where)))
    session.on_restored(lambda *where: calls.append(("second", *where)))
    session.close()
    assert calls == [("first", 3, 1), ("second", 3, 1)]


def test_callbacks_are_called_after_each_restore_in_place_in_the_order_of_registration(store):
    model, optimizer, session = trained(store, 5)
    calls = []
    session.on_restored(lambda *where: calls.append(("first", *where)))
    session.on_restored(lambda *where: calls.append(("second", *where)))
    session.restore(2)
    iterate(model, optimizer, session)
    session.restore(1)
    iterate(model, optimizer, session)
    session.close()
    assert calls == [("first", 2, 2), ("second", 2, 2), ("first", 1, 3), ("second", 1, 3)]


def test_a_restore_that_is_refused_calls_no_callback(store):
    model, optimizer, session = trained(store, 3, restorable_in_place=False)
    calls = []
    session.on_restored(lambda *where: calls.append(where))
    session.restore(1)
    iterate(model, optimizer, session)
    session.close()
    assert calls == []
    assert session.iteration == 4


def test_an_exception_in_a_callback_is_logged_and_training_and_the_other_callbacks_go_on(store, caplog):
    model, optimizer, session = trained(store, 3)
    calls = []

    def fail(iteration, lineage):
        raise ValueError("no such run")

    session.on_restored(fail)
    session.on_restored(lambda *where: calls.append(where))
    session.restore(1)
    with caplog.at_level(logging.ERROR, "holdfast"):
        iterate(model, optimizer, session)
    assert calls == [(1, 2)]
    assert session.iteration == 1
    assert "session.on_restored" in caplog.text
    assert "no such run" in caplog.text
    iterate(model, optimizer, session)
    session.close()
    assert session.iteration == 2


def test_the_time_of_a_callback_is_no_time_of_an_iteration(store, monkeypatch):
    model, optimizer, session = trained(store, 3)
    clock = FakeClock()
    train_by(clock, session, monkeypatch.setattr)
    began = clock.now
    session.on_restored(lambda *_: clock.wait(1000.0))
    session.restore(1)
    for _ in range(3):
        clock.wait(1.0)
        iterate(model, optimizer, session)
    session._meter.update_controller()
    longest = max(each.seconds for each in session._meter.recent)
    session.close()
    assert clock.now >= began + 1000.0, "the callback was called"
    assert 1.0 <= longest < 1000.0


def test_runs_of_loggers_are_those_of_the_checkpoint_after_a_resume_and_a_restore(store):
    model, optimizer, session = trained(store, 2)
    session.logger_runs["comet"] = ("first", session.lineage)
    for _ in range(2):
        iterate(model, optimizer, session)
        session.wait(300)
    session.logger_runs["comet"] = ("second", session.lineage)
    session.restore(3)
    iterate(model, optimizer, session)
    assert session.logger_runs == {"comet": ("first", 1)}
    assert session.lineage == 2
    session.restore(1)
    iterate(model, optimizer, session)
    assert session.logger_runs == {}
    session.logger_runs["comet"] = ("third", session.lineage)
    iterate(model, optimizer, session)
    session.close()
    session = session_of(store, loop=holdfast.Variables())[2]
    session.resume()
    session.close()
    assert session.logger_runs == {"comet": ("third", 3)}


def test_a_forked_job_has_no_runs_of_the_job_that_it_was_copied_from(store):
    model, optimizer, session = trained(store, 1)
    session.logger_runs["comet"] = ("first", session.lineage)
    iterate(model, optimizer, session)
    session.close()
    fork(open_store(store), "m", "000000000002-1", "copy")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    copy = holdfast.Session("copy", store=store, model=model, optimizer=optimizer, loop=holdfast.Variables())
    assert copy.resume() == 2
    copy.close()
    assert copy.logger_runs == {}


def test_no_notice_about_the_structure_follows_a_new_run(store, caplog):
    model, optimizer, session = trained(store, 1)
    session.logger_runs["comet"] = ("first", session.lineage)
    with caplog.at_level(logging.WARNING, "holdfast"):
        iterate(model, optimizer, session)
        session.close()
    assert caplog.records == []


def test_the_url_is_that_of_the_page_of_the_job(store, linked):
    session = session_of(store, **linked)[2]
    assert session.url == FakeServerConnection.page
    session.close()


def test_without_a_server_there_is_no_url(store):
    session = session_of(store)[2]
    assert session.url is None
    session.close()
