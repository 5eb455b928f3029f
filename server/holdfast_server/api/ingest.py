"""Where agents report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, cast

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.messages import Ack, Batch
from holdfast_server.accounts.job_projects import Belonging
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, refusal
from holdfast_server.core import compression
from holdfast_server.core.compression import Broken, TooLarge
from holdfast_server.core.errors import UnknownJob
from holdfast_server.core.principal import Principal
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_server.http.metrics import ServerMeasures
from holdfast_server.ingest import transaction
from holdfast_server.ingest.admission import RETRY_AFTER_SECONDS, Intake, TooMuch
from holdfast_server.samples import batches

MAX_BODY_BYTES = 8 * 2**20
"""Of a batch, before and after decompression."""
TAKEN = (
    "this key may not report of {job!r}: a job of another project has that name, or the key is for another job; "
    "give this job another name, or ask an admin of the server to move or delete the other one"
)
MSGPACK = ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack")

router = APIRouter(tags=["agents"])


@router.post(
    "/ingest",
    max_body_size=MAX_BODY_BYTES,
    openapi_extra=body(Batch),
    responses=returns(
        Ack,
        _404="A job that this key may not report of",
        _409="A newer attempt has begun: this one has no more say",
        _413="Too large, as it is or unpacked",
        _415="Another type or encoding than we read",
        _422="Not a batch: never to be sent again",
        _429="Samples are not taken now, or the project has as many jobs as it may: Retry-After says when",
        _503="Nothing is taken now: Retry-After says when",
    ),
)
async def report(request: Request) -> Response:
    """Take in a batch; the answer says that it is committed. Sent twice, it is kept once."""
    state, asker = cast("State", request.app.state), cast("Principal", request.state.principal)
    try:
        sent = await state.room.read(request.stream())
        with state.measures.ingesting():
            now, encoding = state.clock(), _encoding(request)
            content = _decompressed(sent, request.headers.get("content-encoding", "identity"))
            received = batches.decode(content, encoding, now=now)
            with state.room.taking(received.batch.lane, len(content)):
                project = await state.belonging.reporting(asker, received.batch.job)
                ack = await transaction.store(
                    state.database, received, project=project, max_jobs=state.settings.max_jobs, now=now
                )
    except TooMuch as error:
        return _later(error)
    except transaction.Superseded as error:
        return refusal(409, "fenced", str(error))
    except UnknownJob as error:
        # A report makes a job that is new: this name is taken.
        return refusal(404, "unknown_job", TAKEN.format(job=error.job), job=error.job)
    except Unread as error:
        return refusal(415, error.code, str(error))
    except Broken as error:
        return refusal(422, "invalid_batch", f"the body cannot be decompressed: {error}")
    except TooLarge:
        raise HTTPException(413) from None
    state.measures.ingested(received)
    return _answer(ack, request.headers.get("accept", ""), encoding)


class State(Protocol):
    """Of the application, what taking in a batch asks for."""

    database: Database
    clock: Callable[[], float]
    measures: ServerMeasures
    room: Intake
    belonging: Belonging
    settings: ServerSettings


class Unread(ValueError):
    """A body of another type, or packed otherwise, than we read."""

    def __init__(self, code: str, way_out: str) -> None:
        super().__init__(way_out)
        self.code = code


def _encoding(request: Request) -> Literal["msgpack", "json"]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in MSGPACK:
        return "msgpack"
    if kind != "application/json":
        raise Unread("unsupported_type", "send application/msgpack or application/json")
    return "json"


def _decompressed(content: bytes, encoding: str) -> bytes:
    match encoding.strip().lower():
        case "identity":
            return content
        case "gzip":
            plain = compression.gunzip(content, MAX_BODY_BYTES)
        case "zstd":
            plain = compression.decompress(content, MAX_BODY_BYTES)
        case _:
            raise Unread("unsupported_encoding", "send the body as it is, or with Content-Encoding: zstd or gzip")
    if not compression.plausible(content, plain):
        raise TooLarge("no report compresses so well")
    return plain


def _later(error: TooMuch) -> Response:
    status, code = (429, "too_many_samples") if error.lane == "samples" else (503, "unavailable")
    answer = refusal(status, code, str(error))
    answer.headers["Retry-After"] = str(RETRY_AFTER_SECONDS[error.lane])
    return answer


def _answer(ack: Ack, accept: str, encoding: str) -> Response:
    """In the encoding that is asked for, else in the one that was sent."""
    as_json = "json" in accept or ("msgpack" not in accept and encoding == "json")
    return Json(ack) if as_json else Response(msgspec.msgpack.encode(ack), media_type=MSGPACK[0])
