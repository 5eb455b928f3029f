import contextlib
import io
import logging
import math
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from holdfast.checkpoint import reading, restore
from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format import manifest as fmt
from holdfast.state.registry import Registry
from tests.support.handmade_checkpoints import TensorShard, commit, commit_objects
from tests.support.read_recording_store import ReadRecordingStore

MIB = 1 << 20


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(reading, "READ_BYTES", 2 * fmt.BLOCK_BYTES)
    monkeypatch.setattr(reading, "SMALL_FILE_BYTES", 0)


def bits(tensor):
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.dtype, tensor.shape, plain.reshape(-1).view(torch.uint8).tolist()


ODD = {
    "model.weight": torch.randn(1000, 257),
    "model.half": torch.randn(33, 5).to(torch.bfloat16),
    "model.mask": torch.tensor([True, False, True]),
    "model.count": torch.tensor(7),
    "model.none": torch.empty(0, 4),
    "model.wave": torch.randn(3, 2, dtype=torch.complex128),
    "model.float8": torch.randn(40).to(torch.float8_e5m2fnuz),
    "model.bytes": torch.arange(255, dtype=torch.uint8),
}


@pytest.mark.parametrize("tensors", [ODD, {"model.none": torch.empty(0)}, {"x": torch.zeros(())}])
def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path, small_blocks, tensors):
    written = commit(tmp_path, tensors)
    found = restore.load(written.store, "job", written.id).tensors
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bits(found[name]) == bits(tensor)


def test_thousands_of_tiny_tensors_cost_a_few_reads(tmp_path):
    tensors = {f"model.{i}": torch.full((1 + i % 7,), float(i)) for i in range(2000)}
    written = commit(tmp_path, tensors)
    store = ReadRecordingStore(tmp_path)
    found = restore.load(store, "job", written.id).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert len(store.reads) <= 4


def test_reads_are_aligned_in_the_file_and_in_memory(tmp_path, small_blocks):
    written = commit(tmp_path, ODD)
    store = ReadRecordingStore(tmp_path)
    restore.load(store, "job", written.id)
    size = written.path().stat().st_size
    for _, start, length, address in store.reads:
        assert start % fmt.BLOCK_BYTES == 0
        assert address % fmt.BLOCK_BYTES == 0
        assert length % fmt.BLOCK_BYTES == 0 or start + length == size


def test_blocks_may_arrive_in_any_order(tmp_path, small_blocks):
    tensors = {"model.w": torch.randn(64, 1024), "model.b": torch.randn(99)}
    written = commit(tmp_path, tensors)
    others = threading.Event()

    def hold_the_first_back(start, size):
        if start == 2 * fmt.BLOCK_BYTES:
            assert others.wait(300)
        elif start + size == written.path().stat().st_size:
            others.set()

    found = restore.load(ReadRecordingStore(tmp_path, hold_the_first_back, readers=3), "job", written.id).tensors
    assert torch.equal(found["model.w"], tensors["model.w"])


def test_damage_is_named_to_the_stretch_of_bytes(tmp_path):
    written = commit(tmp_path, {"model.w": torch.zeros(10 * MIB)})  # 40 MiB: three digests
    data = bytearray(written.path().read_bytes())
    tensor = written.manifest.tensors[0]
    data[tensor.start + 20 * MIB] ^= 4
    written.path().write_bytes(data)
    expected = f"bytes {tensor.start + 16 * MIB:,} to {tensor.start + 32 * MIB:,} of the file does not match"
    with pytest.raises(DamagedCheckpoint, match=expected):
        restore.load(written.store, "job", written.id)
    with pytest.raises(DamagedCheckpoint, match=expected):
        restore.verify(written.store, "job", written.id)


def test_every_rank_is_read_and_a_tensor_of_several_put_together(tmp_path):
    whole = torch.arange(24.0).reshape(6, 4)
    written = commit(
        tmp_path,
        {"model.w": TensorShard(whole[:2], (6, 4), (0, 0)), "rank0": torch.ones(3)},
        {"model.w": TensorShard(whole[2:, :1], (6, 4), (2, 0)), "rank1": torch.zeros(2)},
        {"model.w": TensorShard(whole[2:, 1:], (6, 4), (2, 1))},
    )
    found = restore.load(written.store, "job", written.id).tensors
    assert torch.equal(found["model.w"], whole)
    assert (found["rank0"].sum(), found["rank1"].sum()) == (3, 0)


