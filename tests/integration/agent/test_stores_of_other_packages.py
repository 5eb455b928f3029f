"""The store of examples/sqlite_store, installed as a package that another person wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "sqlite_store"
TRAINER = """
import sys, torch, holdfast

model = torch.nn.Linear(3, 3)
with holdfast.Session("job", store=sys.argv[1], model=model, every=1) as session:
    print(session.resume(), model.weight.sum().item())
    for _ in range(3):
        torch.nn.init.normal_(model.weight)
        session.step(loss=1.0)
        session.wait(60)
    print(session.iteration, model.weight.sum().item())
"""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a module of Python where the package is installed; returns what it prints."""
    site = tmp_path_factory.mktemp("site")
    # no file of a build in the source tree
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", site]
    subprocess.run([sys.executable, *pip, EXAMPLE], check=True)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*arguments: object) -> str:
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/store.db"


def test_it_passes_the_contract(run: Run, tmp_path: Path) -> None:
    out = run("-m", "pytest", EXAMPLE, "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path, "-n", "0")
    assert "passed" in out
    assert "skipped" not in out


def test_a_session_trains_and_resumes_from_it(run: Run, url: str) -> None:
    first = run("-c", TRAINER, url).splitlines()
    second = run("-c", TRAINER, url).splitlines()
    assert first[0].startswith("0 ")
    assert second[0] == first[1], "the second start continues with the weights that the first one saved"
    assert second[1].startswith("6 ")


def test_the_store_commands_read_and_tidy_it(run: Run, url: str, tmp_path: Path) -> None:
    run("-c", TRAINER, url)

    def store(command: str, *arguments: object) -> str:
        return run("-m", "holdfast.cli", "store", command, url, *arguments)

    assert "000000000003-1" in store("ls")
    assert "5 tensors" in store("show", "job", "latest")
    for command in ("verify", "scrub", "gc"):
        store(command)
    store("export", "job", "latest", tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    assert "job2 begins at iteration 3" in run(
        "-m", "holdfast.cli", "fork", "job", "latest", "job2", "--store", url
    )
