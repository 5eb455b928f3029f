"""Messages between ranks on different hosts over TCP. Does not import torch.

Plain sockets, not a gloo group: the loss of a peer must end one transfer, after a limited time. In gloo it may
block a thread for ever, and ends all communication of the group. A rank that reads a snapshot at a start also
needs to ask one peer after the other, which a collective cannot do.

A connection begins with the token of the receiver, which all ranks of the attempt know, and carries one request.
The token keeps out processes of other jobs and of earlier attempts. It does not authenticate: it is sent in the
clear.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import struct
from typing import TypeVar

import msgspec
import psutil

from holdfast.errors import HoldfastError

IDLE_SECONDS = 20.0
"""Limit of a transfer without progress."""
LEAST_BYTES_PER_SECOND = 100e6
"""Rate at which a receiver at least provides memory and verifies bytes, for which the sender waits longer."""
CONNECT_SECONDS = 5.0
MOST_MESSAGE_BYTES = 1 << 30
"""Limit of a message. The largest is a completion marker, with the state of a rank without its tensors."""
CHUNK_BYTES = 4 << 20
TOKEN_BYTES = 16
_LENGTH = struct.Struct("<q")

M = TypeVar("M")


class PeerRefused(HoldfastError):
    """Another rank does not do what it was asked for."""


class StoreReplica(msgspec.Struct, frozen=True, kw_only=True, tag="store"):
    """Hold a snapshot, whose bytes follow once the receiver agrees."""

    marker: bytes
    """Content of the completion marker."""
    size_bytes: int


class ReadMarker(msgspec.Struct, frozen=True, kw_only=True, tag="marker"):
    """Return the content of the completion marker of a slot."""

    number: int


class ReadBytes(msgspec.Struct, frozen=True, kw_only=True, tag="bytes"):
    """Return ranges of the memory of a slot."""

    number: int
    ranges: list[tuple[int, int]]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    reason: str | None = None
    """Why the request is refused; None if it is not."""
    data: bytes = b""


class PeerConnection:
    """A connection to another rank. Every method raises OSError when the rank is lost or too slow."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(IDLE_SECONDS)

    @classmethod
    def open(cls, address: str, port: int, token: bytes) -> PeerConnection:
        connection = cls(socket.create_connection((address, port), timeout=CONNECT_SECONDS))
        connection.send_bytes(memoryview(token))
        return connection

    def accepts(self, token: bytes) -> bool:
        """Return whether the other side knows the token of this one."""
        received = bytearray(TOKEN_BYTES)
        self.receive_into(memoryview(received))
        return hmac.compare_digest(received, token)

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, kind: type[M] | object) -> M:
        """Receive a message. PeerRefused: it is no such message."""
        length = bytearray(_LENGTH.size)
        self.receive_into(memoryview(length))
        (size_bytes,) = _LENGTH.unpack(length)
        if not 0 <= size_bytes <= MOST_MESSAGE_BYTES:
            raise PeerRefused(f"a message of {size_bytes} bytes")
        data = bytearray(size_bytes)
        self.receive_into(memoryview(data))
        try:
            message: M = msgspec.msgpack.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise PeerRefused(f"an unknown message: {error}") from error
        return message

    def receive_reply(self, size_bytes: int = 0) -> Reply:
        """Receive the answer to a request about `size_bytes`. PeerRefused: it is refused, with the reason."""
        self._socket.settimeout(IDLE_SECONDS + size_bytes / LEAST_BYTES_PER_SECOND)
        reply: Reply = self.receive(Reply)
        self._socket.settimeout(IDLE_SECONDS)
        if reply.reason is not None:
            raise PeerRefused(reply.reason)
        return reply

    def send_bytes(self, data: memoryview) -> None:
        self._socket.sendall(data)

    def receive_into(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            received = self._socket.recv_into(target[done : done + CHUNK_BYTES])
            if not received:
                raise ConnectionError("the connection was closed")
            done += received

    def close(self) -> None:
        self._socket.close()


def listen() -> socket.socket:
    """Listen on a free port of the network that connects the ranks. OSError if that is not possible."""
    address = own_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=64)


def own_address() -> str:
    """Return this host's address in the network that connects the ranks."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        for address in psutil.net_if_addrs().get(name.partition(",")[0], []):
            if address.family == socket.AF_INET:
                return str(address.address)
    rank_0 = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, target = socket.getaddrinfo(rank_0, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        found = str(probe.getsockname()[0])
    if not ipaddress.ip_address(found).is_loopback:
        return found
    # the name of rank 0's host may be a loopback address on that host
    here = [each.address for addresses in psutil.net_if_addrs().values() for each in addresses
            if each.family == socket.AF_INET]  # fmt: skip
    return next((address for address in here if not ipaddress.ip_address(address).is_loopback), found)
