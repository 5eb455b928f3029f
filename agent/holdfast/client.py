"""The Python client of a Holdfast server, for operators and their scripts.

    from holdfast.client import Client

    with Client("http://127.0.0.1:7117") as client:
        for job in client.jobs():
            print(job.job, job.status, job.unsaved_seconds)
        client.edit("char-gpt", budget="2%")

Alerts are in `client.alerts`, users and keys in `client.accounts`, requests that wait for approval in
`client.approvals`, the retention of reports and the account in `client.reports`, stores in `client.stores`.
Every method raises `ServerError`, or a subclass that says why, if the server rejects the request, and
`UnreachableError` if no server answers.

One module, since users look up all requests about a job in one class.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from holdfast.protocol.analyses import Goodput, JobPlan, RankTimes, Recovery, RestorePreview, SettingsPreview
from holdfast.protocol.attempts import AttemptConfiguration, AttemptOutput, AttemptSummary
from holdfast.protocol.fleet import BulkChange, BulkResult, Fleet
from holdfast.protocol.jobs import (
    Annotation,
    CheckpointInfo,
    Edit,
    ForkFamily,
    JobNumbers,
    JobSummary,
    NoticeInfo,
    Order,
    ScrubReport,
    Tensors,
    Verification,
)
from holdfast.protocol.orders import HaltAction
from holdfast.protocol.report import Report
from holdfast.protocol.timeline import Comparison, ComparisonAxis, Timeline
from holdfast.protocol.values import JobValue
from holdfast.protocol.wire import OPEN_ORDER_STATES, DataSkip, Desired
from holdfast.server_link.administration import Accounts, Alerts, Approvals, Reports, Stores
from holdfast.server_link.http_client import DEFAULT_SERVER, validate_server
from holdfast.server_link.json_client import (
    Conflict,
    Invalid,
    JsonClient,
    NotFound,
    NotPermitted,
    ServerBusy,
    ServerError,
    UnreachableError,
    decoded,
)

PAGE = 500
"""The most rows that the server returns at once."""
CHECKPOINT = "/jobs/{job}/checkpoints/{checkpoint}"
VERIFICATION = "/jobs/{job}/checkpoints/{checkpoint}/verification"
ANNOTATIONS, ANNOTATION = "/jobs/{job}/annotations", "/jobs/{job}/annotations/{annotation}"
TENSORS = "/jobs/{job}/checkpoints/{checkpoint}/tensors"

__all__ = [
    "DEFAULT_SERVER", "CheckpointInfo", "Client", "Conflict", "Edit", "Goodput", "Invalid", "JobPlan",
    "JobSummary", "NotFound", "NotPermitted", "NoticeInfo", "Order", "ServerBusy", "ServerError", "Tensors",
    "UnreachableError", "Verification", "validate_server",
]  # fmt: skip


class Client:
    """A client of one server.

    Args:
        server: address of the server, as in http://127.0.0.1:7117; ValueError if it is not valid.
        token: access key or shared secret, if the server requires one.
        timeout_seconds: limit of each try of a request.
        retries: further tries of idempotent requests, if the server is overloaded or unreachable.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        token: str | None = None,
        *,
        timeout_seconds: float = 10.0,
        retries: int = 2,
    ) -> None:
        self._http = JsonClient(server, token, timeout_seconds=timeout_seconds, retries=retries)
        self.alerts = Alerts(self._http)
        """Alerts, their rules and channels."""
        self.approvals = Approvals(self._http)
        """Requests about protected jobs that wait for a second person."""
        self.accounts = Accounts(self._http)
        """Users, keys and the audit log."""
        self.reports = Reports(self._http)
        """Retention of reports, and the account."""
        self.stores = Stores(self._http)
        """Stores that jobs share, and their limits."""
        self.get, self.send = self._http.get, self._http.send
        """Fetch any path under /api/v1, and send any request."""

    @property
    def server(self) -> str:
        """Address of the server."""
        return self._http.server

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- jobs ---------------------------------------------------------------------------------

    def jobs(
        self, *, search: str | None = None, status: str | None = None, project: str | None = None,
        owner: str | None = None, labels: Sequence[str] = (),
    ) -> list[JobSummary]:  # fmt: skip
        """Return all jobs that match.

        Args:
            search: part of the name or of the host of a job, in any case.
            labels: labels that all match, such as `team: vision`, or `team` for any value.
        """
        found: list[JobSummary] = []
        pages = 1
        while len(found) < pages * PAGE and (page := len(found) // PAGE + 1) <= pages:
            fleet = self.fleet(
                search=search, status=status, project=project, owner=owner, labels=labels, page=page, size=PAGE,
                sort="name",
            )  # fmt: skip
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
        owner: str | None = None,
        labels: Sequence[str] = (),
        sort: str | None = None,
        page: int = 1,
        size: int = 50,
    ) -> Fleet:
        """Return one page of the jobs that match, and their number by status. Raises Invalid."""
        query = {
            "search": search, "status": status, "project": project, "owner": owner, "label": list(labels),
            "sort": sort, "page": page, "size": size,
        }  # fmt: skip
        return self._http.fetch(Fleet, "GET", "/jobs", query=query)

    def change_jobs(self, change: BulkChange) -> BulkResult:
        """Change several jobs, or preview it; each is changed or refused on its own. Raises Invalid."""
        return self._http.fetch(BulkResult, "POST", "/jobs/changes", body=change)

    def compare(
        self,
        jobs: Sequence[str],
        metrics: Sequence[str] = ("loss",),
        *,
        axis: ComparisonAxis = "iteration",
        start: float | None = None,
        end: float | None = None,
        points: int = 300,
    ) -> Comparison:
        """Return metrics of up to eight jobs or lineages on one axis. Raises NotFound and Invalid.

        Args:
            jobs: names of jobs, or `job:lineage`.
            metrics: at most four.
            axis: iterations, seconds since the start of each job, or seconds since 1970.
            start: where the window begins on the axis; `None`: at its beginning.
            end: where it ends.
            points: points of a curve, about.
        """
        query = {"job": list(jobs), "metric": list(metrics), "x": axis, "from": start, "to": end, "points": points}
        return self._http.fetch(Comparison, "GET", "/compare", query=query)

    def job(self, job: str) -> JobSummary:
        """Return a job. Raises NotFound."""
        return self._http.fetch(JobSummary, "GET", "/jobs/{job}", job)

    def delete_job(self, job: str) -> None:
        """Delete a job and its reports from the server. Its checkpoints stay in the store.

        Raises:
            NotFound.
            Conflict: the job is running, or reported in the meantime.
        """
        # not retried: a retry of a successful request would raise NotFound
        self._http.call("DELETE", "/jobs/{job}", job, idempotent=False)

    def reset_numbers(self, job: str, *, attempt: int | None = None, lineage: int | None = None) -> JobNumbers:
        """Correct the largest attempt and lineage numbers that the server knows of a job.

        Args:
            job: name of the job.
            attempt: largest attempt number; `None`: unchanged.
            lineage: largest lineage number; `None`: unchanged.

        Raises:
            NotFound, Invalid.
        """
        given = {"latest_attempt": attempt, "latest_lineage": lineage}
        changes = {name: value for name, value in given.items() if value is not None}
        return self._http.fetch(JobNumbers, "PATCH", "/jobs/{job}/numbers", job, body=changes, idempotent=True)

    def watch(self, job: str) -> Iterator[JobSummary]:
        """Yield the job now and after each change, until the server ends the stream. Raises NotFound."""
        for answer in self._http.stream("/jobs/{job}/stream", job):
            yield decoded(answer, JobSummary)

    def checkpoints(self, job: str, *, limit: int = 50, before: str | None = None) -> list[CheckpointInfo]:
        """Return the checkpoints of a job in every state, newest first.

        Args:
            job: name of the job.
            limit: number of checkpoints, at most 500.
            before: id of the last checkpoint on the previous page.

        Raises:
            NotFound.
            Invalid: there is no checkpoint `before`.
        """
        return self._http.rows(
            CheckpointInfo, "checkpoints", "/jobs/{job}/checkpoints", job, query={"limit": limit, "before": before}
        )

    def pin(self, job: str, checkpoint: str | int, *, pinned: bool = True) -> CheckpointInfo:
        """Pin a checkpoint, so that retention keeps it, or unpin it.

        Args:
            job: name of the job.
            checkpoint: id, or iteration of a restorable checkpoint.
            pinned: False unpins it.

        Raises:
            NotFound: no such job or checkpoint; `body["nearest"]` is the nearest earlier one.
            Conflict: it is not in the store, or too many are pinned.
        """
        return self._change_checkpoint(job, checkpoint, pinned=pinned)

    def label(self, job: str, checkpoint: str | int, label: str | None) -> CheckpointInfo:
        """Label a checkpoint, or remove its label.

        Args:
            job: name of the job.
            checkpoint: id, or iteration of a restorable checkpoint.
            label: one line of at most 64 characters; `None` removes the label.

        Raises:
            NotFound: no such job or checkpoint; `body["nearest"]` is the nearest earlier one.
            Invalid: the label is too long, or has unprintable characters.
        """
        return self._change_checkpoint(job, checkpoint, label=label)

    def _change_checkpoint(self, job: str, checkpoint: str | int, **changes: bool | str | None) -> CheckpointInfo:
        return self._http.fetch(
            CheckpointInfo, "PATCH", CHECKPOINT, job, checkpoint, body=changes, idempotent=True
        )

    def verify(self, job: str, checkpoint: str | int, *, against: str | int | None = None) -> Verification:
        """Request that the job verify a checkpoint while it trains; `verification` returns the progress.

        Args:
            job: name of the job.
            checkpoint: id, or iteration of a restorable checkpoint.
            against: another checkpoint, to compare the tensors with.

        Raises:
            NotFound: no such job or checkpoint; `body["nearest"]` is the nearest earlier one.
            Conflict: it is not in the store, or too many verifications wait.
        """
        body = {} if against is None else {"against": str(against)}
        return self._http.fetch(Verification, "POST", VERIFICATION, job, checkpoint, body=body, idempotent=True)

    def verification(self, job: str, checkpoint: str | int) -> Verification:
        """Return the progress and last result of verifying a checkpoint. Raises NotFound."""
        return self._http.fetch(Verification, "GET", VERIFICATION, job, checkpoint)

    def cancel_verification(self, job: str, checkpoint: str | int) -> Verification:
        """Cancel the verification of a checkpoint. Raises NotFound."""
        return self._http.fetch(Verification, "DELETE", VERIFICATION, job, checkpoint)

    def report_scrub(self, job: str, checkpoint: str, report: ScrubReport) -> Verification:
        """Report what a scrub found in a checkpoint. Raises NotFound and Invalid."""
        path = "/jobs/{job}/checkpoints/{checkpoint}/scrub"
        return self._http.fetch(Verification, "PUT", path, job, checkpoint, body=report)

    def tensors(self, job: str, checkpoint: str | int, *, other: str | int | None = None) -> Tensors:
        """Return a summary of the tensors of a verified checkpoint, and of another one. Raises NotFound."""
        return self._http.fetch(Tensors, "GET", TENSORS, job, checkpoint, query={"with": other})

    def oldest_restorable(self, job: str) -> CheckpointInfo | None:
        """Return the restorable checkpoint at the lowest iteration. Raises NotFound."""
        return min(self.restorable(job), key=lambda row: row.iteration, default=None)

    def restorable(self, job: str, limit: int | None = None) -> list[CheckpointInfo]:
        """Return at most `limit` restorable checkpoints, newest first. Raises NotFound."""
        found: list[CheckpointInfo] = []
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
        machine: int | None = None,
    ) -> Timeline:
        """Return the events and samples of a window.

        Args:
            job: name of the job.
            start: iteration, or with `axis="time"` seconds since 1970. `None`: the job's start.
            end: likewise, inclusive. `None`: the newest iteration.
            points: maximum number of buckets per lineage.
            axis: unit of `start` and `end`.
            metrics: names of metrics. `None`: all.
            machine: rank whose use of its machine is included. `None`: none.

        Raises:
            NotFound.
            Invalid: the window is not valid.
        """
        query = {
            "from": start, "to": end, "points": points, "x": axis, "metric": metrics, "machine": machine,
        }  # fmt: skip
        return self._http.fetch(Timeline, "GET", "/jobs/{job}/timeline", job, query=query)

    def goodput(self, job: str, window: str | None = None) -> Goodput:
        """Return how a job spent its time in a window such as `24h`. Raises NotFound and Invalid."""
        return self._http.fetch(Goodput, "GET", "/jobs/{job}/goodput", job, query={"window": window})

    def report(self, job: str | None = None, *, since: str = "12h", project: str | None = None) -> Report:
        """Return what failed, what it cost, what was done, and what needs a decision. Raises NotFound and Invalid.

        Args:
            job: name of the job; `None`: all jobs that you may see.
            since: how far back, such as `12h` or `7d`.
            project: without a job, only the jobs of this project.
        """
        if job is not None:
            return self._http.fetch(Report, "GET", "/jobs/{job}/report", job, query={"since": since})
        return self._http.fetch(Report, "GET", "/report", query={"since": since, "project": project})

    def ranks(self, job: str, window: str | None = None) -> RankTimes:
        """Compare the ranks, and find the one that the others wait for. Raises NotFound and Invalid."""
        return self._http.fetch(RankTimes, "GET", "/jobs/{job}/ranks", job, query={"window": window})

    def recovery(self, job: str) -> Recovery:
        """Return where the job would resume if it ended now. Raises NotFound."""
        return self._http.fetch(Recovery, "GET", "/jobs/{job}/recovery", job)

    def forks(self, job: str) -> ForkFamily:
        """Return the job that this job was forked from, and its own forks. Raises NotFound."""
        return self._http.fetch(ForkFamily, "GET", "/jobs/{job}/forks", job)

    def attempts(self, job: str, *, limit: int | None = None) -> list[AttemptSummary]:
        """Return the attempts of a job, newest first. Raises NotFound."""
        return self._http.rows(AttemptSummary, "attempts", "/jobs/{job}/attempts", job, query={"limit": limit})

    def configuration(self, job: str, attempt: int, *, against: int | str | None = None) -> AttemptConfiguration:
        """Return the configuration and environment of an attempt.

        `against`: number of an attempt to compare with, or "origin": the attempt that a fork was copied from.
        Raises NotFound and Invalid.
        """
        path = "/jobs/{job}/attempts/{attempt}/configuration"
        return self._http.fetch(AttemptConfiguration, "GET", path, job, attempt, query={"against": against})

    def output(self, job: str, attempt: int) -> AttemptOutput:
        """Return the last lines of output of an attempt. Raises NotFound."""
        return self._http.fetch(AttemptOutput, "GET", "/jobs/{job}/attempts/{attempt}/output", job, attempt)

    def plan(self, job: str, **what_if: float | int | str | None) -> JobPlan:
        """Compare checkpoint intervals.

        Args:
            job: name of the job.
            what_if: values for `budget`, `write_budget`, `max_unsaved_work`, `every`, `mtbf`, `ranks` and
                `restart` instead of the job's.

        Raises:
            NotFound.
            Invalid: a value is not valid.
        """
        return self._http.fetch(JobPlan, "GET", "/jobs/{job}/plan", job, query=what_if)

    def notices(self, job: str, *, limit: int | None = None) -> list[NoticeInfo]:
        """Return the notices of a job, newest first. Raises NotFound."""
        return self._http.rows(NoticeInfo, "notices", "/jobs/{job}/notices", job, query={"limit": limit})

    def annotations(self, job: str, *, limit: int | None = None) -> list[Annotation]:
        """Return the annotations of a job, latest iterations first. Raises NotFound."""
        return self._http.rows(Annotation, "annotations", ANNOTATIONS, job, query={"limit": limit})

    def annotate(self, job: str, text: str, *, iteration: int | None = None) -> Annotation:
        """Annotate a finished iteration; `None`: the newest. Raises NotFound, Conflict and Invalid."""
        return self._http.fetch(Annotation, "POST", ANNOTATIONS, job, body={"text": text, "iteration": iteration})

    def edit_annotation(self, job: str, annotation: int, text: str) -> Annotation:
        """Change the text of an annotation of a person. Raises NotFound, Conflict and Invalid."""
        return self._http.fetch(
            Annotation, "PATCH", ANNOTATION, job, annotation, body={"text": text}, idempotent=True
        )

    def delete_annotation(self, job: str, annotation: int) -> None:
        """Delete an annotation of a person. Raises NotFound and Conflict."""
        self._http.call("DELETE", ANNOTATION, job, annotation, idempotent=False)

    # ---- values -------------------------------------------------------------------------------

    def values(self, job: str) -> list[JobValue]:
        """Return the values of a job's script that can be changed, with their last changes. Raises NotFound."""
        return self._http.rows(JobValue, "values", "/jobs/{job}/values", job)

    def set_value(self, job: str, name: str, value: bool | float | str | None) -> JobValue:
        """Change a value of a job's script; a text is parsed, `None` returns to the script's own.

        Raises NotFound; Invalid: the script does not allow it.
        """
        body = {"value": value}
        return self._http.fetch(
            JobValue, "PUT", "/jobs/{job}/values/{value}", job, name, body=body, idempotent=True
        )

    # ---- settings -----------------------------------------------------------------------------

    def desired(self, job: str) -> Desired:
        """Return the desired state of a job; version 0 if it was never changed."""
        answer = self._http.call("GET", "/jobs/{job}/desired", job)
        return Desired() if answer is None else decoded(answer, Desired)

    def edits(self, job: str, *, limit: int | None = None) -> list[Edit]:
        """Return the versions of the desired state, newest first. Raises NotFound."""
        return self._http.rows(Edit, "edits", "/jobs/{job}/edits", job, query={"limit": limit})

    def applied_at(self, job: str, version: int) -> int | None:
        """Return the iteration at which the job applied a version, or `None`. Raises NotFound."""
        return next((edit.applied_iteration for edit in self.edits(job) if edit.version == version), None)

    def edit(self, job: str, *, version: int | None = None, **changes: float | int | str | bool | None) -> Desired:
        """Change settings of a job, or request a checkpoint or a probe.

        Args:
            job: name of the job.
            version: version that the change is based on. `None`: the newest.
            changes: `budget`, `write_budget`, `max_unsaved_work`, `policy`, `every`, `paused`, `retention`,
                `on_trouble`, as numbers or as text ("2%", "2TB/day", "10min"); `None` returns to the script's
                setting.
                `every_seconds` limits how long `every` holds. `checkpoint_request` or `probe_request`: True
                requests one now.

        Raises:
            NotFound, Invalid.
            Conflict: a setting that decides the same has changed since that version.
        """
        held = self.desired(job).version if version is None else version
        return self._http.fetch(
            Desired, "PATCH", "/jobs/{job}/desired", job, body=changes, headers={"If-Match": f'"{held}"'}
        )

    def preview_settings(
        self, job: str, *, budget: float | None = None, every: int | str | None = None
    ) -> SettingsPreview:
        """Predict interval, overhead and unsaved work for these settings. Raises NotFound and Invalid.

        `every`: a number of iterations, or a time such as "10min".
        """
        return self._http.fetch(
            SettingsPreview, "GET", "/jobs/{job}/preview", job, query={"budget": budget, "every": every}
        )

    # ---- training -----------------------------------------------------------------------------

    def order_training(self, job: str, action: HaltAction) -> Desired:
        """Pause training after a checkpoint, continue it, or end it after a checkpoint.

        Args:
            job: name of the job.
            action: "pause", "continue" or "end".

        Raises:
            NotFound.
            Conflict: the job has ended, or is not paused.
        """
        return self._http.fetch(Desired, "POST", "/jobs/{job}/training/{action}", job, action, idempotent=True)

    def protect(self, job: str, *, protected: bool = True) -> JobSummary:
        """Protect a job: restores, pauses, ends and values then need the approval of a second person.

        Raises:
            NotFound.
            Conflict: the server has no accounts, or the removal of the protection waits for approval.
        """
        return self._http.fetch(
            JobSummary, "PUT", "/jobs/{job}/protection", job, body={"protected": protected}, idempotent=True
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
        degraded: bool = False,
        skip: DataSkip | None = None,
    ) -> Order:
        """Request a restore to an iteration, or to a checkpoint by its id.

        Args:
            job: name of the job.
            iteration: iteration to restore.
            checkpoint: id of the checkpoint, if several lineages have one at the iteration.
            key: idempotency key; a request with the same key returns the same restore.
            expires_seconds: time after which the request expires unless the job has begun it. `None`: a week.
            degraded: replace lost bytes where only the important bytes of the checkpoint are left.
            skip: data to leave out; `None`: training repeats the same data and reaches the same losses.

        Raises:
            NotFound: no such job or checkpoint; `body["nearest"]` is the nearest earlier one.
            Conflict: another restore is in progress, or this checkpoint cannot be restored.
            Invalid.
        """
        target = {"iteration": iteration, "checkpoint": checkpoint, "expires_seconds": expires_seconds}
        body: dict[str, object] = {name: value for name, value in target.items() if value is not None}
        body["key"] = key or uuid.uuid4().hex
        if degraded:  # which an earlier server would not know
            body["degraded"] = True
        if skip is not None:
            body["skip"] = {name: n for name, n in msgspec.to_builtins(skip).items() if n is not None}
        return self._http.fetch(Order, "POST", "/jobs/{job}/restores", job, body=body, idempotent=True)

    def preview_restore(self, job: str, checkpoint: str) -> RestorePreview:
        """Predict what a restore to this checkpoint would discard and how long it takes. Raises NotFound."""
        return self._http.fetch(
            RestorePreview, "GET", "/jobs/{job}/restores/preview", job, query={"checkpoint": checkpoint}
        )

    def orders(self, job: str, *, limit: int | None = None) -> list[Order]:
        """Return the restores of a job, newest first. Raises NotFound."""
        return self._http.rows(Order, "restores", "/jobs/{job}/restores", job, query={"limit": limit})

    def order(self, job: str, order: str) -> Order:
        """Return a restore. Raises NotFound."""
        return self._http.fetch(Order, "GET", "/jobs/{job}/restores/{order}", job, order)

    def undo_restore(self, job: str, order: str) -> Order:
        """Request a restore to the state before a restore. Idempotent.

        Raises:
            NotFound.
            Conflict: there is nothing to undo, or another restore is in progress.
        """
        return self._http.fetch(Order, "POST", "/jobs/{job}/restores/{order}/undo", job, order, idempotent=True)

    def cancel_restore(self, job: str, order: str) -> Order:
        """Cancel a restore. Idempotent. Raises NotFound, and Conflict if it has begun."""
        return self._http.fetch(Order, "POST", "/jobs/{job}/restores/{order}/cancel", job, order, idempotent=True)

    def follow(
        self, order: Order, *, timeout_seconds: float = float("inf"), poll_seconds: float = 0.2
    ) -> Iterator[Order]:
        """Yield a restore after each change of its state, until it ends or the time is up."""
        deadline = time.monotonic() + timeout_seconds
        yield order
        while order.state in OPEN_ORDER_STATES and time.monotonic() < deadline:
            time.sleep(poll_seconds)
            newer = self.order(order.job, order.id)
            if newer.state != order.state:
                yield newer
            order = newer
