"""Make the scripts and styles that pages load from their sources, with esbuild; it needs Node.js and npm.

The output is part of the repository, so that neither users nor the tests need these. A test compares the sources
with those that it was made from.

    python -m tools.bundle
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile

from holdfast_web.shared.assets import STATIC

ESBUILD = "esbuild@0.28.2"
ENTRIES = ("app.css", "app/main.js", "app/compare.js", "timeline/main.js")
"""What pages name; what is imported by several is a file of its own."""
BUILT = STATIC / "built"
MADE_FROM = BUILT / "sources.sha256"


def sources_digest() -> str:
    """Return a digest of what the output depends on."""
    digest = hashlib.sha256(repr((ESBUILD, ENTRIES)).encode())
    for path in [STATIC / "app.css", *sorted(STATIC.glob("app/*.js")), *sorted(STATIC.glob("timeline/*.js"))]:
        digest.update(f"{path.relative_to(STATIC)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    options = ["--bundle", "--splitting", "--format=esm", "--minify", "--target=es2022", "--log-level=warning"]
    with tempfile.TemporaryDirectory() as made:
        command = ["npx", "--yes", ESBUILD, *ENTRIES, *options, f"--outdir={made}"]
        subprocess.run(command, cwd=STATIC, check=True)  # noqa: S603 - nothing in it comes from outside
        shutil.rmtree(BUILT, ignore_errors=True)
        shutil.copytree(made, BUILT)
    MADE_FROM.write_text(sources_digest() + "\n")


if __name__ == "__main__":
    main()
