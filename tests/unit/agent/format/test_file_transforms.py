"""File transforms, ours and those of other packages: what they encode is what is read again, or it is named."""

from __future__ import annotations

import importlib
import zlib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint import restore
from holdfast.codecs import planes
from holdfast.errors import HoldfastError, UnknownFormat
from holdfast.format import file_transforms
from holdfast.format.file_transforms import FileTransform, file_transform
from holdfast.protocol.ids import checkpoint_id
from holdfast.store import open_store
from holdfast.testing import FileTransformContract
from tests.support.session_fixtures import store as store
from tests.support.small_session import DurableJob

OPENING = (1 << 40).to_bytes(8, "little")


class Zip:
    """A transform as another package may have it."""

    suffix = ".zip"

    @staticmethod
    def encode(data: memoryview, width: int) -> bytes | None:
        encoded = OPENING + zlib.compress(data, 1)
        return encoded if len(encoded) < len(data) else None

    @staticmethod
    def decode(encoded: memoryview, out: memoryview) -> None:
        try:
            out[:] = zlib.decompress(encoded[8:])
        except zlib.error as error:
            raise ValueError(str(error)) from error


class Rounding(Zip):
    """Loses the last byte of each block."""

    @staticmethod
    def encode(data: memoryview, width: int) -> bytes | None:
        return Zip.encode(memoryview(bytes(data[:-1]) + b"\0"), width)


class Failing(Zip):
    @staticmethod
    def encode(data: memoryview, width: int) -> bytes | None:
        raise OverflowError("too much for it")


class Unmarked(Zip):
    """A reader of plain files could take its files for such."""

    @staticmethod
    def encode(data: memoryview, width: int) -> bytes | None:
        encoded = Zip.encode(data, width)
        return None if encoded is None else bytes(8) + encoded[8:]


class Plain(Zip):
    suffix = ".safetensors"


class TestPlanes(FileTransformContract):
    @pytest.fixture
    def transform(self) -> FileTransform:
        return planes


class TestZip(FileTransformContract):
    @pytest.fixture
    def transform(self) -> FileTransform:
        return Zip()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the classes of this module installed as transforms, by their names in lower case."""
    kinds = {kind.__name__.lower(): kind for kind in (Zip, Rounding, Failing, Unmarked, Plain)}
    found = [
        EntryPoint(name, f"{__name__}:{kind.__name__}", file_transforms.GROUP) for name, kind in kinds.items()
    ]
    load = EntryPoint.load
    ours = lambda entry: entry.group == file_transforms.GROUP and entry.name in kinds  # noqa: E731
    monkeypatch.setattr(EntryPoint, "load", lambda entry: kinds[entry.name] if ours(entry) else load(entry))
    monkeypatch.setattr(file_transforms, "entry_points", lambda group: found)
    file_transform.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> object:
    yield
    file_transform.cache_clear()


def repetitive() -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(300, 300)
    torch.nn.init.zeros_(model.weight)
    return model, model.parameters()


class Job(DurableJob):
    def __init__(self, store: Path, **options: object) -> None:
        super().__init__(store, repetitive, 300, **options)


def files_of(place: Path, iteration: int) -> dict[str, str | None]:
    manifest = restore.manifest(open_store(place), "job", checkpoint_id(iteration, 1))
    return {file.name: file.encoding.codec if file.encoding else None for file in manifest.files}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("parity", ["off", "4+2", "important 4+2"])
def test_a_job_resumes_exactly_from_what_another_package_encoded(store: Path, tmp_path: Path, parity: str) -> None:
    whole = Job(tmp_path / "whole").run(4).close()
    before = Job(store, compress="zip", parity=parity).run(2).close()
    assert files_of(store, 2) == {"rank-0.zip": "zip"}
    after = Job(store).run(2).close()
    assert before.losses + after.losses == whole.losses


def test_a_start_without_the_package_names_it_and_changes_nothing(
    store: Path, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(store, compress="zip").run(1).close()
    model, trained = repetitive()
    with monkeypatch.context() as patch:
        patch.setattr(file_transforms, "entry_points", lambda group: [])
        file_transform.cache_clear()
        session = holdfast.Session("job", store=store, model=model, optimizer=torch.optim.AdamW(trained))
        with pytest.raises(UnknownFormat, match=r"rank-0\.zip has the unknown encoding 'zip'.*\.transforms"):
            session.resume()
        session.close()
    file_transform.cache_clear()
    assert Job(store).run(1).close().session.iteration == 2


def test_a_start_that_cannot_load_the_package_names_it_and_damages_nothing(
    store: Path, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(store, compress="zip").run(1).close()
    model, trained = repetitive()
    with monkeypatch.context() as patch:
        load = EntryPoint.load
        missing = lambda entry: importlib.import_module("missing_here")  # noqa: E731
        patch.setattr(EntryPoint, "load", lambda entry: (missing if entry.name == "zip" else load)(entry))
        file_transform.cache_clear()
        session = holdfast.Session("job", store=store, model=model, optimizer=torch.optim.AdamW(trained))
        with pytest.raises(UnknownFormat, match=r"zip cannot be loaded: .*missing_here"):
            session.resume()
        session.close()
    file_transform.cache_clear()
    assert Job(store).run(1).close().session.iteration == 2


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["rounding", "failing", "unmarked", "plain"])
def test_a_transform_that_is_not_exact_leaves_the_files_plain(store: Path, name: str) -> None:
    job = Job(store, compress=name).run(1).close()
    assert files_of(store, 1) == {"rank-0.safetensors": None}
    assert len(job.losses) == 1


@pytest.mark.usefixtures("installed")
def test_a_damaged_block_is_found(store: Path) -> None:
    Job(store, compress="zip").run(1).close()
    (path,) = store.rglob("rank-0.zip")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(HoldfastError, match=r"rank-0\.zip"):
        restore.load(open_store(store), "job", checkpoint_id(1, 1))


def test_a_setting_names_the_transforms_that_there_are(store: Path, installed: None) -> None:
    with pytest.raises(ValueError, match=r"compress='gzip': give one of .*byte-planes.*zip"):
        Job(store, compress="gzip")
