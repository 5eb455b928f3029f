"""Rebuild the scripts and styles that pages load from their sources, with esbuild; it needs Node.js and npm.

The output is part of the repository, so that neither users nor the tests need these. A test compares a digest of
sources and output with the one that was written when the output was built.

    python -m tools.bundle
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile

from holdfast_web.shared.assets import STATIC

ESBUILD = "esbuild@0.28.2"
ENTRIES = ("app.css", "guide.css", "app/main.js", "app/compare.js", "timeline/main.js")
"""What pages load; each is built into one file with all that it imports."""
BUILT = STATIC / "built"
DIGEST = STATIC / "built.sha256"


def digest() -> str:
    """Return a digest of the sources and of what was built from them."""
    found = hashlib.sha256(repr((ESBUILD, ENTRIES)).encode())
    for folder in ("app", "timeline", "built"):
        for path in sorted((STATIC / folder).rglob("*.*")):
            found.update(f"{path.relative_to(STATIC)}\n".encode() + path.read_bytes())
    for sheet in sorted(STATIC.glob("*.css")):
        found.update(sheet.read_bytes())
    return found.hexdigest()


def main() -> None:
    options = ["--bundle", "--format=esm", "--minify", "--target=es2022", "--log-level=warning"]
    with tempfile.TemporaryDirectory() as made:
        command = ["npx", "--yes", ESBUILD, *ENTRIES, *options, f"--outdir={made}/built"]
        subprocess.run(command, cwd=STATIC, check=True)  # noqa: S603 - nothing in it comes from outside
        shutil.rmtree(BUILT, ignore_errors=True)
        shutil.copytree(f"{made}/built", BUILT)
    DIGEST.write_text(digest() + "\n")


if __name__ == "__main__":
    main()
