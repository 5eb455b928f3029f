"""Which store an address opens, those of other packages included."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from holdfast import store
from holdfast.store import LocalStore, Store, is_directory, open_store


class TapeStore(LocalStore):
    def __init__(self, url: str) -> None:
        if url == "tape://":
            raise ValueError("store 'tape://': give the number of a tape")
        if url == "tape://1":
            raise OSError("no drive")
        super().__init__(Path("/nowhere"))


def not_a_store(url: str) -> str:
    return url


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points as if packages with them were installed."""
    named = {
        "tape": f"{__name__}:TapeStore",
        "odd": f"{__name__}:not_a_store",
        "gone": "no_such_module:Store",
        "s3": f"{__name__}:not_a_store",
    }
    entries = [EntryPoint(name, value, store.GROUP) for name, value in named.items()]
    monkeypatch.setattr(store, "entry_points", lambda group: entries if group == store.GROUP else [])


@pytest.mark.usefixtures("installed")
def test_a_scheme_opens_the_store_of_the_package_that_names_it() -> None:
    opened: Store = open_store("tape://7")
    assert isinstance(opened, TapeStore)
    assert not is_directory("tape://7")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("tape://", r"store 'tape://': give the number of a tape"),
        ("tape://1", r"store 'tape://1': .*:TapeStore cannot open it: OSError: no drive"),
        ("odd://x", r"store 'odd://x': .*:not_a_store returned str, which is not a Store"),
        ("gone://x", r"store 'gone://x': no_such_module:Store cannot open it: ModuleNotFoundError"),
        ("s3:/bucket", r"give a bucket and a prefix"),  # a built-in scheme is not overridden
        ("gs:/bucket", r"give a bucket and a prefix, as in gs://my-bucket/checkpoints"),
        ("az://", r"give a bucket and a prefix, as in az://my-bucket/checkpoints"),
        (
            "ftp://host/prefix",
            r"store 'ftp://host/prefix': no installed package has stores with the scheme ftp://. Give one of: a "
            r"directory, az://, gone://, gs://, odd://, s3://, tape://; or pip install the package that adds ftp://",
        ),
        ("://x", "no installed package has stores with the scheme ://"),
    ],
)
def test_an_address_that_opens_no_store_says_why(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        open_store(url)


def test_paths_are_directories(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        assert isinstance(open_store(path), LocalStore)
        assert open_store(path).url == str(tmp_path)
        assert is_directory(path)
    assert open_store(f"{tmp_path}/a:b").url == f"{tmp_path}/a:b"
