"""`holdfast doctor`: examine the hosts, the store and the server of a job before it starts."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.client import validate_server
from holdfast.commands.console import EXIT_REFUSED, fail, parsed, print_json
from holdfast.commands.options import Json, Token
from holdfast.config import DEFAULT_STORE
from holdfast.errors import HoldfastError
from holdfast.units import parse_bytes

if TYPE_CHECKING:
    from holdfast.distributed.ranks import Ranks

MEET_SECONDS = 60.0
"""How long ranks wait for each other at the start."""
_STORE = "The store, as given to holdfast.Session."
_SIZE = "How much each rank writes and reads: 256MB."
_STATE = "Size of a checkpoint of all ranks together, to compare with the memory: 6.5GB."
_DISK = "A directory on the local disk of each host."


def doctor(
    store: Annotated[
        str, typer.Argument(envvar="HOLDFAST_STORE", metavar="[STORE]", help=_STORE, show_default=DEFAULT_STORE)
    ] = DEFAULT_STORE,
    state: Annotated[str | None, typer.Option(metavar="SIZE", help=_STATE)] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help=_SIZE)] = "256MB",
    disk: Annotated[
        str | None, typer.Option(metavar="PATH", help=_DISK, show_default="the temporary directory")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="HOLDFAST_SERVER", help="The server that the job reports to."),
    ] = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Examine the hosts, the store and the server of a job before it starts.

    Under torchrun, all ranks take part: they write to the store at the same time, as for a checkpoint, and the
    ranks of each host exchange bytes with those of the next one. Everything written is removed afterwards. A
    warning means lower speed or safety; a problem means that checkpoints fail. The exit code is 0 without
    problems, 1 with a problem, and 2 for wrong usage.

    Examples: holdfast doctor checkpoints  ·  holdfast doctor s3://bucket/run --state 6.5GB  ·
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host:29500 -m holdfast doctor /shared/checkpoints
    """
    state_bytes = None if state is None else parsed(lambda text: parse_bytes(text, "--state"), state)
    size_bytes = round(parsed(lambda text: parse_bytes(text, "--size"), size))
    if server is not None:
        server = parsed(validate_server, server)
    from holdfast.commands.doctor.examination import examine
    from holdfast.commands.doctor.findings import Hosts
    from holdfast.commands.doctor.report import print_report, worst
    from holdfast.distributed.ranks import RanksLost

    with _joined_ranks() as ranks:
        try:
            findings = examine(
                Hosts.gathered(ranks),
                store=store,
                disk=disk or tempfile.gettempdir(),
                size_bytes=size_bytes,
                state_bytes=state_bytes,
                server=server,
                token=token,
            )
        except RanksLost as error:
            fail(str(error))
        if ranks.leads and json:
            print_json(findings)
        elif ranks.leads:
            print_report(findings, ranks.world_size)
    if worst(findings) == "problem":
        raise typer.Exit(EXIT_REFUSED)


@contextlib.contextmanager
def _joined_ranks() -> Iterator[Ranks]:
    """Join the ranks that a launcher started with this process, if there is one."""
    import torch.distributed as dist

    from holdfast.distributed.ranks import Ranks
    from holdfast.distributed.side_group import SideGroup

    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=MEET_SECONDS))
        ranks = SideGroup()
    except (RuntimeError, ValueError, HoldfastError) as error:
        fail(
            f"the ranks did not meet within {MEET_SECONDS:.0f} s: {error}. Check that each host reaches the "
            "rendezvous address and the other hosts; set GLOO_SOCKET_IFNAME to the network interface"
        )
    try:
        yield ranks
    finally:
        ranks.close()
        dist.destroy_process_group()
