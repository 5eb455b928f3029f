"""`holdfast store`: inspect, verify, scrub, drill, export, import and clean up a store, without a server."""

from __future__ import annotations

import typer

from holdfast.commands.stores.drilling import drill
from holdfast.commands.stores.export import export, import_
from holdfast.commands.stores.gc import gc
from holdfast.commands.stores.listing import ls, verify
from holdfast.commands.stores.scrubbing import scrub
from holdfast.commands.stores.show import show

app = typer.Typer(
    no_args_is_help=True,
    help="List, verify, scrub, drill, export, import and remove checkpoints, without a server.",
)
for _command in (ls, show, verify, scrub, drill, export, import_, gc):
    app.command(_command.__name__.rstrip("_"))(_command)

__all__ = ["app"]
