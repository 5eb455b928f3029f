"""What the process that saves a snapshot from memory does where it cannot."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.supervisor import crash_commit
from holdfast.system.supervisor_channel import PublishedAttempt


def test_a_store_that_has_become_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crash_commit, "become_background_process", lambda: None)
    store = tmp_path / "store"
    store.write_text("")
    attempt = PublishedAttempt(job="job", uid="a", attempt=1, lineage=1, store=str(store), server=None)
    crash_commit.main(str(tmp_path), msgspec.json.encode(attempt).decode(), "killed by SIGKILL", "")
    assert f"the snapshot in memory was not saved: store {store} is a file" in capsys.readouterr().err
