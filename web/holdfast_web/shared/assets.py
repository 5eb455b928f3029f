"""Static files under URLs with a version, which browsers cache forever.

The version is a hash of all files and a folder of the URL. Pages load the scripts and styles in `built`, which
`make bundle` makes from the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from holdfast_server.api.responses import Encoding, compressed, encoding_for

STATIC = Path(str(files("holdfast_web") / "static"))
_FOREVER = "public, max-age=31536000, immutable"
_CONTENT_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_CONTENTS = {
    path.relative_to(STATIC).as_posix(): path.read_bytes()
    for path in sorted(STATIC.rglob("*"))
    if path.suffix in _CONTENT_TYPES
}
VERSION = hashlib.sha256(repr(_CONTENTS).encode()).hexdigest()[:12]


def static_url(path: str) -> str:
    return f"/static/{VERSION}/{path}"


@cache
def _encoded(path: str, encoding: Encoding | None) -> bytes:
    return compressed(_CONTENTS[path], encoding, zstd_level=19, gzip_level=9)


class VersionedStaticFiles(StaticFiles):
    """Files of the current version are immutable and compressed; others are served with revalidation."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        version, _, rest = path.partition("/")
        versioned = re.fullmatch("[0-9a-f]{12}", version) is not None
        if version != VERSION or rest not in _CONTENTS:
            response = await super().get_response(rest if versioned else path, scope)
            response.headers["Cache-Control"] = "no-cache"
            return response
        content_type = _CONTENT_TYPES[Path(rest).suffix]
        headers = {"Cache-Control": _FOREVER, "Content-Type": content_type, "Vary": "Accept-Encoding"}
        encoding = encoding_for(Headers(scope=scope).get("Accept-Encoding", ""))
        if encoding is not None:
            headers["Content-Encoding"] = encoding
        return Response(await asyncio.to_thread(_encoded, rest, encoding), headers=headers)


static_app = VersionedStaticFiles(directory=STATIC)
