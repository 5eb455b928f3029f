"""`python -m holdfast_server`."""

from __future__ import annotations

import typer

from holdfast_server.serve import serve

if __name__ == "__main__":
    typer.run(serve)
