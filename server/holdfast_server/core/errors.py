"""Requests that the server refuses. Each class carries the HTTP status and the code of the API's answer."""

from __future__ import annotations

from typing import ClassVar

from holdfast.protocol.jobs import CheckpointInfo, Order


class RequestRefused(Exception):
    """Base class. `str()` is one sentence for the user: the problem, and what to do about it."""

    status: int = 409
    code: str = "refused"
    message: str = "{}"
    """The sentence, formatted with the arguments of the error."""
    details: ClassVar[tuple[str, ...]] = ()
    """Attributes that the API's answer includes in addition to the sentence: the first arguments of the error."""
    retry_seconds: float | None = None
    """After which the same request may succeed: the `Retry-After` header."""

    def __init__(self, *arguments: object) -> None:
        for name, value in zip(self.details, arguments, strict=False):
            setattr(self, name, value)
        super().__init__(self.message.format(*arguments))


class ResourceNotFound(RequestRefused):
    """The named thing does not exist, or the client may not know that it does."""

    status = 404


class UnknownJob(ResourceNotFound):
    code, details = "unknown_job", ("job",)
    message = "job {!r} not found: no agent has reported under this name"
    job: str


class UnknownAttempt(ResourceNotFound):
    code, details, message = "unknown_attempt", ("job",), "job {!r} has no {}"


class UnknownOrder(ResourceNotFound):
    code, details, message = "unknown_order", ("job", "order"), "job {!r} has no restore request {!r}"


class UnknownAnnotation(ResourceNotFound):
    code, details = "unknown_annotation", ("job", "annotation")
    message = "job {!r} has no annotation {}: it may have been deleted"


class UnknownValue(ResourceNotFound):
    code, details = "unknown_value", ("job", "value")
    message = "job {!r} has no value {!r}: its script calls session.value with the names that it has"


class CheckpointNotFound(ResourceNotFound):
    """No checkpoint can be restored at that iteration; `nearest` is the next earlier one that can."""

    code, details = "no_such_checkpoint", ("iteration", "nearest")
    message = "no restorable checkpoint at iteration {0}; {2}"
    iteration: int
    nearest: CheckpointInfo | None

    def __init__(self, iteration: int, nearest: CheckpointInfo | None) -> None:
        offer = (
            f"the nearest earlier one is {nearest.id}, at iteration {nearest.iteration}"
            if nearest
            else "and there is none before it"
        )
        super().__init__(iteration, nearest, offer)


class UnknownStore(ResourceNotFound):
    code, message = "unknown_store", "there is no store {!r}: see `holdfast stores`"


class UnknownPerson(ResourceNotFound):
    code, message = "unknown_person", "there is no user {!r}"


class UnknownProject(ResourceNotFound):
    code, message = "unknown_project", "there is no project {!r}"


class UnknownToken(ResourceNotFound):
    code, message = "unknown_key", "there is no key {!r}"


class UnknownSession(ResourceNotFound):
    code, message = "unknown_session", "this browser is signed out already"


class InvalidSetting(RequestRefused):
    """A field has a value that the server does not accept."""

    status, code, details, message = 422, "invalid_setting", ("field", "reason"), "{1}"
    field: str
    reason: str


class WeakPassword(RequestRefused):
    status, code = 422, "weak_password"


class VersionConflict(RequestRefused):
    """The settings changed after the version that an edit is based on."""

    code, details = "conflict", ("version", "who", "at", "what")
    message = "{1} saved version {0} in the meantime ({3}): review it and try again"

    def __init__(self, *, version: int, who: str, at: float, what: str) -> None:
        super().__init__(version, who, at, what)


class NotRestorable(RequestRefused):
    """The checkpoint exists, but its state does not allow a restore."""

    code, details = "not_restorable", ("reason",)


class OpenOrder(RequestRefused):
    """Another restore of this job is in progress."""

    code, details = "open_order", ("order",)
    message = "a restore to iteration {0.iteration} is already {0.state}: cancel it or wait for it"
    order: Order


class NotCancellable(RequestRefused):
    """The restore has started or has ended."""

    code, details = "not_cancellable", ("order",)
    message = "this restore is {0.state}: it can be cancelled only while no attempt carries it out"


class WaitsForApproval(RequestRefused):
    """The job is protected: the request was recorded, and waits for a second person."""

    code, details = "approval_needed", ("approval", "expires_at", "what")
    message = "the job is protected: a second person must approve the request to {2} within 15 minutes"
    approval: str
    expires_at: float
    what: str


class UnknownApproval(ResourceNotFound):
    code, details = "unknown_approval", ("job", "approval")
    message = "job {!r} has no request for approval {!r}"


class NotPossible(RequestRefused):
    """The current state of the server does not allow the request."""

    code = "not_possible"


class PermissionDenied(RequestRefused):
    status, code = 403, "not_permitted"


class InvalidCredentials(RequestRefused):
    """Does not say which of the two is wrong: that would reveal which names exist."""

    status, code, message = 401, "not_signed_in", "wrong name or password"


class LinkExpired(RequestRefused):
    status, code = 410, "dead_link"
    message = (
        "this link no longer works: each link works once and for a limited time, and a newer link replaces it"
    )


class TooManySignInAttempts(RequestRefused):
    status, code, details = 429, "too_many_tries", ("retry_seconds",)
    message = "too many sign-in attempts: wait {1} s and try again"

    def __init__(self, retry_seconds: float) -> None:
        super().__init__(retry_seconds, max(1, round(retry_seconds)))


class PasswordQueueFull(RequestRefused):
    """The server hashes one password at a time, and too many requests wait for it."""

    status, code, retry_seconds = 503, "busy", 4.0
    message = "the server is checking many passwords: try again in a few seconds"


class TooManyJobs(RequestRefused):
    """A report would create a job in a project that has reached its limit."""

    status, code, retry_seconds = 429, "too_many_jobs", 60.0
    message = (
        "project {!r} has reached its limit of {} jobs: delete old jobs with "
        "`holdfast delete JOB`, or start the server with a larger --max-jobs (HOLDFAST_MAX_JOBS)"
    )


class TooManyStreams(RequestRefused):
    """A person, including all of their keys, has reached the limit of open streams."""

    status, code, retry_seconds = 429, "too_many_streams", 5.0
    message = "you have {} open streams already: close a page or a program that uses one"


# ---- alerts, rules and channels -----------------------------------------------------------------


class UnknownAlert(ResourceNotFound):
    code, details, message = "unknown_alert", ("alert",), "there is no alert {}"


class AlertResolved(RequestRefused):
    """A resolved alert can be neither acknowledged nor silenced."""

    code, details, message = "alert_over", ("alert",), "alert {} has resolved already"


class UnknownRule(ResourceNotFound):
    code, message = "unknown_rule", "project {!r} has no custom rule {!r}"


class UnknownChannel(ResourceNotFound):
    code, message = "unknown_channel", "there is no channel {!r}"


class WebhooksDisabled(RequestRefused):
    code = "webhooks_off"
    message = "webhooks are off on this server: its administrator enables them with HOLDFAST_WEBHOOKS=on"


class MailDisabled(RequestRefused):
    code = "mail_off"
    message = "email is off on this server: its administrator enables it with HOLDFAST_SMTP_HOST"
