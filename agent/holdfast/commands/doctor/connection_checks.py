"""Checks of what connects the hosts of a job: the network between them, their clocks, and the server."""

from __future__ import annotations

import os
import threading
import time
from email.utils import parsedate_to_datetime

import urllib3

from holdfast.commands.doctor.findings import Finding, Hosts
from holdfast.distributed.side_group import SideGroup
from holdfast.server_link.http_client import AgentClient, InvalidToken, RequestFailed
from holdfast.units import duration, format_bytes

EXCHANGED_BYTES = 64 << 20
EXCHANGE_TAG = 1
CLOCK_SECONDS = 2.0
"""Difference of clocks that is reported. The server sends whole seconds."""
SERVER_SECONDS = 5.0


def clocks(hosts: Hosts) -> Finding | None:
    """Compare the clocks of the hosts."""
    hosts.ranks.gather(b"")  # so that all read their clocks at the same time
    every = [float(each) for each in hosts.ranks.gather(repr(time.time()).encode())]
    if len(hosts.names) == 1 or not hosts.leads_host:
        return None
    return _clock("clock", every[hosts.ranks.rank] - every[0], f"that of {hosts.by_rank[0]}")


def _clock(check: str, ahead_seconds: float, other: str) -> Finding:
    if abs(ahead_seconds) < CLOCK_SECONDS:
        return Finding(check=check, measured=f"agrees with {other}")
    direction = "ahead of" if ahead_seconds > 0 else "behind"
    return Finding(
        check=check,
        state="warning",
        measured=f"{duration(abs(ahead_seconds))} {direction} {other}",
        remedy="synchronize the clocks (NTP): times on the page and restores that expire depend on them",
    )


def pairing(hosts: Hosts) -> Finding | None:
    """Pair each rank with one on the next host, and exchange bytes between all pairs at the same time."""
    ranks, names = hosts.ranks, hosts.names
    if not isinstance(ranks, SideGroup):
        return None
    counts = {name: len(hosts.ranks_on(name)) for name in names}
    if len(names) == 1:
        return Finding(check="hosts", measured=f"{ranks.world_size} ranks on 1 host") if ranks.leads else None
    data, received = os.urandom(1 << 20) * (EXCHANGED_BYTES >> 20), list[bytes]()
    partners = [partner(hosts, rank) for rank in range(ranks.world_size)]
    sources = [rank for rank, other in enumerate(partners) if other == ranks.rank]
    started = time.perf_counter()
    receiving = threading.Thread(target=lambda: received.extend(ranks.receive(sources, EXCHANGE_TAG)))
    receiving.start()
    ranks.send([partners[ranks.rank]], EXCHANGE_TAG, data)
    receiving.join()
    speed = EXCHANGED_BYTES / (time.perf_counter() - started)
    found = Finding(check="hosts", measured=f"{format_bytes(round(speed))}/s", bytes_per_second=speed)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        found.state, found.remedy = "warning", f"start equally many ranks on each host ({listed})"
    return found


def partner(hosts: Hosts, rank: int) -> int:
    """Return the rank on the next host that a rank is paired with."""
    names = hosts.names
    host = hosts.by_rank[rank]
    next_host = hosts.ranks_on(names[(names.index(host) + 1) % len(names)])
    return next_host[hosts.ranks_on(host).index(rank) % len(next_host)]


def server(hosts: Hosts, address: str | None, token: str | None) -> Finding | None:
    """Ask the server as an agent does when it starts."""
    if not hosts.leads_host:
        return None
    if address is None:
        return Finding(check="server", state="skipped", measured="none given: set HOLDFAST_SERVER or --server")
    client, started = AgentClient(address, token), time.perf_counter()
    try:
        client.desired("doctor", limit_seconds=SERVER_SECONDS)
    except RequestFailed as error:
        remedy = (
            error.remedy
            if isinstance(error, InvalidToken)
            else "start it, or give an address that this host can reach"
        )
        return Finding(check="server", state="problem", measured=f"{client.server}: {error}", remedy=remedy)
    finally:
        client.close()
    return Finding(check="server", measured=f"answers in {duration(time.perf_counter() - started)}")


def server_clock(hosts: Hosts, address: str | None) -> Finding | None:
    """Compare the clock of this host with that of the server."""
    if not hosts.leads_host or address is None:
        return None
    began = time.time()
    try:
        answer = urllib3.request("GET", f"{address.rstrip('/')}/healthz", timeout=SERVER_SECONDS, retries=False)
    except urllib3.exceptions.HTTPError:  # `server` reports it
        return None
    if (sent := answer.headers.get("Date")) is None:
        return None
    middle = (began + time.time()) / 2
    return _clock("server clock", middle - parsedate_to_datetime(sent).timestamp() - 0.5, "that of the server")