def test_a_checkpoint_may_have_more_files_than_can_be_open(tmp_path):
    written = commit(tmp_path, *({f"w{rank}": torch.full((5,), rank)} for rank in range(40)))
    store = ReadRecordingStore(tmp_path, readers=2)
    found = restore.load(store, "job", written.id).tensors
    assert [int(found[f"w{rank}"][0]) for rank in range(40)] == list(range(40))
    assert (store.open, store.most_open <= 3) == (0, True)


def test_a_store_that_cannot_be_read_is_not_a_damaged_checkpoint(tmp_path, small_blocks):
    written = commit(tmp_path, ODD)

    def break_off(start, size):
        if start:
            raise TimeoutError("the store does not answer")

    store = ReadRecordingStore(tmp_path, break_off)
    for attempt in (restore.load, restore.verify):
        with pytest.raises(TimeoutError, match="does not answer"):
            attempt(store, "job", written.id)
    assert store.open == 0


def test_ctrl_c_ends_the_threads_and_closes_the_files(tmp_path, small_blocks):
    written = commit(tmp_path, ODD)
    interrupted, returned = threading.Event(), threading.Event()
    went_on = []

    def hold_back(start, size):
        if start and threading.current_thread() is not threading.main_thread():
            assert interrupted.wait(300)
            went_on.append(returned.wait(0.2))  # never set while `load` waits for its threads, as it should

    def interrupt(done_bytes, total_bytes):
        interrupted.set()
        raise KeyboardInterrupt

    store = ReadRecordingStore(tmp_path, hold_back)
    with pytest.raises(KeyboardInterrupt):
        restore.load(store, "job", written.id, progress=interrupt)
    returned.set()
    assert store.open == 0
    assert went_on in ([], [False])
    assert len(store.reads) < 20  # of some 130


def test_all_memory_is_there_before_the_first_byte_is_read(tmp_path, small_blocks):
    written = commit(tmp_path, ODD)
    looked = threading.Event()
    store = ReadRecordingStore(tmp_path, lambda start, size: looked.wait(300))
    (file,) = written.manifest.files
    wanted = list(reading.ranges_to_load(written.manifest, file))
    memories = []

    def look(done_bytes, total_bytes):
        if not looked.is_set():
            assert done_bytes == 0
            memories.extend(run.memory for run in wanted)
            looked.set()

    reading.read(store, "job", written.id, wanted, progress=look)
    assert len(wanted) > 1
    assert None not in memories
    assert [run.memory for run in wanted] == memories


def test_a_long_load_says_in_the_log_how_far_it_is(tmp_path, small_blocks, monkeypatch, caplog):
    monkeypatch.setattr(restore, "FIRST_LOG_SECONDS", 0.0)
    monkeypatch.setattr(reading, "PROGRESS_SECONDS", 0.001)
    written = commit(tmp_path, ODD)
    told = threading.Event()
    caplog.set_level(logging.INFO, "holdfast")
    logging.getLogger("holdfast").addFilter(allow := lambda record: told.set() or True)

    def wait_for_the_log(start, size):
        if threading.current_thread() is not threading.main_thread():
            assert told.wait(300)

    try:
        restore.load(ReadRecordingStore(tmp_path, wait_for_the_log), "job", written.id)
    finally:
        logging.getLogger("holdfast").removeFilter(allow)
    assert f"reading {written.id}: " in caplog.text
    assert " of 1 MB" in caplog.text


@pytest.fixture
def memories(monkeypatch):
    """What memory was taken, and is still held."""
    taken = []
    real = reading.fresh_memory

    def remember(size_bytes):
        memory = real(size_bytes)
        taken.append((size_bytes, weakref.ref(memory)))
        return memory

    monkeypatch.setattr(reading, "fresh_memory", remember)
    return lambda: [size for size, memory in taken if memory() is not None]


