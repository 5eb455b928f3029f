"""The package as a script meets it first: `import holdfast`."""

import subprocess
import sys
import tomllib
from pathlib import Path

import holdfast

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_the_version_is_that_of_pyproject():
    assert holdfast.__version__ == tomllib.loads(PYPROJECT.read_text())["project"]["version"]
    assert "__version__" in dir(holdfast)


def test_an_import_loads_nothing_that_is_not_used():
    ended = run("import sys; import holdfast; print('torch' in sys.modules, 'importlib.metadata' in sys.modules)")
    assert ended.stdout.split() == ["False", "False"]


def test_without_torch_it_is_said_what_to_install():
    ended = run("import sys; sys.modules['torch'] = None; import holdfast; holdfast.Session")
    advice = "pip install torch, or install Holdfast with its extra `torch`"
    assert f"ImportError: holdfast.Session needs torch: {advice}" in ended.stderr
    assert "ModuleNotFoundError" not in ended.stderr


def test_errors_do_not_name_a_distribution_that_an_index_may_not_have():
    sources = [
        path
        for part in ("agent", "server", "web", "migrations")
        for path in PYPROJECT.parent.glob(f"{part}/**/*.py")
    ]
    assert sources
    assert [path.name for path in sources if "pip install 'holdfast" in path.read_text()] == []
