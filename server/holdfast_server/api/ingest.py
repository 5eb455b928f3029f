"""The endpoint that agents report to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, cast

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.messages import Ack, Batch
from holdfast_server.accounts.job_projects import JobProjects
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json
from holdfast_server.core import compression
from holdfast_server.core.errors import RequestRefused, UnknownJob
from holdfast_server.core.principal import Principal
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_server.http.metrics import ServerMetrics
from holdfast_server.ingest import transaction
from holdfast_server.ingest.admission import AdmissionControl
from holdfast_server.samples import batches

MAX_BODY_BYTES = 8 * 2**20
"""Largest batch, both compressed and decompressed."""
MSGPACK = ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack")

router = APIRouter(tags=["agents"])


@router.post(
    "/ingest",
    max_body_size=MAX_BODY_BYTES,
    openapi_extra=body(Batch),
    responses=returns(
        Ack,
        _404="The key may not report on this job",
        _409="A newer attempt of the job has begun",
        _413="The body is too large, compressed or decompressed",
        _415="Unsupported content type or encoding",
        _422="Not a valid batch: do not send it again",
        _429="No samples are accepted now, or the project has reached its job limit: see Retry-After",
        _503="Nothing is accepted now: see Retry-After",
    ),
)
async def report(request: Request) -> Response:
    """Store a batch. It is committed when the answer is sent; sent twice, it is stored once."""
    state, asker = cast("IngestState", request.app.state), cast("Principal", request.state.principal)
    sent = await state.admission.read(request.stream())
    with state.metrics.ingesting():
        now, encoding = state.clock(), _encoding(request)
        content = _decompressed(sent, request.headers.get("content-encoding", "identity"))
        received = batches.decode(content, encoding, now=now)
        with state.admission.admitting(received.batch.lane, len(content)):
            try:
                project = await state.job_projects.project_for_report(asker, received.batch.job)
                ack = await transaction.store(
                    state.database, received, project=project, max_jobs=state.settings.max_jobs, now=now
                )
            except UnknownJob as error:
                # A report creates a job that does not exist, so this means that another project has the name.
                raise JobNameTaken(error.job) from None
    state.metrics.ingested(received)
    as_json = _wants_json(request.headers.get("accept", ""), encoding)
    return Json(ack) if as_json else Response(msgspec.msgpack.encode(ack), media_type=MSGPACK[0])


class IngestState(Protocol):
    """The application state that this route uses. It has no dependencies, which would cost time on every batch."""

    database: Database
    clock: Callable[[], float]
    metrics: ServerMetrics
    admission: AdmissionControl
    job_projects: JobProjects
    settings: ServerSettings


class JobNameTaken(UnknownJob):
    message = (
        "this key may not report on {!r}: a job of another project has that name, or the key is for another job; "
        "choose another job name, or ask a server administrator to move or delete the other job"
    )


class UnsupportedBody(RequestRefused):
    status = 415

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


def _encoding(request: Request) -> Literal["msgpack", "json"]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in MSGPACK:
        return "msgpack"
    if kind != "application/json":
        raise UnsupportedBody("unsupported_type", "send application/msgpack or application/json")
    return "json"


def _decompressed(content: bytes, encoding: str) -> bytes:
    try:
        match encoding.strip().lower():
            case "identity":
                return content
            case "gzip":
                plain = compression.gunzip(content, MAX_BODY_BYTES)
            case "zstd":
                plain = compression.decompress(content, MAX_BODY_BYTES)
            case _:
                raise UnsupportedBody(
                    "unsupported_encoding", "send the body uncompressed, or with Content-Encoding: zstd or gzip"
                )
    except compression.CorruptContent as error:
        raise batches.InvalidBatch(f"the body cannot be decompressed: {error}") from None
    except compression.ContentTooLarge:
        raise HTTPException(413) from None
    if not compression.plausible(content, plain):
        raise HTTPException(413)
    return plain


def _wants_json(accept: str, sent: str) -> bool:
    """Whether to answer in JSON: as requested, otherwise in the encoding of the batch."""
    return "json" in accept or ("msgpack" not in accept and sent == "json")
