"""Static files under URLs that name their content, so that browsers keep them for ever and never a stale one.

A script that a page names comes with all that it imports, in one answer; each file can be had by itself too.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import time
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from holdfast_web.bundles import bundle

STATIC = Path(str(files("holdfast_web") / "static"))
ENTRIES = ("app/main.js", "app/plain.js", "timeline/main.js")
"""Scripts that import others."""
STYLES = "app.css"
_FOREVER = "public, max-age=31536000, immutable"
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


def content_hash(path: str) -> str:
    """The first twelve digits of the SHA-256 of what is sent; made again only when one of its files changes."""
    return hashlib.sha256(content(path)).hexdigest()[:12]


def content(path: str) -> bytes:
    """A file or, of a script that imports others, all of them."""
    return _content(path, _version(path))


def static_url(path: str) -> str:
    return f"/static/{path}?v={_hash(path, _version(path))}"


def _version(path: str) -> tuple[int, ...]:
    return _looked_up(path, int(time.monotonic()))


@lru_cache(maxsize=128)
def _looked_up(path: str, _: int) -> tuple[int, ...]:
    """When it was written, and of a script that imports others, when any of ours was. Looked up once a second."""
    files = sorted(STATIC.glob("*/*.js")) if path in ENTRIES else [STATIC / path]
    return tuple(one.stat().st_mtime_ns for one in files)


@cache
def _content(path: str, _: tuple[int, ...]) -> bytes:
    if path in ENTRIES:
        return bundle(STATIC / path).encode()
    plain = (STATIC / path).read_bytes()
    return _tight(plain.decode()).encode() if path == STYLES else plain


def _tight(styles: str) -> str:
    """Without comments, and without spaces where they say nothing. No text of ours has any where these count."""
    plain = re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", styles, flags=re.DOTALL))
    return re.sub(r" ?([{};,>]) ?", r"\1", plain).replace(": ", ":").replace(";}", "}").strip()


@cache
def _hash(path: str, _: tuple[int, ...]) -> str:
    return content_hash(path)


@cache
def _squeezed(path: str, _: str) -> bytes:
    return gzip.compress(content(path), 9, mtime=0)


class HashedStaticFiles(StaticFiles):
    """By the hash that it has now: immutable and compressed. Otherwise the file itself, revalidated."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("v", [""])[0]
        known = response.status_code in (200, 304) and bool(asked) and asked == _hash(path, _version(path))
        if known and response.status_code == 200 and scope["method"] == "GET":
            response = _whole(path, asked, Headers(scope=scope))
        response.headers["Cache-Control"] = _FOREVER if known else "no-cache"
        return response


def _whole(path: str, asked: str, headers: Headers) -> Response:
    kind = _KINDS.get(Path(path).suffix, "application/octet-stream")
    told = {"Content-Type": kind, "Vary": "Accept-Encoding"}
    if "gzip" in headers.get("Accept-Encoding", ""):
        return Response(_squeezed(path, asked), headers=told | {"Content-Encoding": "gzip"})
    return Response(content(path), headers=told)


static_app = HashedStaticFiles(directory=STATIC)
