"""Unit tests of the pure JavaScript modules, run by `node --test` where node is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = sorted((Path(__file__).parent / "javascript").glob("*.test.mjs"))
OLDEST_NODE = (20, 19)
"""The first version that detects the module syntax of .js files."""


@pytest.fixture(scope="module")
def node() -> str:
    path = shutil.which("node")
    if path is None:
        pytest.skip("node is not installed; the browser tests cover the scripts")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_NODE:
        pytest.skip(f"node {version.strip()} is older than {OLDEST_NODE}")
    return path


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name.removesuffix(".test.mjs"))
def test_javascript_module(node: str, path: Path) -> None:
    done = subprocess.run([node, "--test", str(path)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
    assert re.search(r"# pass [1-9]", done.stdout), done.stdout
