"""Creates .env for docker-compose.yml from its example, with new secrets and mode 0600."""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MADE_HERE = ("HOLDFAST_TOKEN", "POSTGRES_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY")


def text() -> str:
    """Return the example with secrets filled in."""
    filled = (ROOT / "compose.env.example").read_text()
    for name in MADE_HERE:
        filled = re.sub(rf"^{name}=$", f"{name}={secrets.token_hex(24)}", filled, flags=re.MULTILINE)
    return filled


def main(path: Path = ROOT / ".env") -> int:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        print(f"{path} already exists and is not changed: the volumes use its secrets", file=sys.stderr)
        return 1
    with open(handle, "w") as file:
        file.write(text())
    print(f"created {path} with new secrets; enter its HOLDFAST_TOKEN when the browser asks for a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