def trained():
    torch.manual_seed(3)
    model = torch.nn.Linear(1024, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 1024)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_large_moments_stay_where_they_were_read_and_the_rest_of_the_memory_goes(tmp_path, memories):
    model, optimizer = trained()
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    written = commit_objects(tmp_path, model=model, optimizer=optimizer)
    loaded = restore.load(written.store, "job", written.id)
    weights_and_moments = sum(memories())
    Registry({"model": model, "optimizer": optimizer}).apply(loaded.manifest.state, loaded.tensors)
    del loaded
    found = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(found, moments, strict=True))
    assert weights_and_moments > 3 * model.weight.nbytes
    assert 2 * model.weight.nbytes <= sum(memories()) <= 2 * model.weight.nbytes + 2 * fmt.BLOCK_BYTES
    optimizer.state.clear()
    del found
    assert memories() == []


def test_a_moment_that_stayed_is_saved_without_its_neighbours(tmp_path):
    model, optimizer = trained()
    written = commit_objects(tmp_path, model=model, optimizer=optimizer)
    loaded = restore.load(written.store, "job", written.id)
    Registry({"model": model, "optimizer": optimizer}).apply(loaded.manifest.state, loaded.tensors)
    torch.save(optimizer.state[model.weight]["exp_avg"], file := io.BytesIO())
    assert file.tell() < model.weight.nbytes + 10_000


def test_moments_at_odd_addresses_are_copied_to_where_torch_would_have_put_them(tmp_path):
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.randn(501, 333)), "o": torch.zeros(3)})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    (model["w"].sum() + model["o"].sum()).backward()
    optimizer.step()
    written = commit_objects(tmp_path, model=model, optimizer=optimizer)
    loaded = restore.load(written.store, "job", written.id)
    assert any(tensor.data_ptr() % 64 for tensor in loaded.tensors.values() if tensor.numel() == 501 * 333)
    Registry({"model": model, "optimizer": optimizer}).apply(loaded.manifest.state, loaded.tensors)
    large = [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1000]
    assert len(large) == 2
    assert [value.data_ptr() % 64 for value in large] == [0, 0]


def test_verifying_keeps_little_in_memory(tmp_path, memories, monkeypatch):
    monkeypatch.setattr(reading, "VERIFY_BYTES", 256 << 10)
    monkeypatch.setattr(reading, "READ_BYTES", 64 << 10)
    written = commit(tmp_path, {f"w{i}": torch.randn(25_000) for i in range(40)})  # 4 MB in windows of 0.2
    most = 0

    def look(start, size):
        nonlocal most
        most = max(most, sum(memories()))

    restore.verify(ReadRecordingStore(tmp_path, look), "job", written.id)
    assert 0 < most <= 4 * (256 << 10)


def test_one_object_is_loaded_without_the_others(tmp_path):
    model, optimizer = trained()
    written = commit_objects(tmp_path, model=model, optimizer=optimizer)
    store = ReadRecordingStore(tmp_path)
    found = restore.load(store, "job", written.id, only=["model.bias", "model.weight"]).tensors
    assert sorted(found) == ["model.bias", "model.weight"]
    assert torch.equal(found["model.weight"], model.weight)
    assert sum(length for _, _, length, _ in store.reads) < 1.5 * model.weight.nbytes


def test_no_memory_is_said_to_be_none(monkeypatch):
    with pytest.raises(MemoryError, match="no memory for 4,611,686,018,427 MB of a checkpoint"):
        reading.fresh_memory(1 << 62)


def test_reading_needs_no_torch():
    probe = (
        "import holdfast.checkpoint.reading, holdfast.checkpoint.restore, sys; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


def test_infinite_and_missing_numbers_are_kept_to_the_bit(tmp_path):
    odd = torch.tensor([math.nan, math.inf, -0.0, 1e-45])
    written = commit(tmp_path, {"model.odd": odd})
    assert bits(restore.load(written.store, "job", written.id).tensors["model.odd"]) == bits(odd)


@pytest.mark.parametrize("error", [None, RuntimeError("a hook of the user's")])
def test_a_module_is_loaded_on_one_thread_and_the_others_come_back(tmp_path, error):
    model, seen = torch.nn.Linear(4, 4), []
    written = commit_objects(tmp_path, model=model)
    loaded = restore.load(written.store, "job", written.id)

    def look(module, state, *_):
        seen.append(torch.get_num_threads())
        if error:
            raise error

    model.register_load_state_dict_pre_hook(look)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with (
            pytest.raises(IncompatibleCheckpoint, match=r"model: .*a hook") if error else contextlib.nullcontext()
        ):
            Registry({"model": model}).apply(loaded.manifest.state, loaded.tensors)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
