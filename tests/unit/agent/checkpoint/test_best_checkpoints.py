"""The metrics that a checkpoint records, and the retention rule that compares them."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.checkpoint import restore
from holdfast.checkpoint.garbage_collection import plan
from holdfast.cli import app
from holdfast.retention import LoggedMetric, parse_retention
from holdfast.store import Store, open_store

ACCURACIES = {3: 0.2, 6: 0.7, 9: 0.9, 12: 0.4, 15: 0.8, 18: 0.1}
"""By the iteration that logs it."""


def train(session: holdfast.Session, until: int, metrics: dict[int, dict[str, Any]]) -> None:
    session.resume()
    while session.iteration < until:
        session.step(**metrics.get(session.iteration + 1, {}))
        session.wait(300)
        assert session._saver.retention.wait_idle(300)


def begun(store: Path | str, **options: Any) -> holdfast.Session:
    options = {"every": 1} | options
    return holdfast.Session("job", store=store, model=torch.nn.Linear(2, 2), **options)


def iterations(store: Store) -> list[int]:
    return [int(each[:12]) for each in store.checkpoints("job")]


def recorded(store: Store, iteration: int) -> dict[str, LoggedMetric]:
    (checkpoint,) = [each for each in store.checkpoints("job") if int(each[:12]) == iteration]
    return restore.manifest(store, "job", checkpoint).metrics


def test_a_checkpoint_records_the_newest_value_of_each_metric(tmp_path: Path) -> None:
    with begun(tmp_path, retention="last 20") as session:
        train(session, 3, {1: {"loss": 2.0}, 2: {"loss": torch.tensor(1.5), "val": 7}, 3: {"loss": torch.ones(1)}})
    store = open_store(tmp_path)
    assert recorded(store, 1) == {"loss": LoggedMetric(value=2.0, iteration=1)}
    val = LoggedMetric(value=7.0, iteration=2)
    assert recorded(store, 2) == {"loss": LoggedMetric(value=1.5, iteration=2), "val": val}
    assert recorded(store, 3) == {"loss": LoggedMetric(value=1.0, iteration=3), "val": val}


@pytest.mark.parametrize("odd", [math.nan, math.inf, "text", torch.ones(3), torch.tensor(math.nan)])
def test_a_value_that_is_not_finite_is_not_recorded_nor_is_an_earlier_one(tmp_path: Path, odd: Any) -> None:
    with begun(tmp_path, retention="last 20") as session:
        train(session, 2, {1: {"loss": 2.0, "kept": 1.0}, 2: {"loss": odd}})
    assert recorded(open_store(tmp_path), 2) == {"kept": LoggedMetric(value=1.0, iteration=1)}


def test_a_value_of_a_restored_future_is_not_recorded(tmp_path: Path) -> None:
    with begun(tmp_path, retention="last 20", restorable_in_place=True) as session:
        train(session, 4, {2: {"loss": 2.0}, 4: {"val": 1.0}})
        session.restore(3)
        session.step()
        assert session.lineage == 2
        train(session, 5, {})
    store = open_store(tmp_path)
    newest = store.checkpoints("job")[-1]
    assert newest.endswith("-2")
    assert restore.manifest(store, "job", newest).metrics == {}


def test_the_best_stay_also_after_a_restart(tmp_path: Path) -> None:
    metrics = {at: {"accuracy": value} for at, value in ACCURACIES.items()}
    rules = "last 1, best 2 by max accuracy"
    first = begun(tmp_path, retention=rules)
    train(first, 10, metrics)
    first._close("killed")
    assert iterations(open_store(tmp_path)) == [6, 9, 10]
    with begun(tmp_path, retention=rules) as second:
        train(second, 20, metrics)
    assert iterations(open_store(tmp_path)) == [9, 15, 20]


def test_while_no_checkpoint_has_the_metric_the_newest_stay_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules, losses = "best 3 by val_loss", {at: {"loss": 1.0, "lr": 0.1} for at in range(1, 9)}
    store = open_store(tmp_path)
    with caplog.at_level(logging.WARNING), begun(tmp_path, retention=rules) as session:
        train(session, 3, losses)
        assert not caplog.records
        train(session, 8, losses)
        assert iterations(store) == [6, 7, 8]
        # a validation after many checkpoints
        train(
            session,
            14,
            {9: {"val_loss": 3.0}, 10: {"val_loss": 1.0}, 11: {"val_loss": 4.0}, 12: {"val_loss": 2.0}},
        )
        assert iterations(store) == [9, 10, 12, 14]
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.endswith(
        "retention 'best 3 by val_loss': no checkpoint has the metric val_loss; logged so far: loss, lr. Until it "
        "appears the newest 3 stay"
    )


def test_the_command_shows_the_metrics_of_a_checkpoint(tmp_path: Path) -> None:
    with begun(tmp_path) as session:
        train(session, 2, {1: {"val/loss": 0.25}, 2: {"accuracy": 2 / 3}})
    shown = CliRunner().invoke(app, ["store", "show", str(tmp_path), "job", "2"]).output
    assert "  metrics   val/loss 0.25 (iteration 1), accuracy 0.666667 (iteration 2)\n" in shown


def test_garbage_collection_keeps_the_best(tmp_path: Path) -> None:
    with begun(tmp_path, retention="last 30") as session:
        train(session, 19, {at: {"accuracy": value} for at, value in ACCURACIES.items()})
    planned = plan(open_store(tmp_path), "job", parse_retention("last 2, best 2 by max accuracy"))
    gone = {int(item.name[:12]) for item in planned.items}
    assert set(range(1, 20)) - gone >= {9, 15, 18, 19}
    assert len(gone) >= 14
    assert planned.items[0].why == "not kept by 'last 2, best 2 by max accuracy'"
