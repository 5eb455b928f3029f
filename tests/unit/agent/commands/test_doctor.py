"""`holdfast doctor` in one process."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.commands.doctor import connection_checks, host_checks
from holdfast.store import LocalStore
from holdfast.system.files import Files
from tests.support.fake_server import FakeServer, Holdfast

Examine = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def examine(holdfast: Holdfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Returns the exit code and the findings by check."""
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "disk").mkdir()

    def run(*options: object, server: str | None = None) -> tuple[int, dict[str, Any]]:
        if server is None:
            monkeypatch.delenv("HOLDFAST_SERVER")
        else:
            monkeypatch.setenv("HOLDFAST_SERVER", server)
        where = (tmp_path / "store", "--disk", tmp_path / "disk", "--size", "1MB")
        result = holdfast("doctor", *where, "--json", *options)
        return result.exit_code, {each["check"]: each for each in json.loads(result.stdout)}

    return run


def test_a_sound_machine_has_no_problem_and_nothing_is_left(examine: Examine, tmp_path: Path) -> None:
    code, findings = examine()
    assert code == 0
    assert {name for name, each in findings.items() if each["state"] == "ok"} >= {
        "versions", "fork", "memory", "store write", "store read", "store links", "store locks", "store fencing",
        "local disk write", "local disk read",
    }  # fmt: skip
    assert findings["server"]["state"] == "skipped"
    assert findings["store write"]["bytes_per_second"] > 0
    assert os.listdir(tmp_path) == ["disk"]
    assert os.listdir(tmp_path / "disk") == []


def test_the_table_names_what_to_change(
    holdfast: Holdfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "available_bytes", lambda: 10**9)
    result = holdfast("doctor", tmp_path, "--size", "1MB", "--state", "2GB")
    assert result.exit_code == 1
    assert "memory: problem: 1 GB available for 1 rank, a snapshot takes 2 GB" in result.stdout
    assert "  change: use hosts or containers with more memory" in result.stdout


def test_a_store_without_hard_links_is_a_warning(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Files.link

    def refuse_payload(files: Files, source: Path, target: Path) -> None:
        if source.suffix == ".safetensors":
            raise OSError(errno.EPERM, "Operation not permitted")
        link(files, source, target)

    monkeypatch.setattr(Files, "link", refuse_payload)
    code, findings = examine()
    assert (code, findings["store links"]["state"]) == (0, "warning")
    assert findings["store links"]["measured"] == "no hard links: Operation not permitted"


def test_locks_that_others_do_not_see_are_a_problem(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    code, findings = examine()
    assert code == 1
    assert findings["store locks"]["state"] == "problem"
    assert "mount the file system with locks" in findings["store locks"]["remedy"]


def test_a_store_that_refuses_no_replaced_attempt_is_a_problem(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "require_newest", lambda *_: None)
    code, findings = examine()
    assert (code, findings["store fencing"]["state"]) == (1, "problem")


def test_a_store_that_cannot_be_written_is_named_once(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    code, findings = examine()
    assert code == 1
    assert "Not a directory" in findings["store write"]["measured"]
    assert "store read" not in findings
    assert (tmp_path / "store").read_text() == "a file"


def test_a_fork_that_the_system_refuses_is_a_problem(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    code, findings = examine()
    assert code == 1
    assert "raise the limit of processes" in findings["fork"]["remedy"]


def test_the_server_answers_or_the_key_is_refused(examine: Examine, server: FakeServer) -> None:
    code, findings = examine(server=server.url)
    assert (code, findings["server"]["state"]) == (0, "ok")
    server.token = "another"
    code, findings = examine(server=server.url)
    assert code == 1
    assert "HOLDFAST_TOKEN" in findings["server"]["remedy"]


def test_an_absent_server_is_a_problem(examine: Examine) -> None:
    code, findings = examine(server="http://127.0.0.1:9")
    assert (code, findings["server"]["state"]) == (1, "problem")


def test_a_clock_that_differs_from_the_server_is_a_warning(
    examine: Examine, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, findings = examine(server=server.url)
    assert findings["server clock"]["state"] == "ok"
    parse = connection_checks.parsedate_to_datetime
    monkeypatch.setattr(connection_checks, "parsedate_to_datetime", lambda date: parse(date) - timedelta(hours=1))
    code, findings = examine(server=server.url)
    assert (code, findings["server clock"]["state"]) == (0, "warning")
    assert findings["server clock"]["measured"] == "1 h ahead of that of the server"


@pytest.mark.parametrize("options", [("--size", "none"), ("--state", "-1"), ("--server", "example")])
def test_wrong_usage_is_explained(holdfast: Holdfast, tmp_path: Path, options: tuple[str, str]) -> None:
    result = holdfast("doctor", tmp_path, *options)
    assert result.exit_code == 2
    assert options[1] in result.stderr
