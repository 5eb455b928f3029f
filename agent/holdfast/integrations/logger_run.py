"""The run of a logger over all restarts of a job: what the adapters of W&B and MLflow share."""

from __future__ import annotations

import abc
from typing import Any

from holdfast.session import Session


class LoggerRun(abc.ABC):
    """The run of a session in a logger, with all attributes of the logger's run.

    After a restore, it refers to the run of the new lineage.
    """

    logger: str
    """Name of the logger in notices."""

    def __init__(self, session: Session, arguments: dict[str, Any]) -> None:
        self._session, self._arguments = session, arguments
        self._lineage = 0
        self._run: Any = None
        session.resume()
        self._open(session.iteration, session.lineage)
        session.on_restored(self._restored)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def _restored(self, iteration: int, lineage: int) -> None:
        if lineage == self._lineage:  # the resume that this run began from
            return
        try:
            self._end()
            self._open(iteration, lineage)
        except Exception as error:  # training goes on, and must be able to log
            self._run, self._lineage = self._without_run(), lineage
            self._session.notice(
                "warning", "logger", f"no {self.logger} run from iteration {iteration:,} on: {error}"
            )

    @abc.abstractmethod
    def _open(self, iteration: int, lineage: int) -> None:
        """Set `_run` and `_lineage`: begin the run of a lineage, or continue it."""

    @abc.abstractmethod
    def _end(self) -> None:
        """End the run of the lineage that a restore has left."""

    @abc.abstractmethod
    def _without_run(self) -> Any:
        """Return a placeholder for a run that could not be begun."""
