"""Whatever the server is, training is the same to the bit and the job ends."""

import contextlib
import socket
import threading

import pytest

from holdfast.engine import startup
from tests.support.tiny_job import Trainer


@contextlib.contextmanager
def answering(reply):
    """A server that reads what comes and answers with `reply`; None: never."""
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            while connection.recv(65536) and not over.is_set():
                if reply is not None:
                    connection.sendall(reply)
                    return

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        over.set()
        listening.close()


def response(body, status="200 OK", headers=""):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


ANSWERS = {
    "a dead port": "dead",
    "one that never answers": None,
    "one that hangs up": b"",
    "noise": b"\x00\xff" * 500,
    "a page": response(b"<html>sign in</html>", headers="Content-Type: text/html\r\n"),
    "nothing but braces": response(b"{}", headers="Content-Type: application/json\r\n"),
    "a redirect to itself": response(b"", "302 Found", "Location: /\r\n"),
    "an error": response(b"oops", "500 Internal Server Error"),
    "a refusal": response(b"", "401 Unauthorized"),
    "less than it promised": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nabc",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    trainer = Trainer(tmp_path_factory.mktemp("alone")).run()
    trainer.session.close()
    return trainer.losses


@pytest.mark.parametrize("what", ANSWERS)
def test_training_is_the_same_to_the_bit_beside(what, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "FIRST_CONTACT_SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        if ANSWERS[what] == "dead":
            address = "http://127.0.0.1:9"
        else:
            address = stack.enter_context(answering(ANSWERS[what]))
        trainer = Trainer(tmp_path, server=address).run()
        trainer.session.close()
    assert trainer.losses == alone
    assert list((tmp_path / "job" / "spool").iterdir())  # nothing was lost, either
