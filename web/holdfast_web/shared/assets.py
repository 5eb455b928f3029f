"""Static files under URLs that name their content: browsers keep them for ever, and never a stale one.

All files share one version, the hash of their contents, as a folder of the URL. Scripts import each other by
relative paths, so that whatever a page loads is of one version.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(str(files("holdfast_web") / "static"))
_FOREVER = "public, max-age=31536000, immutable"
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_COMPRESSED = {path.relative_to(STATIC).as_posix(): gzip.compress(path.read_bytes(), 9, mtime=0)
               for path in sorted(STATIC.rglob("*")) if path.suffix in _KINDS}  # fmt: skip
VERSION = hashlib.sha256(repr(_COMPRESSED).encode()).hexdigest()[:12]
_IMPORT = re.compile(r'^import .* from "(\.[^"]+)";$', re.MULTILINE)


def static_url(path: str) -> str:
    return f"/static/{VERSION}/{path}"


@cache
def imports_of(script: str) -> list[str]:
    """What a script imports, at first and second hand, for `modulepreload`: a browser then loads all at once."""
    found: list[str] = []
    for path in [(STATIC / script).parent / name for name in _IMPORT.findall((STATIC / script).read_text())]:
        imported = path.resolve().relative_to(STATIC.resolve()).as_posix()
        found += [one for one in (imported, *imports_of(imported)) if one not in found]
    return found


class VersionedStaticFiles(StaticFiles):
    """Of the version that there is: immutable and compressed. Otherwise the file itself, revalidated."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        version, _, rest = path.partition("/")
        versioned = re.fullmatch("[0-9a-f]{12}", version) is not None
        if version != VERSION or rest not in _COMPRESSED:
            response = await super().get_response(rest if versioned else path, scope)
            response.headers["Cache-Control"] = "no-cache"
            return response
        headers = {"Cache-Control": _FOREVER, "Content-Type": _KINDS[Path(rest).suffix], "Vary": "Accept-Encoding"}
        if "gzip" in Headers(scope=scope).get("Accept-Encoding", ""):
            return Response(_COMPRESSED[rest], headers=headers | {"Content-Encoding": "gzip"})
        return Response(gzip.decompress(_COMPRESSED[rest]), headers=headers)


static_app = VersionedStaticFiles(directory=STATIC)
