"""The house as a whole: who may import whom, what a wheel holds, and what `make` offers."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from tests.support.wheels import clean_environment, run
from tests.support.wheels import installed as installed

ROOT = Path(__file__).resolve().parents[2]

BLOCK = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}, by order of this test", name=name)

sys.meta_path.insert(0, Blocked())
"""


def import_without(blocked: set[str], modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a fresh interpreter to which `blocked` packages are not installed."""
    program = BLOCK.format(blocked=blocked) + "".join(f"import {module}\n" for module in modules)
    program += f"print(sorted({blocked!r} & sys.modules.keys()))\n"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


WEB_STACK = {"fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "jinja2"}
OURS_OF_THE_SERVER = {"holdfast_server", "holdfast_web", "holdfast_migrations"}


def test_the_agent_imports_without_the_web_stack() -> None:
    modules = ["holdfast", "holdfast.session", "holdfast.data.loader", "holdfast.server_link", "holdfast.cli"]
    ended = import_without(WEB_STACK | OURS_OF_THE_SERVER, modules)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


def test_the_server_imports_without_torch_and_without_the_drivers_of_postgresql() -> None:
    modules = ["holdfast_server", "holdfast_server.app", "holdfast_server.serve", "holdfast_web"]
    ended = import_without({"torch", "safetensors", "psycopg"}, modules)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


def test_import_holdfast_is_light() -> None:
    ended = import_without(
        {"torch", "numpy", "urllib3", "typer"}, ["holdfast", "holdfast.protocol.wire", "holdfast.pacing"]
    )
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


def test_a_block_of_these_proofs_does_block() -> None:
    ended = import_without({"torch"}, ["holdfast.session"])
    assert ended.returncode == 1
    assert "No module named 'torch', by order of this test" in ended.stderr


# ---------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def served(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server started from that wheel, by the command that the wheel brings."""
    folder = tmp_path_factory.mktemp("served")
    command = [installed.with_name("holdfast"), "serve", "--port", "0", "--db", folder / "holdfast.db"]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_environment()
    )
    assert process.stdout is not None
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield found[0]
                break
        else:
            pytest.fail(f"the server ended: {''.join(said)}")
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.processes
def test_the_packages_come_from_the_wheel(installed: Path) -> None:
    packages = ["holdfast", "holdfast_server", "holdfast_web", "holdfast_migrations", "holdfast_series"]
    program = f"import importlib\nfor name in {packages}: print(importlib.import_module(name).__file__)"
    for file in run(installed, "-c", program, cwd=installed.parent).split():
        assert Path(file).is_relative_to(installed.parent.parent)


@pytest.mark.processes
def test_a_server_from_the_wheel_migrates_and_serves_pages_and_files(served: str) -> None:
    http = urllib3.PoolManager()
    assert http.request("GET", f"{served}/readyz").status == 200
    page = http.request("GET", f"{served}/").data.decode()
    assert "<html" in page
    static = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
    assert static, "the page refers to no static file"
    for path in static:
        assert http.request("GET", served + path).status == 200, path
    assert http.request("GET", f"{served}/api/v1/jobs").status == 200
    guide = http.request("GET", f"{served}/guide/install/")
    assert (guide.status, "Install" in guide.data.decode()) == (200, True)


# ---------------------------------------------------------------- the files around the code


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    public = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    assert {"help", "setup", "demo", "test", "lint", "bench-checkpoint"} <= public
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    told = run("make", "-C", ROOT, "--no-print-directory", "help", env=environment)
    assert set(re.findall(r"^  make ([a-z-]+) +\S", told, re.MULTILINE)) == public


def test_ci_runs_what_peoplerun() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert "make test" in script.read_text()


