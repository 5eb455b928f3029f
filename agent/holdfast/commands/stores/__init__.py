"""`holdfast store`: look into a store of checkpoints, take out of it and tidy it, without a server."""

from __future__ import annotations

import typer

from holdfast.commands.console import EXIT_CODES
from holdfast.commands.stores.export import export
from holdfast.commands.stores.listing import ls, verify
from holdfast.commands.stores.show import show
from holdfast.commands.stores.tidying import gc, repair

app = typer.Typer(
    no_args_is_help=True,
    help=f"List, show, verify, export and remove checkpoints in a store; needs no server.\n\n{EXIT_CODES}",
)
for _command in (ls, show, verify, export, gc, repair):
    app.command()(_command)

__all__ = ["app"]
