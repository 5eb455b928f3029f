"""What the server refuses, each with the way out; the API gives every one a status, the pages a sentence."""

from __future__ import annotations

from holdfast.protocol.jobs import CheckpointRow, Order


class Refused(Exception):
    """Base of all; str() is one sentence for the person who asked."""


class UnknownJob(Refused):
    """No agent has ever reported under this name."""

    def __init__(self, job: str) -> None:
        self.job = job
        super().__init__(f"no job {job!r} has reported here yet")


class UnknownOrder(Refused):
    """This job has no restore order of that id."""

    def __init__(self, job: str, order: str) -> None:
        self.job, self.order = job, order
        super().__init__(f"job {job!r} has no restore order {order!r}")


class InvalidSetting(Refused):
    """A value that cannot be a setting."""

    def __init__(self, field: str, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(reason)


class Conflict(Refused):
    """Somebody changed what is desired since the version that an edit was made from."""

    def __init__(self, *, version: int, who: str, at: float, what: str) -> None:
        self.version, self.who, self.at, self.what = version, who, at, what
        super().__init__(f"{who} made it version {version} meanwhile ({what}): look at it and try again")


class NoSuchCheckpoint(Refused):
    """Nothing durable at that iteration; `nearest` is the next earlier one that can be restored."""

    def __init__(self, iteration: int, nearest: CheckpointRow | None) -> None:
        self.iteration, self.nearest = iteration, nearest
        offer = (
            f"the nearest earlier one is {nearest.id}, at iteration {nearest.iteration}"
            if nearest
            else "and there is none before it"
        )
        super().__init__(f"no restorable checkpoint at iteration {iteration}; {offer}")


class NotRestorable(Refused):
    """The checkpoint is known, and not in a state to go back to."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class OpenOrder(Refused):
    """Another restore of this job is under way."""

    def __init__(self, order: Order) -> None:
        self.order = order
        super().__init__(
            f"a restore to iteration {order.iteration} is {order.state} already: cancel it or wait for it"
        )


class NotCancellable(Refused):
    """The order has gone too far, or has ended."""

    def __init__(self, order: Order) -> None:
        self.order = order
        super().__init__(
            f"this restore is {order.state}: it can be cancelled until an attempt restores, or once that is over"
        )


class NotThere(Refused):
    """Base of what is asked for by a name that nothing has, or nothing that whoever asks may see."""


class UnknownPerson(NotThere):
    def __init__(self, name: str) -> None:
        super().__init__(f"nobody here is called {name!r}")


class UnknownProject(NotThere):
    def __init__(self, project: str) -> None:
        super().__init__(f"there is no project {project!r}")


class UnknownToken(NotThere):
    def __init__(self, prefix: str) -> None:
        super().__init__(f"there is no key {prefix!r}")


class UnknownSession(NotThere):
    def __init__(self) -> None:
        super().__init__("this browser is signed out already")


class RetryLater(Refused):
    """Refused for now: the same request may be accepted in `retry_seconds`."""

    retry_seconds: float


class TooManyJobs(RetryLater):
    """A report would begin a new job in a project that has as many as it may."""

    retry_seconds = 60.0

    def __init__(self, project: str, limit: int) -> None:
        super().__init__(
            f"project {project!r} has {limit} jobs or more, and a new one is refused: delete old jobs with "
            "`holdfast delete JOB`, or start the server with a larger --max-jobs (HOLDFAST_MAX_JOBS)"
        )


class TooManyStreams(RetryLater):
    """A person, with all keys of theirs, listens to as much at a time as they may."""

    retry_seconds = 5.0

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} streams are open for you already: close a page or a program that listens")


class WeakPassword(Refused):
    """One that would be guessed, or that cannot be one."""


class NotSignedIn(Refused):
    """The name and the password do not belong together; which of them is wrong is nobody's business."""

    def __init__(self) -> None:
        super().__init__("the name or the password is not right")


class TooManyTries(RetryLater):
    """Somebody guesses passwords, or has forgotten one."""

    def __init__(self, retry_seconds: float) -> None:
        self.retry_seconds = retry_seconds
        super().__init__(f"too many tries to sign in: wait {max(1, round(retry_seconds))} s and try again")


class DeadLink(Refused):
    """Used, replaced, or too old."""

    def __init__(self) -> None:
        super().__init__("this link does not work any more: it works once, for a while, and only the newest does")


class NotPermitted(Refused):
    """Somebody may see this and not do that."""


class NotPossible(Refused):
    """It would leave the server without what it needs, or is there already."""