@pytest.mark.parametrize(("program", "told"), [("chromium", "no Chromium here"), ("strace", "no strace here")])
def test_a_program_that_is_neither_here_nor_to_be_had_is_named(program: str, told: str, tmp_path: Path) -> None:
    for name in ("bash", "id"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command = ["bash", str(ROOT / "tools/prerequisites"), program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": str(tmp_path)})
    assert told in ended.stderr


def test_compose_starts_what_the_dockerfile_builds() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", dockerfile, re.MULTILINE))
    built = {name: service for name, service in compose["services"].items() if "build" in service}
    assert {service["build"]["target"] for service in built.values()} == stages - {"source"}
    for name, service in built.items():
        assert set(service.get("depends_on", {})) <= compose["services"].keys(), name
        assert "HOLDFAST_TOKEN" in service["environment"], "the server refuses to be reachable without one"


def test_the_dockerfile_copies_and_runs_what_is_there() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = [path for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE) for path in line.split()]
    assert copied
    assert [path for path in copied if not (ROOT / path).exists()] == []
    for script in re.findall(r'"python", "([^"]+)"', dockerfile):
        assert (ROOT / script).exists(), script
    assert re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert "grep '^torch==' constraints.txt" in dockerfile


def test_every_test_that_the_threat_model_names_exists() -> None:
    text = (ROOT / "docs/threat-model.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 40
    missing = [f"{file}::{test}" for file, test in named if test not in _tests_in(ROOT / "tests" / file)]
    assert missing == []
    claims = [line for line in text.splitlines() if line.startswith("| ") and "| test |" not in line]
    assert [claim for claim in claims if "::" not in claim] == [], "claims without a test"


def _tests_in(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


PIN_FILES = (
    "constraints.txt",
    "tests/frameworks/requirements.txt",
    "tests/frameworks/requirements-no-deps.txt",
    "tests/torchtitan/requirements-no-deps.txt",
)


def test_every_dependency_is_pinned() -> None:
    pins = "".join((ROOT / file).read_text() for file in PIN_FILES)
    pinned = {_normal(name) for name in re.findall(r"^([A-Za-z0-9_.-]+)(?:\[\w+\])?==", pins, re.MULTILINE)}
    groups = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"].values())
    for project in (_project("agent/holdfast"), _project("series/holdfast_series")):
        groups += [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [name for group in groups for name in group]
    missing = [name for name in wanted if _name(name) not in pinned | {"holdfast"}]
    assert missing == []


PACKAGES = {
    "agent/holdfast": ["torch", "s3", "accelerate", "transformers"],
    "series/holdfast_series": ["codecs"],
    "server/holdfast_server": ["server", "postgres", "oidc", "parquet"],
    "web/holdfast_web": ["server"],
    "migrations/holdfast_migrations": ["server"],
}
"""Our packages, with the extras that each may count on."""
NOT_INSTALLED = {name: name for name in ("accelerate", "transformers")}
"""Distributions of modules that only the environment of the frameworks has."""
LATER = {"compression"}
"""Of the standard library since a Python that this need not be."""


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_declared(package: str) -> None:
    project = _project(package)
    extras = [project["optional-dependencies"][extra] for extra in PACKAGES[package]]
    declared = {_name(wanted) for group in [project["dependencies"], *extras] for wanted in group}
    # starlette is as much fastapi's interface as its own
    installed = declared - {_normal(name) for name in NOT_INSTALLED.values()}
    declared |= {"torch"} if package.startswith("series") else set()  # left to the environment
    declared |= {_name(r) for name in installed for r in requires(name) or [] if "extra ==" not in r}
    ours = {Path(name).name for name in PACKAGES}
    homes = _distributions() | {module: [home] for module, home in NOT_INSTALLED.items()}
    undeclared = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in (ROOT / package).rglob("*.py")
        # frameworks and pytest are imported where they are installed
        if file.parent.name not in ("integrations", "testing")
        for module in _imported(ast.parse(file.read_text()))
        if module not in sys.stdlib_module_names | ours | LATER
        and not declared & {_normal(home) for home in homes.get(module, [])}
    ]
    assert undeclared == []


def _project(package: str) -> dict[str, Any]:
    """The declaration of the distribution that a package belongs to."""
    own = ROOT / Path(package).parent / "pyproject.toml"
    project = tomllib.loads((own if own.exists() else ROOT / "pyproject.toml").read_text())["project"]
    assert isinstance(project, dict)
    return project


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


def _pages() -> list[Path]:
    return [page for folder in ("docs", "docs/internals") for page in (ROOT / folder).glob("*.md")]


def test_links_in_the_documents_lead_somewhere() -> None:
    dead = []
    for document in [*ROOT.glob("*.md"), *_pages()]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)[^)]*\)", document.read_text()):
            if not (document.parent / target).exists():
                dead.append(f"{document.name}: {target}")
    assert dead == []


def test_documents_name_no_distribution_that_an_index_may_not_have() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.*")]
    distribution = re.compile(r"install ['\"]?holdfast\b|holdfast\[\w")
    assert [file.name for file in documents if distribution.search(file.read_text())] == []


def test_every_page_of_the_guide_is_in_its_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in _pages()} - {"index"}
    listed = "\n".join(re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL)).splitlines()
    assert sorted(line for line in listed if line and not line.startswith(":")) == sorted(pages)
    assert set(re.findall(r"^- \[[^]]+\]\((\S+)\.md\)", index, re.MULTILINE)) == pages


def test_the_readme_begins_with_the_commands_that_set_everything_up() -> None:
    first = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert [line.partition("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def test_the_readme_shows_the_ten_lines_thatrun() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for block in blocks:
        compile(textwrap.dedent(block), "README.md", "exec")
    assert "session.batches(" in blocks[0]


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _name(requirement: str) -> str:
    return _normal(re.split(r"[<>=\[;~! ]", requirement)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


PRODUCTION = (
    "agent/holdfast", "series/holdfast_series", "server/holdfast_server", "web/holdfast_web",
    "migrations/holdfast_migrations",
)  # fmt: skip
MOST_LINES = {"module": 450, "function": 60}
MOST_LINES_OF_ONE_SUBJECT = 600
"""Limit for a module whose docstring says why it is not two: `One module, since …`."""


@pytest.mark.parametrize("package", PRODUCTION)
def test_modules_and_functions_are_short_enough_to_read(package: str) -> None:
    long = []
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(text := path.read_text())
        is_one_subject = "One module, since" in (ast.get_docstring(tree) or "")
        extra = MOST_LINES_OF_ONE_SUBJECT - MOST_LINES["module"] if is_one_subject else 0
        sizes = [("module", path.name, text.count("\n") - extra)]
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = node.body[0] if ast.get_docstring(node) is not None else None
                counted = _lines(node) - (_lines(docstring) if docstring is not None else 0)
                sizes.append(("function", node.name, counted))
        long += [f"{path}: {name}, {lines}" for kind, name, lines in sizes if lines > MOST_LINES[kind]]
    assert long == []


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
