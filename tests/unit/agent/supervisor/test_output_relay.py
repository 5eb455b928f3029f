"""The relay of a trainer's output: the tail that it keeps, and how it passes bytes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.protocol.tracebacks import exception_text
from holdfast.protocol.wire import MAX_OUTPUT_CHARACTERS, MAX_OUTPUT_LINES
from holdfast.supervisor.output_relay import OutputTail, plain, publish_end, relay
from holdfast.system import supervisor_files


def tail_of(*chunks: bytes) -> OutputTail:
    tail = OutputTail()
    for chunk in chunks:
        tail.add(3, chunk)
    return tail


def test_the_last_lines_are_kept_with_their_numbers() -> None:
    tail = tail_of(*(b"line %d\n" % number for number in range(2 * MAX_OUTPUT_LINES)))
    first, lines = tail.since(0)
    assert (first, len(lines), lines[0]) == (MAX_OUTPUT_LINES, MAX_OUTPUT_LINES, f"line {MAX_OUTPUT_LINES}")
    last = 2 * MAX_OUTPUT_LINES - 1
    assert tail.since(last) == (last, [f"line {last}"])
    assert tail.since(last + 1) == (last + 1, [])


@pytest.mark.parametrize(
    "chunks",
    [(b"a 1%\ra 2%\ra 3%\n",), (b"a 1%\r", b"a 2%\r", b"a 3%\r\n"), (b"a 1", b"%\ra", b" 3%\r", b"\n")],
)
def test_of_a_progress_bar_the_last_state_is_kept_however_it_arrives(chunks: tuple[bytes, ...]) -> None:
    assert tail_of(*chunks).since(0) == (0, ["a 3%"])


def test_an_endless_line_takes_limited_memory() -> None:
    tail = tail_of(*[b"x" * 65536] * 100)
    tail.end()
    _, (line,) = tail.since(0)
    assert line == "x" * MAX_OUTPUT_CHARACTERS


def test_lines_of_two_streams_do_not_mix() -> None:
    tail = OutputTail()
    tail.add(3, b"out")
    tail.add(4, b"error\n")
    tail.add(3, b"put\n")
    assert tail.since(0) == (0, ["error", "output"])


def test_escape_sequences_control_characters_and_secrets_are_removed() -> None:
    assert plain(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07text\x1b[2K\x07\xff") == "red text\ufffd"
    assert plain(b"\x1b[38;5;196mE\x1b(B\x1b[m  token=abcdef123") == "E  token=<hidden>"


def test_every_byte_is_passed_on_until_the_last_writer_closes() -> None:
    data = os.urandom(1_000_000)
    source, writing = os.pipe()
    reading, target = os.pipe()
    control, ending = os.pipe()
    drained, done = os.pipe()
    received = bytearray()

    def read() -> None:
        while chunk := os.read(reading, 65536):
            received.extend(chunk)

    def write() -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(writing, rest) :]
        os.close(ending)
        os.read(drained, 1)  # the end: all so far was passed on
        os.write(writing, b"after the end of the trainer")
        os.close(writing)

    threads = [threading.Thread(target=work) for work in (read, write)]
    for thread in threads:
        thread.start()
    relay({source: target}, control, done, OutputTail())
    os.close(target)
    for thread in threads:
        thread.join()
    for fd in (source, reading, control, drained):
        os.close(fd)
    assert received == data + b"after the end of the trainer"


def test_a_reader_that_is_gone_does_not_stop_the_trainer() -> None:
    source, writing = os.pipe()
    reading, target = os.pipe()
    control, ending = os.pipe()
    os.close(reading)

    def write() -> None:
        os.write(writing, b"x\n" * 100_000)
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    tail = OutputTail()
    drained, done = os.pipe()
    relay({source: target}, control, done, tail)
    writer.join()
    assert tail.count == 100_000
    for fd in (source, target, control, ending, drained):
        os.close(fd)


def test_an_output_that_ends_with_the_trainer_is_drained_at_once(tmp_path: Path) -> None:
    """The supervisor waits for the end of `drained`, and then knows the exception."""
    source, writing = os.pipe()
    reading, target = os.pipe()
    control, ending = os.pipe()
    drained, done = os.pipe()
    tail = OutputTail()
    os.write(writing, b"Traceback (most recent call last):\n  line\ntorch.OutOfMemoryError: CUDA out of memory\n")
    os.close(writing)
    os.close(ending)
    relay({source: target}, control, done, tail, lambda: publish_end(tmp_path, tail))
    assert os.read(drained, 1) == b""
    end = supervisor_files.take_end(tmp_path)
    assert (end.exception, end.cause) == ("CUDA out of memory", "device_memory")
    assert supervisor_files.take_end(tmp_path) == supervisor_files.EndInOutput()
    for fd in (source, reading, target, control, drained):
        os.close(fd)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("RuntimeError: CUDA out of memory", "CUDA out of memory"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB: no", "CUDA out of memory. Tried 2 GiB: no"),
        ("KeyError: 'loss'", "KeyError: 'loss'"),
        ("json.decoder.JSONDecodeError", "JSONDecodeError"),
        ("[rank0]: torch.distributed.DistBackendError: NCCL error", "NCCL error"),
        ("AssertionError", "AssertionError"),
    ],
)
def test_the_message_of_an_exception_has_its_type_where_it_says_little(line: str, text: str) -> None:
    assert exception_text(line) == text
