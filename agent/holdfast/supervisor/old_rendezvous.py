"""The rendezvous of ranks that still run: a rank that joins it misses the others when they restart.

Ranks that meet by `env://` share a TCPStore, which the trainer of rank 0 hosts at MASTER_ADDR:MASTER_PORT. When
another rank dies, rank 0 ends at its next collective, and its next start opens a new store. This module uses the
protocol of the store, since an import of torch takes a second and much memory.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Mapping

from holdfast.system.processes import PendingSignals
from holdfast.system.supervisor_channel import SESSIONS_BEGUN
from holdfast.system.supervisor_files import log_line

CONTACT_SECONDS = 2.0
"""How long to wait for a connection, and then for the store's response; without one, the trainer starts."""
_KEY = f"/{SESSIONS_BEGUN}".encode()
_QUERY = struct.pack(f"=BIBQQ{len(_KEY)}s", 0, 0x3C85F7CE, 5, 1, len(_KEY), _KEY)
"""VALIDATE, with a number that identifies the protocol; CHECK, with one key."""
_READY = b"\0"
_KEEP_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 4,
}
"""In seconds, and a number of probes without an answer."""


def await_end(environment: Mapping[str, str], signals: PendingSignals, limit_seconds: float) -> None:
    """Wait until no sessions run in the rendezvous that a start would join, a stop signal, or the limit."""
    found: list[socket.socket | None] = []
    # in a thread, which may stay behind: neither a lookup of a name nor the number of its addresses has a limit
    contact = threading.Thread(target=lambda: found.append(_connect(environment)), daemon=True)
    contact.start()
    contact.join(2 * CONTACT_SECONDS)
    if not found or found[0] is None:
        return
    with found[0] as store:
        place = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        log_line(
            f"rank 0 still runs at {place}: waiting until it ends, at most {limit_seconds:g} s, since a rank that "
            "joins it now misses its next start"
        )
        deadline = time.monotonic() + limit_seconds
        while not signals.stops and (left := deadline - time.monotonic()) > 0:
            signals.sleep(left, store)
            if _has_ended(store):
                return


def _connect(environment: Mapping[str, str]) -> socket.socket | None:
    """Return a connection to the store, if sessions have begun with it; `None` if not, or if that is unknown."""
    if environment.get("RANK", "0") == "0":
        return None  # it hosts the store, or does not meet others by `env://`
    try:
        address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = socket.create_connection(address, CONTACT_SECONDS)
    except (KeyError, ValueError, OverflowError, OSError):
        return None
    try:
        store.sendall(_QUERY)
        if store.recv(1) == _READY:
            for option, value in _KEEP_ALIVE.items():  # a host that lost its power says nothing
                store.setsockopt(*option, value)
            store.setblocking(False)
            return store
    except OSError:
        pass
    store.close()
    return None


def _has_ended(store: socket.socket) -> bool:
    try:
        return not store.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
