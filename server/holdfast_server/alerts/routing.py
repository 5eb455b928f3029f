"""Routes of alerts: which jobs of its project a channel receives the alerts of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.records.job_status import current_attempts

MAX_PATTERN, MAX_LABELS = 200, 20
_labels = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class JobTags:
    """What a route looks at."""

    owner: str
    labels: Mapping[str, str]


def parse_owner(text: str) -> str:
    """Return the pattern of a route as it is stored. Raises InvalidSetting."""
    return _pattern("owner", text)


def parse_labels(text: str) -> dict[str, str]:
    """Parse patterns as a form has them, `team: nlp, gpu: h100*`. Raises InvalidSetting."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = (each.strip() for each in part.partition(":"))
        if not separator or name in found:
            raise InvalidSetting(
                "labels", f"label {part[:80]!r}: write each label once as name: value, as in team: nlp"
            )
        found[name] = value
    return found


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the patterns of a route as they are stored. Raises InvalidSetting."""
    if len(labels) > MAX_LABELS:
        raise InvalidSetting("labels", f"a route has at most {MAX_LABELS} labels")
    checked = {_pattern("labels", name): _pattern("labels", value) for name, value in labels.items()}
    if not all(name and value and ":" not in name for name, value in checked.items()):
        raise InvalidSetting("labels", "a label of a route has a name without a colon, and a value, as in team: *")
    return checked


def _pattern(field: str, text: str) -> str:
    pattern = text.strip()
    if len(pattern) > MAX_PATTERN or "," in pattern or not all(map(str.isprintable, pattern)):
        reason = f"a pattern has at most {MAX_PATTERN} printable characters and no comma; * and ? are wildcards"
        raise InvalidSetting(field, reason)
    return pattern


def shown_labels(labels: Mapping[str, str]) -> str:
    """Return patterns of labels as `parse_labels` reads them."""
    return ", ".join(f"{name}: {value}" for name, value in labels.items())


def stored_labels(labels: Mapping[str, str]) -> str:
    return msgspec.json.encode(labels).decode() if labels else ""


def labels_of(stored: str | None) -> dict[str, str]:
    return _labels.decode(stored) if stored else {}


def tags_of(session: Session, jobs: Collection[str]) -> dict[str, JobTags]:
    """Return the owner and the labels of the current attempt of each job."""
    attempts = current_attempts(session, list(jobs))
    return {job: JobTags(row.owner or "", labels_of(row.labels)) for job, row in attempts.items()}


def receives(channel: models.AlertChannelRecord, tags: JobTags | None) -> bool:
    """Return whether a channel receives the alerts of a job: its owner and each label of the route match."""
    known = tags or JobTags("", {})
    if channel.owner and not fnmatchcase(known.owner, channel.owner):
        return False
    return all(
        name in known.labels and fnmatchcase(known.labels[name], pattern)
        for name, pattern in labels_of(channel.labels).items()
    )


def received_jobs(session: Session, channel: models.AlertChannelRecord) -> list[str]:
    """Return the jobs of the project whose alerts a channel receives now, by name."""
    rows = models.JobRecord
    names = list(session.scalars(select(rows.name).where(rows.project == channel.project).order_by(rows.name)))
    tags = tags_of(session, names)
    return [name for name in names if receives(channel, tags.get(name))]
