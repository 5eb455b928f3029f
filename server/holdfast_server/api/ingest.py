"""The endpoint that agents report to."""

from __future__ import annotations

from typing import Literal, cast

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.wire import Ack, Batch
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json
from holdfast_server.core import compression
from holdfast_server.core.access import AccessRule
from holdfast_server.core.errors import RequestRefused, UnknownJob
from holdfast_server.core.principal import Principal
from holdfast_server.http.services import services_of
from holdfast_server.ingest import batches, transaction

MAX_BODY_BYTES = 8 * 2**20
"""Largest batch, both compressed and decompressed."""
MSGPACK = ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack")

router = Router("/api/v1", tag="agents")


@router.endpoint(
    "POST",
    "/ingest",
    access=AccessRule(audience="report", agents=True),
    body=Batch,
    returns=Ack,
    errors={
        404: "The key may not report on this job",
        409: "A newer attempt of the job has started",
        413: "The body is too large, compressed or decompressed",
        415: "Unsupported content type or encoding",
        422: "Not a valid batch: do not send it again",
        429: "No samples are accepted now, or the project has reached its job limit: see Retry-After",
        503: "Nothing is accepted now: see Retry-After",
    },
    max_body_bytes=MAX_BODY_BYTES,
)
async def report(request: Request) -> Response:
    """Store a batch. It is committed before the answer is sent; a batch that is sent twice is stored once."""
    # Dependencies would cost time on every batch.
    services, asker = services_of(request.app), cast("Principal", request.state.principal)
    sent = await services.admission.read(request.stream())
    with services.metrics.ingesting():
        now, encoding = services.clock(), _encoding(request)
        content = _decompressed(sent, request.headers.get("content-encoding", "identity"))
        received = batches.decode(content, encoding, now=now)
        with services.admission.admitting(received.batch.lane, len(content)):
            try:
                project = await services.job_projects.project_for_report(asker, received.batch.job)
                ack = await transaction.store(
                    services.database, received, project=project, max_jobs=services.settings.max_jobs, now=now
                )
            except UnknownJob as error:
                # A report creates a job that does not exist, so this means that another project has the name.
                raise JobNameTaken(error.job) from None
    services.metrics.ingested(received)
    as_json = _wants_json(request.headers.get("accept", ""), encoding)
    return Json(ack) if as_json else Response(msgspec.msgpack.encode(ack), media_type=MSGPACK[0])


class JobNameTaken(UnknownJob):
    message = (
        "this key may not report on {!r}: a job of another project has that name, or the key is for another job; "
        "choose another job name, or ask a server admin to move or delete the other job"
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
    """Return whether to answer in JSON: as requested, otherwise as the batch is encoded."""
    return "json" in accept or ("msgpack" not in accept and sent == "json")
