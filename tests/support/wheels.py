"""Our wheels, built from a copy of the sources and installed into an environment that has their dependencies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from holdfast_web.guide.pages import BUILT, Guide, Page, Part, Section

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("agent", "server", "web", "migrations", "series", "pyproject.toml", "README.md", "LICENSE")
# what `make docs` builds where it was not run
GUIDE = Guide(
    parts=[Part(title="Start", pages=["install"])],
    pages={
        name: Page(
            title=title, body=f"<p>{title}</p>", contents="", sections=[Section(anchor=name, title=title, text="")]
        )
        for name, title in (("index", "Holdfast"), ("install", "Install"))
    },
    files={},
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a clean environment into which both wheels went, with this one's dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for path in (ROOT / name for name in SOURCES):
        if path.is_dir():
            shutil.copytree(path, sources / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, sources)
    guide = sources / BUILT.relative_to(ROOT)
    if not guide.exists():
        guide.write_bytes(GUIDE.encode())
    for project in (sources, sources / "series"):
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, project)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    wheels = sorted(folder.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *wheels)
    shutil.rmtree(sources)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    # A path entry, unlike a site directory, does not run the .pth file of the editable install found there.
    dependencies = Path(run(python, "-c", purelib).strip()) / "dependencies.pth"
    dependencies.write_text(run(sys.executable, "-c", purelib))
    return python


def run(*command: object, **options: Any) -> str:
    """Return what a command prints; it must succeed."""
    options = {"env": clean_environment(), "stderr": subprocess.PIPE} | options
    words = [str(word) for word in command]
    ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, **options)
    assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
    return str(ended.stdout)


def clean_environment() -> dict[str, str]:
    unwanted = ("HOLDFAST_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
