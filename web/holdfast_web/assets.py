"""Static files under URLs that name their content, so that browsers keep them for ever and never a stale one."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(str(files("holdfast_web") / "static"))
_FOREVER = "public, max-age=31536000, immutable"


@cache
def _digest(path: str, modified_ns: int) -> str:
    return hashlib.sha256((STATIC / path).read_bytes()).hexdigest()[:12]


def content_hash(path: str) -> str:
    """The first twelve digits of the file's SHA-256; hashed again only when the file changes."""
    return _digest(path, (STATIC / path).stat().st_mtime_ns)


def static_url(path: str) -> str:
    return f"/static/{path}?v={content_hash(path)}"


class HashedStaticFiles(StaticFiles):
    """Immutable when asked for by the hash it has now, revalidated otherwise (as modules import each other)."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("v", [""])[0]
        known = response.status_code in (200, 304) and asked == content_hash(path)
        response.headers["Cache-Control"] = _FOREVER if known else "no-cache"
        return response


static_app = HashedStaticFiles(directory=STATIC)
