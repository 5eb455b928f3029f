"""Requests that the server refuses. Each class carries the HTTP status and the code of the API's answer."""

from __future__ import annotations

from typing import ClassVar

from holdfast.protocol.jobs import CheckpointInfo, Order


class RequestRefused(Exception):
    """Base class. `str()` is one sentence for the user: what is wrong, and what to do."""

    status: int = 409
    code: str = "refused"
    details: ClassVar[tuple[str, ...]] = ()
    """Attributes that the API's answer includes besides the sentence."""
    retry_seconds: float | None = None
    """After which the same request may succeed: the `Retry-After` header."""


class ResourceNotFound(RequestRefused):
    """The named thing does not exist, or the client may not know that it does."""

    status = 404


class UnknownJob(ResourceNotFound):
    code, details = "unknown_job", ("job",)

    def __init__(self, job: str) -> None:
        self.job = job
        super().__init__(f"job {job!r} not found: no agent has reported under this name")


class UnknownAttempt(ResourceNotFound):
    code, details = "unknown_attempt", ("job",)

    def __init__(self, job: str, what: str) -> None:
        self.job = job
        super().__init__(f"job {job!r} has no {what}")


class UnknownOrder(ResourceNotFound):
    code, details = "unknown_order", ("job", "order")

    def __init__(self, job: str, order: str) -> None:
        self.job, self.order = job, order
        super().__init__(f"job {job!r} has no restore request {order!r}")


class UnknownAnnotation(ResourceNotFound):
    code, details = "unknown_annotation", ("job", "annotation")

    def __init__(self, job: str, annotation: int) -> None:
        self.job, self.annotation = job, annotation
        super().__init__(f"job {job!r} has no annotation {annotation}: it may have been deleted")


class CheckpointNotFound(ResourceNotFound):
    """No checkpoint can be restored at that iteration; `nearest` is the next earlier one that can."""

    code, details = "no_such_checkpoint", ("iteration", "nearest")

    def __init__(self, iteration: int, nearest: CheckpointInfo | None) -> None:
        self.iteration, self.nearest = iteration, nearest
        offer = (
            f"the nearest earlier one is {nearest.id}, at iteration {nearest.iteration}"
            if nearest
            else "and there is none before it"
        )
        super().__init__(f"no restorable checkpoint at iteration {iteration}; {offer}")


class UnknownPerson(ResourceNotFound):
    code = "unknown_person"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no user {name!r}")


class UnknownProject(ResourceNotFound):
    code = "unknown_project"

    def __init__(self, project: str) -> None:
        super().__init__(f"there is no project {project!r}")


class UnknownToken(ResourceNotFound):
    code = "unknown_key"

    def __init__(self, prefix: str) -> None:
        super().__init__(f"there is no key {prefix!r}")


class UnknownSession(ResourceNotFound):
    code = "unknown_session"

    def __init__(self) -> None:
        super().__init__("this browser is signed out already")


class InvalidSetting(RequestRefused):
    """A field has a value that the server does not accept."""

    status, code, details = 422, "invalid_setting", ("field", "reason")

    def __init__(self, field: str, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(reason)


class WeakPassword(RequestRefused):
    status, code = 422, "weak_password"


class VersionConflict(RequestRefused):
    """The settings changed after the version that an edit is based on."""

    code, details = "conflict", ("version", "who", "at", "what")

    def __init__(self, *, version: int, who: str, at: float, what: str) -> None:
        self.version, self.who, self.at, self.what = version, who, at, what
        super().__init__(f"{who} saved version {version} in the meantime ({what}): review it and try again")


class NotRestorable(RequestRefused):
    """The checkpoint exists, but its state does not allow a restore."""

    code, details = "not_restorable", ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class OpenOrder(RequestRefused):
    """Another restore of this job is in progress."""

    code, details = "open_order", ("order",)

    def __init__(self, order: Order) -> None:
        self.order = order
        super().__init__(
            f"a restore to iteration {order.iteration} is already {order.state}: cancel it or wait for it"
        )


class NotCancellable(RequestRefused):
    """The restore has started or has ended."""

    code, details = "not_cancellable", ("order",)

    def __init__(self, order: Order) -> None:
        self.order = order
        super().__init__(
            f"this restore is {order.state}: it can be cancelled only while no attempt carries it out"
        )


class NotPossible(RequestRefused):
    """The current state of the server does not allow the request."""

    code = "not_possible"


class PermissionDenied(RequestRefused):
    status, code = 403, "not_permitted"


class InvalidCredentials(RequestRefused):
    """Does not say which of the two is wrong: that would reveal which names exist."""

    status, code = 401, "not_signed_in"

    def __init__(self) -> None:
        super().__init__("wrong name or password")


class LinkExpired(RequestRefused):
    status, code = 410, "dead_link"

    def __init__(self) -> None:
        super().__init__(
            "this link no longer works: each link works once and for a limited time, and a newer link replaces it"
        )


class TooManySignInAttempts(RequestRefused):
    status, code, details = 429, "too_many_tries", ("retry_seconds",)

    def __init__(self, retry_seconds: float) -> None:
        self.retry_seconds = retry_seconds
        super().__init__(f"too many sign-in attempts: wait {max(1, round(retry_seconds))} s and try again")


class PasswordQueueFull(RequestRefused):
    """The server hashes one password at a time, and too many requests wait for it."""

    status, code, retry_seconds = 503, "busy", 4.0

    def __init__(self) -> None:
        super().__init__("the server is checking many passwords: try again in a few seconds")


class TooManyJobs(RequestRefused):
    """A report would create a job in a project that has reached its limit."""

    status, code, retry_seconds = 429, "too_many_jobs", 60.0

    def __init__(self, project: str, limit: int) -> None:
        super().__init__(
            f"project {project!r} has reached its limit of {limit} jobs: delete old jobs with "
            "`holdfast delete JOB`, or start the server with a larger --max-jobs (HOLDFAST_MAX_JOBS)"
        )


class TooManyStreams(RequestRefused):
    """A person, including all of their keys, has reached the limit of open streams."""

    status, code, retry_seconds = 429, "too_many_streams", 5.0

    def __init__(self, limit: int) -> None:
        super().__init__(f"you have {limit} open streams already: close a page or a program that uses one")
