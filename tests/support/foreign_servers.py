"""Servers that are not Holdfast servers."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SILENT, SSH, WEB = b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\n<html>"
PAGE = (
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 66\r\n\r\n"
    b'{"error":"not_found","message":"page not found: /jobs/gpt/api/v1"}'
)
"""Response of a Holdfast server below the address of one of its pages."""


@contextmanager
def other_server(answer: bytes) -> Iterator[str]:
    """The address of one that reads a request, sends `answer`, and closes the connection."""

    class FixedResponseHandler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), FixedResponseHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
