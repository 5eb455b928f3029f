"""The same run of a logger over restarts and restores, and no step twice."""

import os
import re
import struct
import subprocess
import sys

import pytest


def job(name, folder, iterations, *options, fails=False):
    """Values that one start of the job logged, as (step, value) in order; and its output."""
    command = [sys.executable, "-m", "tests.frameworks.logger_job", name, folder, str(iterations), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    environment["WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"] = "0.1"  # a killed process loses what is not flushed
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    logged = re.findall(r"^logged (\d+) (\S+)$", done.stdout, re.M)
    return [(int(step), pytest.approx(float(value), rel=1e-6)) for step, value in logged], done


def restarted(name, folder, check=lambda first: None):
    """The values of a job that is killed after iteration 7, three iterations after its last checkpoint.

    `check` is called with those of the first start, before the second one.
    """
    first, _ = job(name, folder, 10, "kill=7", fails=True)
    check(first)
    second, done = job(name, folder, 10)
    assert [step for step, _ in first] == list(range(1, 8))
    assert [step for step, _ in second] == list(range(5, 11))
    return first + second[3:], done


def events(folder):
    """Scalars as TensorBoard shows them, and the number of them in its files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    shown = EventAccumulator(str(folder / "runs")).Reload()
    stored = [
        event
        for file in (folder / "runs").iterdir()
        for event in EventFileLoader(str(file)).Load()
        if event.HasField("summary")
    ]
    return [(each.step, each.value) for each in shown.Scalars("loss")], len(stored)


def test_tensorboard_shows_each_step_once_after_a_kill_and_a_restore(tmp_path):
    def durable_values_survive(first):
        assert events(tmp_path)[0][:4] == first[:4]

    expected, _ = restarted("tensorboard", tmp_path, durable_values_survive)
    shown, stored = events(tmp_path)
    assert shown == expected
    assert (
        4 + len(shown[4:]) <= stored
    )  # at least all up to the checkpoint of iteration 4 were on disk at the kill

    restored, _ = job("tensorboard", tmp_path, 12, "restore=11:8")
    assert [step for step, _ in restored] == [11, 9, 10, 11, 12]
    shown, _ = events(tmp_path)
    assert shown == expected[:8] + restored[1:]


def history(file):
    """(step, loss) in an offline run of W&B: records in the log format of LevelDB."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    data, place, payload, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        payload += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # complete, or the last part
            record, payload = Record.FromString(payload), b""
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss" in items:
                found.append((int(items["_step"]), json.loads(items["loss"])))
    return found


def fragments(folder):
    """History of each W&B run, by id, over the files of all attempts in the order of their start."""
    found = {}
    for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        found.setdefault(file.stem.removeprefix("run-"), []).extend(history(file))
    return found


def test_an_offline_wandb_run_goes_on_after_a_kill_and_a_restore_begins_one_in_its_group(tmp_path):
    expected, _ = restarted("wandb", tmp_path)
    (run_id,) = fragments(tmp_path)
    assert fragments(tmp_path) == {run_id: expected}

    restored, done = job("wandb", tmp_path, 12, "restore=11:8")
    runs = fragments(tmp_path)
    assert runs.pop(run_id) == [*expected, restored[0]]
    ((branch, values),) = runs.items()
    assert values == restored[1:]
    assert f"W&B run {branch} of group job" in done.stderr
    assert f"runs {{'wandb': ('{branch}', 2)}}" in done.stdout

    again, _ = job("wandb", tmp_path, 14)
    runs = fragments(tmp_path)
    assert runs[branch] == [*restored[1:], *again]
    assert len(runs) == 2


def test_a_wandb_run_of_a_killed_process_goes_on_where_the_service_is_that_of_another_process(tmp_path):
    import wandb

    try:
        with wandb.init(mode="offline", dir=str(tmp_path)):  # starts a service, which children use
            assert "WANDB_SERVICE" in os.environ
        expected, _ = restarted("wandb", tmp_path / "job")
    finally:
        wandb.teardown()
    (values,) = fragments(tmp_path / "job").values()
    assert dict(values) == dict(expected)  # the other service wrote the killed one's last step late: twice, equal


@pytest.mark.parametrize(
    ("service", "message"),
    [
        ("", "run ID a is in use"),
        ("3-{own}-unix-/s", "run ID a is in use"),
        ("3-1-unix-/s", "no project"),
    ],
)
def test_another_failure_of_wandb_is_raised(monkeypatch, service, message):
    import holdfast.integrations.wandb as bridge

    def init(**arguments):
        raise RuntimeError(message)

    monkeypatch.setattr(bridge.wandb, "init", init)
    monkeypatch.setenv("WANDB_SERVICE", service.format(own=os.getpid()))
    with pytest.raises(RuntimeError, match=message):
        bridge._init({"id": "abc"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore::sqlalchemy.exc.SADeprecationWarning")
def test_an_mlflow_run_goes_on_after_a_kill_and_a_restore_begins_a_child_run(tmp_path):
    from mlflow import MlflowClient

    expected, _ = restarted("mlflow", tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"

    def values(each):
        return [(metric.step, metric.value) for metric in client.get_metric_history(each.info.run_id, "loss")]

    assert values(run) == expected
    assert run.data.tags["holdfast.job"] == "job"

    restored, _ = job("mlflow", tmp_path, 12, "restore=11:8")
    child, parent = sorted(client.search_runs(["0"]), key=lambda each: each.info.start_time, reverse=True)
    assert parent.info.run_id == run.info.run_id
    assert parent.info.status == "KILLED"
    assert values(parent) == [*expected, restored[0]]
    assert values(child) == restored[1:]
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (child.data.tags["holdfast.lineage"], child.data.tags["holdfast.iteration"]) == ("2", "8")


class Resumed:
    """What a logger needs of a session that has resumed: lineage 1, or a later one after a restore."""

    job, url = "job", None

    def __init__(self, lineage=1, logger_runs=None):
        self.iteration, self.lineage, self.logger_runs, self.notices = 8, lineage, logger_runs or {}, []

    def resume(self):
        return self.iteration

    def on_restored(self, callback):
        callback(self.iteration, self.lineage)

    def notice(self, level, code, message):
        self.notices.append(message)


def test_a_wandb_run_that_cannot_be_finished_does_not_end_training(tmp_path, monkeypatch):
    import wandb

    from holdfast.integrations.wandb import init

    monkeypatch.setenv("WANDB_MODE", "offline")
    session = Resumed()
    run = init(session, project="p", dir=str(tmp_path))
    before, finish = run._run, wandb.Run.finish

    def broken(self, *args, **options):
        finish(self, *args, **options)
        raise wandb.Error("the service is gone")

    monkeypatch.setattr(wandb.Run, "finish", broken)
    run._restored(4, 2)
    monkeypatch.undo()
    run.log({"loss": 0.5})
    assert run._run is not before
    assert session.notices[-1] == "no W&B run from iteration 4 on: the service is gone"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore::sqlalchemy.exc.SADeprecationWarning")
def test_a_restart_for_a_restore_ends_the_mlflow_run_as_killed(tmp_path, monkeypatch):
    import mlflow

    from holdfast.integrations.mlflow import start_run

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        first = Resumed()
        start_run(first)
        mlflow.end_run()  # as at the exit of the script
        parent = first.logger_runs["mlflow"][0]
        second = Resumed(2, first.logger_runs)
        start_run(second)
        assert mlflow.MlflowClient().get_run(parent).info.status == "KILLED"
        assert second.logger_runs["mlflow"][0] != parent
    finally:
        mlflow.end_run()
        mlflow.set_tracking_uri(before)
