"""Where agents report."""

from __future__ import annotations

import zlib
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol import Ack, Batch
from holdfast_server import ingest
from holdfast_server.api.answers import Json, refusal
from holdfast_server.api.schema import body, returns
from holdfast_server.dependencies import Clock, Db, Measures

MAX_BODY_BYTES = 8 * 2**20
"""Of a batch, before and after decompression."""
MSGPACK = ("application/msgpack", "application/vnd.msgpack", "application/x-msgpack")

router = APIRouter(tags=["agents"])


@router.post("/ingest", max_body_size=MAX_BODY_BYTES, openapi_extra=body(Batch), responses=returns(Ack))
async def report(request: Request, db: Db, clock: Clock, measures: Measures) -> Response:
    """Take in a batch; the answer says that it is committed. Sent twice, it is kept once."""
    encoding = _encoding(request)
    if encoding is None:
        return refusal(415, "unsupported_type", "send application/msgpack or application/json")
    try:
        content = _decompressed(await request.body(), request.headers.get("content-encoding", "identity"))
    except zlib.error as error:
        return refusal(422, "invalid_batch", f"the body cannot be decompressed: {error}")
    if content is None:
        return refusal(415, "unsupported_encoding", "send the body as it is, or with Content-Encoding: gzip")
    with measures.ingesting():
        now = clock()
        received = ingest.decode(content, encoding, now=now)
        ack = await ingest.store(db, received, now=now)
    measures.ingested(received)
    return _answer(ack, request.headers.get("accept", ""), encoding)


def _encoding(request: Request) -> Literal["msgpack", "json"] | None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in MSGPACK:
        return "msgpack"
    return "json" if kind == "application/json" else None


def _decompressed(content: bytes, encoding: str) -> bytes | None:
    match encoding.strip().lower():
        case "identity":
            return content
        case "gzip":
            # Never more than the limit in memory, whatever a small body claims to become.
            inflater = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            plain = inflater.decompress(content, MAX_BODY_BYTES + 1)
            if len(plain) > MAX_BODY_BYTES:
                raise HTTPException(413)
            if not inflater.eof:
                raise zlib.error("it ends too early")
            return plain
        case _:
            return None


def _answer(ack: Ack, accept: str, encoding: str) -> Response:
    """In the encoding that is asked for, else in the one that was sent."""
    as_json = "json" in accept or ("msgpack" not in accept and encoding == "json")
    return Json(ack) if as_json else Response(msgspec.msgpack.encode(ack), media_type=MSGPACK[0])
