"""MLflow: one run for a job over all restarts, and a child run for each lineage that a restore begins."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from urllib.parse import urlsplit

import mlflow

from holdfast.integrations.logger_run import LoggerRun
from holdfast.session import Session


class MlflowRun(LoggerRun):
    """The MLflow run of a session: `log_metrics`, and all attributes of `mlflow.ActiveRun`.

    After a restore, it refers to the run of the new lineage.
    """

    logger = "MLflow"

    def __init__(self, session: Session, arguments: dict[str, Any]) -> None:
        self._client = mlflow.MlflowClient()
        self._seen: dict[str, int] = {}
        """Last step that an earlier attempt logged, by metric."""
        super().__init__(session, arguments)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log metrics at `step`, by default the current iteration, `session.iteration + 1`.

        Skips steps of a metric that an earlier attempt logged in this run: an exact resume repeats their values.
        """
        step = self._session.iteration + 1 if step is None else step
        new = {key: float(value) for key, value in metrics.items() if step > self._seen.get(key, -1)}
        if new and self._run is not None:
            at = int(time.time() * 1000)
            entries = [mlflow.entities.Metric(key, value, at, step) for key, value in new.items()]
            self._client.log_batch(self.info.run_id, entries)

    def _end(self) -> None:
        mlflow.end_run("KILLED")  # MLflow's word for a run that was ended from outside

    def _without_run(self) -> None:
        return None

    def _open(self, iteration: int, lineage: int) -> None:
        known, arguments = self._session.logger_runs.get("mlflow"), self._arguments
        tags = {
            **arguments.get("tags", {}),
            "holdfast.job": self._session.job,
            "holdfast.lineage": str(lineage),
            "holdfast.iteration": str(iteration),
        } | ({"holdfast.url": self._session.url} if self._session.url else {})
        self._seen = {}
        if known is None:
            self._run = mlflow.start_run(**{"run_name": self._session.job, **arguments, "tags": tags})
        elif known[1] == lineage:
            self._run = mlflow.start_run(**{**arguments, "run_id": known[0], "tags": tags})
            latest = self._client.get_run(known[0]).data.to_proto().metrics
            self._seen = {metric.key: metric.step for metric in latest}
        else:
            # a script that restarts for a restore has ended it as finished; it may have been deleted
            with contextlib.suppress(mlflow.exceptions.MlflowException):
                self._client.set_terminated(known[0], "KILLED")
            # under its parent's run, not inside an active one: `nested` does not apply
            name = f"{arguments.get('run_name', self._session.job)}, lineage {lineage} from iteration {iteration}"
            begun = {**arguments, "run_name": name, "parent_run_id": known[0], "tags": tags}
            begun.setdefault("experiment_id", self._client.get_run(known[0]).info.experiment_id)
            self._run = mlflow.start_run(**begun)
        self._lineage = lineage
        self._session.logger_runs["mlflow"] = (self.info.run_id, lineage)
        self._session.notice("info", "logger", f"MLflow run {self.info.run_name}: {_page(self.info)}")


def _page(info: Any) -> str:
    """Return the address of a run's page, without credentials; the run's id where the store has no pages."""
    uri = urlsplit(mlflow.get_tracking_uri())
    if uri.scheme not in ("http", "https"):
        return str(info.run_id)
    host = uri.netloc.rpartition("@")[2]
    return f"{uri.scheme}://{host}{uri.path.rstrip('/')}/#/experiments/{info.experiment_id}/runs/{info.run_id}"


def start_run(session: Session, **arguments: Any) -> MlflowRun:
    """Begin the MLflow run of a job, or continue it after a restart.

    Resumes the session, unless it has resumed: the checkpoint holds the id of the run. MLflow deletes no metrics,
    so a restore ends the run and begins a child run, tagged with the lineage.

    Args:
        session: the session. With several ranks, call `session.resume()` on all of them first, and this function
            on rank 0 only.
        **arguments: those of `mlflow.start_run`. `run_name` is the job's name by default.

    Raises:
        mlflow.exceptions.MlflowException: the run could not be begun.
    """
    return MlflowRun(session, arguments)
