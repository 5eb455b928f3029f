"""What an operator asks of a Holdfast server, typed: for the command line, the demo and anybody's scripts.

    from holdfast.client import Client

    with Client("http://127.0.0.1:7117") as client:
        for job in client.jobs():
            print(job.job, job.status, job.exposure_seconds)
        client.edit("char-gpt", budget="2%")

Every method raises `ServerError` (or the subclass that says in which way) when the server says no, and
`UnreachableError` when there is no server to say anything.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal

from holdfast.protocol.jobs import (
    CheckpointRow,
    Edit,
    Family,
    Fleet,
    JobNumbers,
    JobSummary,
    NoticeRow,
    Order,
    Tensors,
    Verification,
)
from holdfast.protocol.messages import OPEN_ORDER_STATES, Desired
from holdfast.protocol.questions import Goodput, JobPlan, RankTimes, RestorePreview, SettingsPreview
from holdfast.protocol.timeline import Timeline
from holdfast.server_link.administration import Administration
from holdfast.server_link.http_client import DEFAULT_SERVER, validate_server
from holdfast.server_link.json_client import (
    Conflict,
    Invalid,
    NotFound,
    NotPermitted,
    ServerBusy,
    ServerError,
    UnreachableError,
    decoded,
)

PAGE = 500
"""The most rows that the server gives at once."""
CHECKPOINT = "/jobs/{job}/checkpoints/{checkpoint}"
VERIFICATION = "/jobs/{job}/checkpoints/{checkpoint}/verification"
TENSORS = "/jobs/{job}/checkpoints/{checkpoint}/tensors"

__all__ = [
    "DEFAULT_SERVER", "CheckpointRow", "Client", "Conflict", "Edit", "Goodput", "Invalid", "JobPlan", "JobSummary",
    "NotFound", "NotPermitted", "NoticeRow", "Order", "ServerBusy", "ServerError", "Tensors", "UnreachableError",
    "Verification", "validate_server",
]  # fmt: skip


class Client(Administration):
    """A conversation with one server. Not to be shared among threads that close it.

    Args:
        server: its address, as in http://127.0.0.1:7117; ValueError for what is none.
        token: a key, or the shared secret, when the server asks for one.
        timeout_seconds: for each attempt of each request.
        retries: further attempts of what may be asked twice, when the server has no time or went away.
    """

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- jobs ---------------------------------------------------------------------------------

    def jobs(
        self, *, search: str | None = None, status: str | None = None, project: str | None = None
    ) -> list[JobSummary]:
        """All jobs that match, page by page."""
        found: list[JobSummary] = []
        pages = 1
        while len(found) < pages * PAGE and (page := len(found) // PAGE + 1) <= pages:
            fleet = self.fleet(search=search, status=status, project=project, page=page, size=PAGE, sort="name")
            found, pages = found + fleet.jobs, fleet.pages
            if len(fleet.jobs) < PAGE:
                break
        return found

    def fleet(
        self,
        *,
        search: str | None = None,
        status: str | None = None,
        project: str | None = None,
        sort: str | None = None,
        page: int = 1,
        size: int = 50,
    ) -> Fleet:
        """One page of the jobs that match, and how many there are by status. Raises Invalid."""
        query = {"search": search, "status": status, "project": project, "sort": sort, "page": page, "size": size}
        return self._ask(Fleet, "GET", "/jobs", query=query)

    def job(self, job: str) -> JobSummary:
        """Raises NotFound."""
        return self._ask(JobSummary, "GET", "/jobs/{job}", job)

    def delete_job(self, job: str) -> None:
        """Remove a job and all that the server has stored of it. Its store stays.

        Raises:
            NotFound.
            Conflict: it is running, or it reported meanwhile.
        """
        # Not twice: the second would be told that there is no such job.
        self._tell("DELETE", "/jobs/{job}", job, twice=False)

    def reset_numbers(self, job: str, *, attempt: int | None = None, lineage: int | None = None) -> JobNumbers:
        """Correct the largest attempt and lineage numbers that the server knows of a job.

        Args:
            job: its name.
            attempt: the largest attempt number; None: it stays as it is.
            lineage: the same of lineages.

        Raises:
            NotFound, Invalid.
        """
        given = {"latest_attempt": attempt, "latest_lineage": lineage}
        changes = {name: value for name, value in given.items() if value is not None}
        return self._ask(JobNumbers, "PATCH", "/jobs/{job}/numbers", job, body=changes, twice=True)

    def watch(self, job: str) -> Iterator[JobSummary]:
        """The job as it is, again each time that it changes, for as long as the server keeps the stream.

        Raises:
            NotFound.
        """
        for answer in self._stream("/jobs/{job}/stream", job):
            yield decoded(answer, JobSummary)

    def checkpoints(self, job: str, *, limit: int = 50, before: str | None = None) -> list[CheckpointRow]:
        """The last taken first, in every state.

        Args:
            job: its name.
            limit: at most 500.
            before: the id that the page before ended with.

        Raises:
            NotFound, and Invalid for a `before` that no checkpoint has.
        """
        return self._rows(
            CheckpointRow, "checkpoints", "/jobs/{job}/checkpoints", job, query={"limit": limit, "before": before}
        )

    def pin(self, job: str, checkpoint: str | int, *, pinned: bool = True) -> CheckpointRow:
        """Keep a checkpoint against retention, or no more. The last word wins.

        Args:
            job: its name.
            checkpoint: its id, or the iteration that a restore would go back to.
            pinned: False unpins it.

        Raises:
            NotFound: no such job or checkpoint; `body["nearest"]` is the next earlier one.
            Conflict: it is not in the store, or as many are pinned as can be.
        """
        return self._change_checkpoint(job, checkpoint, pinned=pinned)

    def label(self, job: str, checkpoint: str | int, label: str | None) -> CheckpointRow:
        """Call a checkpoint something, in at most 64 characters; None takes the label off.

        Args:
            job: its name.
            checkpoint: its id, or the iteration that a restore would go back to.
            label: one line of text.

        Raises:
            NotFound: no such job or checkpoint; `body["nearest"]` is the next earlier one.
            Invalid: it is too long, or has what nobody can read.
        """
        return self._change_checkpoint(job, checkpoint, label=label)

    def _change_checkpoint(self, job: str, checkpoint: str | int, **changes: bool | str | None) -> CheckpointRow:
        # Said twice, it is the same.
        return self._ask(
            CheckpointRow,
            "PATCH",
            "/jobs/{job}/checkpoints/{checkpoint}",
            job,
            checkpoint,
            body=changes,
            twice=True,
        )

    def verify(self, job: str, checkpoint: str | int, *, against: str | int | None = None) -> Verification:
        """Have a checkpoint read back by the job, beside its training; `verification` tells how far that is.

        Args:
            job: its name.
            checkpoint: its id, or the iteration that a restore would go back to.
            against: another one, to tell how far each tensor is from it.

        Raises:
            NotFound: no such job or checkpoint; `body["nearest"]` is the next earlier one.
            Conflict: it is not in the store, or as many wait as can.
        """
        body = {} if against is None else {"against": str(against)}
        return self._ask(
            Verification,
            "POST",
            "/jobs/{job}/checkpoints/{checkpoint}/verification",
            job,
            checkpoint,
            body=body,
            twice=True,
        )

    def verification(self, job: str, checkpoint: str | int) -> Verification:
        """How far that is, and what was last found. Raises NotFound."""
        return self._ask(Verification, "GET", VERIFICATION, job, checkpoint)

    def cancel_verification(self, job: str, checkpoint: str | int) -> Verification:
        """Take the open request back. Raises NotFound."""
        return self._ask(
            Verification,
            "DELETE",
            "/jobs/{job}/checkpoints/{checkpoint}/verification",
            job,
            checkpoint,
            twice=True,
        )

    def tensors(self, job: str, checkpoint: str | int, *, other: str | int | None = None) -> Tensors:
        """What the tensors of a verified checkpoint come to, beside those of another. Raises NotFound."""
        return self._ask(Tensors, "GET", TENSORS, job, checkpoint, query={"with": other})

    def oldest_restorable(self, job: str) -> CheckpointRow | None:
        """The one at the lowest iteration that a restore can go back to. Raises NotFound."""
        return min(self.restorable(job), key=lambda row: row.iteration, default=None)

    def restorable(self, job: str, limit: int | None = None) -> list[CheckpointRow]:
        """Those that a restore can go back to, the last taken first, at most `limit`. Raises NotFound."""
        found: list[CheckpointRow] = []
        page = self.checkpoints(job, limit=PAGE)
        while page and (limit is None or len(found) < limit):
            found += [row for row in page if row.restorable]
            page = self.checkpoints(job, limit=PAGE, before=page[-1].id)
        return found[:limit]

    def timeline(
        self,
        job: str,
        *,
        start: float | None = None,
        end: float | None = None,
        points: int = 1200,
        axis: Literal["iteration", "time"] = "iteration",
        metrics: Sequence[str] | None = None,
    ) -> Timeline:
        """What happened in a window.

        Args:
            job: its name.
            start: an iteration, or with `axis="time"` seconds since 1970. None: where the job began.
            end: likewise, inclusive. None: where the job is.
            points: at most so many buckets a lineage.
            axis: what `start` and `end` count.
            metrics: only these. None: all.

        Raises:
            NotFound, and Invalid for a window that cannot be.
        """
        query = {"from": start, "to": end, "points": points, "x": axis, "metric": metrics}
        return self._ask(Timeline, "GET", "/jobs/{job}/timeline", job, query=query)

    def goodput(self, job: str, window: str | None = None) -> Goodput:
        """Where the time went, in buckets that sum up to it; `window` as in 24h. Raises NotFound and Invalid."""
        return self._ask(Goodput, "GET", "/jobs/{job}/goodput", job, query={"window": window})

    def ranks(self, job: str, window: str | None = None) -> RankTimes:
        """How the ranks compare, and which of them the others wait for. Raises NotFound and Invalid."""
        return self._ask(RankTimes, "GET", "/jobs/{job}/ranks", job, query={"window": window})

    def forks(self, job: str) -> Family:
        """Which job it was forked from, and which were forked from it. Raises NotFound."""
        return self._ask(Family, "GET", "/jobs/{job}/forks", job)

    def plan(self, job: str, **what_if: float | int | str | None) -> JobPlan:
        """Weigh every interval.

        Args:
            job: its name.
            what_if: `budget`, `every`, `mtbf`, `ranks` and `restart` are as they are unless given.

        Raises:
            NotFound, and Invalid for what cannot be.
        """
        return self._ask(JobPlan, "GET", "/jobs/{job}/plan", job, query=what_if)

    def notices(self, job: str, *, limit: int | None = None) -> list[NoticeRow]:
        """The newest first. Raises NotFound."""
        return self._rows(NoticeRow, "notices", "/jobs/{job}/notices", job, query={"limit": limit})

    # ---- what a job should be -----------------------------------------------------------------

    def desired(self, job: str) -> Desired:
        """What people want the job to be; of a job that nobody has edited, that nobody wants anything."""
        answer = self._tell("GET", "/jobs/{job}/desired", job)
        return Desired() if answer is None else decoded(answer, Desired)

    def edits(self, job: str, *, limit: int | None = None) -> list[Edit]:
        """The versions of what was desired, newest first. Raises NotFound."""
        return self._rows(Edit, "edits", "/jobs/{job}/edits", job, query={"limit": limit})

    def applied_at(self, job: str, version: int) -> int | None:
        """The iteration from whose end on the job acts on a version; None: not yet. Raises NotFound."""
        return next((edit.applied_iteration for edit in self.edits(job) if edit.version == version), None)

    def edit(self, job: str, *, version: int | None = None, **changes: float | int | str | bool | None) -> Desired:
        """Change budget, policy, every, paused, retention, checkpoint_request or probe_request.

        None takes an order back. With `every`, `every_seconds` is the time after which the policy decides again.

        Args:
            job: its name.
            version: the one that the edit is made from. None: the newest.
            changes: by setting; `budget` may be text, as in "2%".

        Raises:
            NotFound, Invalid, and Conflict when somebody else changed something since that version.
        """
        held = self.desired(job).version if version is None else version
        return self._ask(
            Desired, "PATCH", "/jobs/{job}/desired", job, body=changes, headers={"If-Match": f'"{held}"'}
        )

    def preview_settings(
        self, job: str, *, budget: float | None = None, every: int | None = None
    ) -> SettingsPreview:
        """The interval, overhead and exposure that these settings would lead to. Raises NotFound and Invalid."""
        return self._ask(
            SettingsPreview, "GET", "/jobs/{job}/preview", job, query={"budget": budget, "every": every}
        )

    # ---- restores -----------------------------------------------------------------------------

    def restore(
        self,
        job: str,
        iteration: int | None = None,
        *,
        checkpoint: str | None = None,
        key: str | None = None,
        expires_seconds: float | None = None,
    ) -> Order:
        """Order a restore to an iteration, or to a checkpoint by its id.

        Args:
            job: its name.
            iteration: where to go back to.
            checkpoint: the same, where several lineages have one there.
            key: names the wish: sent again with the same key, it is the same order.
            expires_seconds: it ends after so long unless an attempt has taken it up. None: after a week.

        Raises:
            NotFound: no such job, or nothing to go back to there; `body["nearest"]` is the next earlier one.
            Conflict: another restore is under way, or this checkpoint cannot be restored.
            Invalid.
        """
        wish = {"iteration": iteration, "checkpoint": checkpoint, "expires_seconds": expires_seconds}
        body = {name: said for name, said in wish.items() if said is not None} | {"key": key or uuid.uuid4().hex}
        # With its key, an order that is sent twice is one.
        return self._ask(Order, "POST", "/jobs/{job}/restores", job, body=body, twice=True)

    def preview_restore(self, job: str, checkpoint: str) -> RestorePreview:
        """What a restore to this checkpoint would give up, and take. Raises NotFound."""
        return self._ask(
            RestorePreview, "GET", "/jobs/{job}/restores/preview", job, query={"checkpoint": checkpoint}
        )

    def orders(self, job: str, *, limit: int | None = None) -> list[Order]:
        """The newest first. Raises NotFound."""
        return self._rows(Order, "restores", "/jobs/{job}/restores", job, query={"limit": limit})

    def order(self, job: str, order: str) -> Order:
        """Raises NotFound."""
        return self._ask(Order, "GET", "/jobs/{job}/restores/{order}", job, order)

    def undo_restore(self, job: str, order: str) -> Order:
        """Order the job back to the state that a restore left. Asked twice, it is one order.

        Raises:
            NotFound.
            Conflict: there is nothing to undo, or another restore is under way.
        """
        return self._ask(Order, "POST", "/jobs/{job}/restores/{order}/undo", job, order, twice=True)

    def cancel_restore(self, job: str, order: str) -> Order:
        """Raises NotFound, and Conflict when it has gone too far. Cancelled twice is cancelled."""
        return self._ask(Order, "POST", "/jobs/{job}/restores/{order}/cancel", job, order, twice=True)

    def follow(
        self, order: Order, *, timeout_seconds: float = float("inf"), poll_seconds: float = 0.2
    ) -> Iterator[Order]:
        """The order each time that it has moved, up to the state that it ends in or the time is up."""
        deadline = time.monotonic() + timeout_seconds
        yield order
        while order.state in OPEN_ORDER_STATES and time.monotonic() < deadline:
            time.sleep(poll_seconds)
            newer = self.order(order.job, order.id)
            if newer.state != order.state:
                yield newer
            order = newer
