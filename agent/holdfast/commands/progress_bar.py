"""A progress bar on standard error, where a person watches; nothing where none does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give it bytes done and bytes in all, as often as you like."""
    if not sys.stderr.isatty():
        yield lambda done_bytes, total_bytes: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done_bytes, total_bytes: shown.update(task, completed=done_bytes, total=total_bytes)
