"""`on_trouble`: a job goes back by itself when its loss is wrong, and leaves out the data of that time."""

import math
import threading

import pytest

from holdfast.checkpoint import restore
from holdfast.engine import operator, trouble_rule
from holdfast.protocol import wire
from holdfast.protocol.orders import HaltReport, TrainingOrder, parse_on_trouble
from holdfast.store import Lineage, open_store
from holdfast.store.records import newest_halt
from holdfast.system import supervisor_channel
from tests.support.eventually import eventually
from tests.support.left_out_workloads import LeavingOutJob, losses_without
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store


class Troubled(LeavingOutJob):
    """A job whose loss is not finite in the iterations `bad` of the lineages up to `until_lineage`."""

    def __init__(self, store, bad, until_lineage=1, **options):
        super().__init__(store, **{"on_trouble": "restore"} | options)
        self._bad, self._until_lineage = bad, until_lineage

    def update(self, batch):
        loss = super().update(batch)
        is_bad = self.session.iteration + 1 in self._bad and self.session.lineage <= self._until_lineage
        return math.nan if is_bad else loss


def lineages(store):
    return open_store(store).records("job", Lineage)


def test_the_last_good_checkpoint_is_restored_without_the_data_of_the_trouble(store):
    job = Troubled(store, {7}).run()
    (_, restored) = lineages(store)
    assert (restored.parent, restored.trouble) == ("000000000005-1", 7)
    assert job.losses == losses_without(range(5, 12))


def test_the_state_before_the_first_wrong_loss_may_be_wrong_already(store):
    Troubled(store, {11}).run(until=6, lineage=2).kill()
    (_, restored) = lineages(store)
    assert (restored.parent, restored.trouble) == ("000000000005-1", 11)


def test_trouble_that_comes_again_goes_further_back_and_then_ends_it(store, caplog):
    job = Troubled(store, {12}, until_lineage=9).run()
    assert [each.parent for each in lineages(store)] == [None, "000000000010-1", "000000000005-1"]
    assert "2 restores in 1,000 iterations have not helped" in caplog.text
    assert job.session.lineage == 3


def test_restores_are_counted_across_starts(store, caplog):
    options = {"on_trouble": "restore 1 in 1000"}
    Troubled(store, {12}, until_lineage=9, **options).run(until=11, lineage=2).kill()
    Troubled(store, {12}, until_lineage=9, **options).run()
    assert len(lineages(store)) == 2
    assert "1 restores in 1,000 iterations have not helped" in caplog.text


def test_a_loss_that_is_wrong_from_the_start_does_not_loop(store, caplog):
    Troubled(store, set(range(1, 40)), until_lineage=9).run()
    assert len(lineages(store)) == 1
    assert caplog.text.count("no durable checkpoint from before it is left to try") == 1


def test_a_store_that_does_not_answer_is_asked_again(store, caplog, monkeypatch):
    read, failures = restore.lineage_checkpoints, [OSError("not now"), OSError("nor now")]

    def lineage_checkpoints(store, job):
        if job_in_trouble.session.iteration >= 7 and failures:
            raise failures.pop()
        return read(store, job)

    monkeypatch.setattr(trouble_rule, "RETRY_SECONDS", 0.0)
    job_in_trouble = Troubled(store, {7})
    monkeypatch.setattr(restore, "lineage_checkpoints", lineage_checkpoints)
    job_in_trouble.run()
    assert caplog.text.count("the store cannot be read yet") == 1
    assert [each.parent for each in lineages(store)] == [None, "000000000005-1"]


def test_no_scheduled_checkpoint_is_taken_in_trouble(store):
    Troubled(store, {7}).run()
    assert {each[:12] for each in open_store(store).checkpoints("job") if each.endswith("-1")} == {
        "000000000005", "000000000007",
    }  # fmt: skip  # the second is the safety checkpoint


def test_observing_says_what_it_would_do(store, caplog):
    job = Troubled(store, {7}, on_trouble="observe").run()
    assert len(lineages(store)) == 1
    assert "would restore iteration 5 and leave out the data up to 12" in caplog.text
    assert len(job.losses) == 36


