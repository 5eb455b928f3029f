"""The command `holdfast stores`: which jobs write to a store and how much, and limits for it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client
from holdfast.commands.account import free_space
from holdfast.commands.console import (
    asking,
    fail,
    parsed,
    print_json,
    print_or_json,
    print_table,
    say,
    with_client,
)
from holdfast.commands.options import DEFAULT_SERVER, Json, Server, Token
from holdfast.protocol.stores import MAX_WRITERS, NewStoreLimit, StoreSummary, StoreWriter
from holdfast.units import duration, format_bytes, parse_positive_seconds, parse_rate

OFF = "off"
"""Word that removes a limit."""

Place = Annotated[str, typer.Argument(metavar="STORE", help="Address or id of a store, as in `holdfast stores`.")]

app = typer.Typer(
    help="Show which jobs write to the stores and how much, and limit it.", invoke_without_command=True
)


@app.callback(invoke_without_command=True)
def stores(
    context: typer.Context,
    search: Annotated[str, typer.Option(metavar="TEXT", help="Only stores with this in their address.")] = "",
    sort: Annotated[str, typer.Option(metavar="ORDER", help="load: the highest rate first; or address.")] = "load",
    page: Annotated[int, typer.Option(min=1, metavar="N", help="Page of the list, from 1.")] = 1,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    json: Json = False,
) -> None:
    """List the stores that jobs write to. The subcommands show one, and limit what jobs write there.

    Examples: holdfast stores  ·  holdfast stores show s3://bucket/runs  ·  holdfast stores limit s3://b 200MB/s
    """
    if context.invoked_subcommand is not None:
        return
    with asking(server, token) as client:
        found = client.stores.find(search, sort=sort, page=page)
    if json:
        print_json(found)
    elif found.stores:
        heads = ("STORE", "HOST", "JOBS", "RATE", "LIMIT", "WAITING", "WRITTEN", "FREE", "ID")
        print_table(heads, [_store_row(each) for each in found.stores])
        if found.pages > 1:
            say(f"page {found.page} of {found.pages}, {found.total:,} stores in all: --page N shows another")
    else:
        say(f"no store matches {search!r}" if search else "no job has reported a store yet")


@app.command()
@with_client
def show(client: Client, store: Place, json: Json = False) -> None:
    """Show a store, its limit and the jobs that write to it.

    Example: holdfast stores show s3://bucket/runs
    """
    found = client.stores.get(_named(client, store).id)
    if json:
        print_json(found)
        return
    limit = found.limit
    if limit is not None:
        fallback = limit.fallback_bytes_per_second
        without = "its share by weight" if fallback is None else _speed(fallback)
        say(
            f"limit {_speed(limit.bytes_per_second)} for {limit.target}, {limit.writers} writes at once; "
            f"without contact for {duration(limit.holds_seconds)}, each job {without}"
        )
    now = time.time()
    print_table(
        ("JOB", "RATE", "FAIR SHARE", "WEIGHT", "WAITING", "WAITS FOR START", "WRITTEN"),
        [_writer_row(each, now) for each in found.writers],
    )
    if found.hidden_writers:
        say(f"{found.hidden_writers} jobs of other projects write there as well")


@app.command()
@with_client
def limit(
    client: Client,
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="Id of a store, or the address that stores begin with.")
    ],
    rate: Annotated[
        str, typer.Argument(metavar="RATE", help="For all jobs together, as in 200MB/s; off removes the limit.")
    ],
    writers: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_WRITERS, metavar="N", help="Number of checkpoints that may be written at the same time."
        ),
    ] = 4,
    fallback: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Rate of each job without a server. [default: its share by weight]"),
    ] = None,
    holds: Annotated[
        str, typer.Option(metavar="TIME", help="Time without a server after which the fallback applies.")
    ] = "1min",
    json: Json = False,
) -> None:
    """Limit what all jobs together write to a store, or below an address. For administrators only.

    Examples: holdfast stores limit s3://bucket/runs 200MB/s  ·  holdfast stores limit /lustre 1GB/s --writers 8  ·
    holdfast stores limit /lustre off
    """
    if rate == OFF:
        client.stores.remove_limit(store)
        say(f"{store} has no limit")
        return
    parsed(lambda text: parse_rate(text, "RATE"), rate)
    if fallback is not None:
        parsed(lambda text: parse_rate(text, "--fallback"), fallback)
    parsed(lambda text: parse_positive_seconds(text, "--holds"), holds)
    asked = NewStoreLimit(target=store, limit=rate, writers=writers, fallback=fallback, holds=holds)
    done = client.stores.set_limit(asked)
    what = f"{done.target}: {_speed(done.bytes_per_second)} for all jobs, {done.writers} checkpoints at a time"
    print_or_json(done, what, json=json)


@app.command()
@with_client
def weight(
    client: Client,
    store: Place,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")],
    weight_: Annotated[
        float,
        typer.Argument(
            metavar="WEIGHT", min=0.01, max=100, help="A job with 2 gets twice the share of a job with 1."
        ),
    ],
    json: Json = False,
) -> None:
    """Set the weight of a job when jobs share a limit. For administrators only.

    Example: holdfast stores weight s3://bucket/runs char-gpt 2
    """
    done = client.stores.set_weight(_named(client, store).id, job, weight_)
    print_or_json(done, f"{job} has weight {weight_:g} in {done.address}", json=json)


def _named(client: Client, store: str) -> StoreSummary:
    """Return the store with an id or address; fail where several or none have it."""
    found, page, pages = list[StoreSummary](), 0, 1
    while page < pages:
        listed = client.stores.find(store, page=page + 1)
        found += [each for each in listed.stores if store in (each.id, each.address)]
        page, pages = page + 1, listed.pages
    if len(found) > 1:
        fail(f"{len(found)} stores have the address {store}: give the id of one, as in `holdfast stores`")
    if not found:
        fail(f"there is no store {store}: `holdfast stores` lists them")
    return found[0]


def _speed(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"


def _store_row(store: StoreSummary) -> tuple[str, ...]:
    return (
        store.address,
        store.host,
        str(store.active_writers),
        _speed(store.bytes_per_second) if store.bytes_per_second else "-",
        "-" if store.limit is None else _speed(store.limit.bytes_per_second),
        format_bytes(store.waiting_bytes) if store.waiting_bytes else "-",
        format_bytes(store.written_bytes),
        free_space(store.free_bytes, store.total_bytes),
        store.id,
    )


def _writer_row(each: StoreWriter, now: float) -> tuple[str, ...]:
    return (
        each.job,
        _speed(each.bytes_per_second) if each.bytes_per_second else "-",
        "-" if each.share_bytes_per_second is None else _speed(each.share_bytes_per_second),
        f"{each.weight:g}",
        format_bytes(each.waiting_bytes) if each.waiting_bytes else "-",
        "-" if each.waits_since is None else duration(max(0.0, now - each.waits_since)),
        format_bytes(each.written_bytes),
    )