def test_retention_keeps_the_last_good_checkpoint_where_the_rule_does_not_restore_it(store):
    job = Troubled(store, {17}, on_trouble="observe", keep=None, retention="last 2", every=2)
    job.run(until=30).kill()
    assert "000000000014-1" in open_store(store).checkpoints("job")


def test_a_script_request_wins(store):
    job = Troubled(store, {7})
    job.run(lambda job, iteration: job.session.restore(5) if iteration == 7 and job.session.lineage == 1 else None)
    assert [each.trouble for each in lineages(store)] == [None, None]


def test_a_job_that_is_killed_after_it_went_back_goes_on_the_same_way(store):
    Troubled(store, {7}).run(until=5, lineage=2).kill()
    job = Troubled(store, {7}).run()
    expected = losses_without(range(5, 12))
    assert job.losses == {each: loss for each, loss in expected.items() if each > 5}


def test_the_server_learns_which_lineage_the_rule_began(linked, store):
    job = Troubled(store, {7}, **linked).run()
    events = job.session._reporter.link.of(wire.LineageStarted)
    assert [each.trouble for each in events] == [None, 7]
    assert events[-1].order is not None


@pytest.mark.parametrize("value", ["always", "restore 0 in 5", "restore 3", 5])
def test_a_rule_that_makes_no_sense_is_refused(store, value):
    with pytest.raises(ValueError, match="on_trouble"):
        Troubled(store, set(), on_trouble=value)


def test_after_restores_that_have_not_helped_training_ends_without_a_checkpoint_of_that_state(store):
    job = Troubled(store, {12}, until_lineage=9, on_trouble="restore 1 in 1000 then end")
    with job.session, pytest.raises(SystemExit) as ended:
        job.run()
    assert ended.value.code == supervisor_channel.EXIT_ENDED
    assert not [each for each in open_store(store).checkpoints("job") if each.endswith("-2")]
    assert newest_halt(open_store(store), "job").by == "policy"


def test_after_restores_that_have_not_helped_training_pauses_until_an_operator_continues_it(linked, store):
    job = Troubled(store, {12}, until_lineage=9, on_trouble="restore 1 in 1000, then pause", **linked)
    link = job.session._reporter.link

    def operator():
        eventually(lambda: link.of(HaltReport))
        link.desired = wire.Desired(version=2, training=TrainingOrder(id="c", action="continue", who="ana"))

    thread = threading.Thread(target=operator)
    thread.start()
    job.run()
    thread.join()
    assert [(each.state, each.by) for each in link.of(HaltReport)] == [("paused", "policy"), ("continued", "ana")]


@pytest.mark.parametrize("then", ["then sleep", "then", "pause"])
def test_what_follows_restores_is_one_of_the_known_words(then):
    with pytest.raises(ValueError, match="give off, observe, restore"):
        parse_on_trouble(f"restore 1 in 10 {then}")


def ordered(rule, at=3):
    """Return a function for `run`: an operator sets the rule when iteration `at` ends."""

    def before_step(job, iteration):
        if iteration == at:
            job.session._operator.receive(wire.Desired(version=1, on_trouble=rule))

    return before_step


def test_an_operator_turns_it_on_while_the_job_trains(store, linked):
    job = Troubled(store, {7}, on_trouble="off", **linked).run(ordered("restore"))
    assert [each.trouble for each in lineages(store)] == [None, 7]
    assert job.losses == losses_without(range(5, 12))


def test_an_operator_turns_it_off_or_lets_it_observe(store, linked, caplog):
    Troubled(store, {7}, **linked).run(ordered("observe"))
    assert len(lineages(store)) == 1
    assert "would restore iteration 5" in caplog.text
    other = store.with_name("other")
    Troubled(other, {7}, **linked).run(ordered("off"))
    assert len(lineages(other)) == 1
    assert caplog.text.count("the loss is wrong") == 1


def test_the_server_learns_the_rule_in_force(store, linked, monkeypatch):
    monkeypatch.setattr(operator, "MODE_CHECK_SECONDS", 0.0)
    job = Troubled(store, set(), on_trouble="off", **linked).run(ordered("restore 3 in 2000 then pause"))
    events = job.session._reporter.link.of(wire.RestoreModeReport)
    assert [events[0].on_trouble, events[-1].on_trouble] == ["off", "restore 3 in 2000 then pause"]
    assert events[-1].batches_an_iteration == 1
