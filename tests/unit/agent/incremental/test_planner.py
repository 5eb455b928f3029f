"""Round trips of incremental checkpoints through a store."""

import mmap
import random

import pytest
import torch

pytest.importorskip("numpy")

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.incremental import planner as planning
from holdfast.incremental.planner import IncrementalPlanner
from holdfast.protocol.ids import checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.writer import write_checkpoint
from holdfast.store.local import LocalStore
from tests.support.simulated_files import memory_directory

JOB = "job"


class Job:
    """Writes states of byte tensors to a store."""

    def __init__(self, root, mode=True, **options):
        self.store, self.planner = LocalStore(root), IncrementalPlanner(mode, **options)
        self.attempt = self.store.acquire_attempt(JOB, "uid").number
        self.iteration, self.lineage, self.states = 0, 1, {}

    def commit(self, *, may_link=True, lineage=1, **tensors):
        """Commit a checkpoint of these tensors, and return its id."""
        self.iteration += 1
        slots = fmt.lay_out([(name, "U8", tuple(tensor.shape)) for name, tensor in tensors.items()])
        payload = memoryview(mmap.mmap(-1, slots[-1].end))
        for slot in slots:
            payload[slot.start : slot.end] = tensors[slot.name].numpy().tobytes()
        draft = Draft(
            job=JOB, iteration=self.iteration, lineage=lineage, attempt=self.attempt, kind="scheduled",
            created_at=0.0, parent=None, world_size=1, slots=slots, may_link=may_link,
        )  # fmt: skip
        write_checkpoint(self.store, draft, payload, planner=self.planner)
        self.planner.settle(draft.id, is_durable=True)
        self.states[draft.id] = {name: tensor.clone() for name, tensor in tensors.items()}
        return draft.id

    def files(self, checkpoint):
        return restore.manifest(self.store, JOB, checkpoint).files

    def written(self, checkpoint):
        """Return how the names end of the files that the checkpoint wrote itself."""
        return sorted(file.name.rpartition(".")[2] for file in self.files(checkpoint) if file.written_by is None)

    def require_exact(self, *checkpoints):
        for checkpoint in checkpoints or self.states:
            found = restore.load(self.store, JOB, checkpoint).tensors
            for name, tensor in self.states[checkpoint].items():
                assert torch.equal(found[name], tensor), (checkpoint, name)
            restore.verify(self.store, JOB, checkpoint)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "LEAST_TENSOR_BYTES", 64)
    return Job(tmp_path)


def table(rows=1000, row_bytes=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)


def test_only_the_rows_that_changed_are_written(job):
    state = table()
    first = job.commit(table=state)
    state[[3, 4, 5, 500]] += 1
    second = job.commit(table=state)
    assert (job.written(first), job.written(second)) == (["base", "safetensors"], ["rows", "safetensors"])
    (region,) = (file for file in job.files(second) if file.name.endswith(".rows"))
    assert region.size_bytes < 4 * 64 + 2 * 8 + 60, "two runs"
    third = job.commit(table=state)
    assert job.written(third) == ["safetensors"], "nothing changed"
    job.require_exact()


@pytest.fixture
def memory():
    """A folder in memory."""
    with memory_directory() as directory:
        yield directory


def test_a_thousand_random_histories(memory, monkeypatch):
    """Sparse, contiguous, rolled, filled, reverted, regrown and renamed tensors, with and without a last leaf."""
    monkeypatch.setattr(planning, "LEAST_TENSOR_BYTES", 64)
    rng, cases = random.Random(0), 0
    for number in range(40):
        job = Job(memory / f"{number}", most_regions=rng.choice([1, 2, 16]))
        rows, row_bytes, name = rng.randint(1, 400), rng.choice([1, 6, 64, 100, 128, 4096, 5000]), "table"
        state = table(rows, row_bytes, number)
        older = [state.clone()]
        for _ in range(26):
            kind = rng.choice(
                ["sparse", "sparse", "block", "roll", "fill", "revert", "none", "all", "grow", "name"]
            )
            if kind == "sparse":
                state[[rng.randrange(len(state)) for _ in range(3)]] += 1
            elif kind == "block":
                at = rng.randrange(len(state))
                state[at : at + len(state) // 20] += 1
            elif kind == "roll":
                state = state.roll(1, dims=0)
            elif kind == "fill":
                state[: rng.randint(0, len(state))] = 0
            elif kind == "revert":
                state = rng.choice(older).clone()
            elif kind == "all":
                state += 1
            elif kind == "grow":
                state = table(rng.randint(1, 400), row_bytes, rng.randrange(100))
            elif kind == "name":
                name = rng.choice(["table", "other"])
            older.append(state.clone())
            job.commit(**{name: state, "more": state[:1].clone()})
            cases += 1
        job.require_exact(*rng.sample(sorted(job.states), 8), *sorted(job.states)[-2:])
    assert cases >= 1000


def test_a_state_that_equals_an_older_one_restores_as_it(job):
    """A shifted region at the root of the tree was not stored by the published code."""
    state = table()
    job.commit(table=state)
    changed = state.clone()
    changed[7] += 1
    job.commit(table=changed)
    job.commit(table=state)
    job.commit(table=changed)
    job.require_exact()


def test_rows_that_moved_are_written_where_they_are_now(job):
    state = table()
    job.commit(table=state)
    state[10:20], state[20:30] = state[20:30].clone(), state[10:20].clone()
    job.commit(table=state)
    job.require_exact()


def test_no_bound_drops_changed_rows(tmp_path, monkeypatch):
    """More changes than the limits allow are written as a new base."""
    monkeypatch.setattr(planning, "LEAST_TENSOR_BYTES", 64)
    monkeypatch.setattr(planning, "MOST_REGION_BYTES", 1000)
    job, state = Job(tmp_path), table()
    job.commit(table=state)
    state[:20] += 1
    assert "base" in job.written(job.commit(table=state))
    job.require_exact()


def test_rows_with_equal_hashes_are_found_by_the_digest(job, monkeypatch):
    """The tree only chooses: a restore never returns other bytes than those of the state."""
    monkeypatch.setattr(planning, "changed_leaves", lambda before, after: torch.zeros(0, dtype=torch.int64))
    state = table()
    job.commit(table=state)
    state[7] += 1
    broken = job.commit(table=state)
    with pytest.raises(HoldfastError, match="tensor table does not match its digest"):
        restore.load(job.store, JOB, broken)
    with pytest.raises(HoldfastError, match="tensor table does not match its digest"):
        restore.verify(job.store, JOB, broken)
    (damaged,) = scrub(job.store, JOB, broken).files
    assert (damaged.state, damaged.damage) == ("damaged", "tensor table does not match its digest")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_checkpoint_that_cannot_be_planned_is_written_in_full(job, monkeypatch, error):
    def fail(*arguments):
        raise error

    state = table()
    job.commit(table=state)
    with monkeypatch.context() as patched:
        patched.setattr(planning, "hash_tree", fail)
        state[7] += 1
        assert job.written(job.commit(table=state)) == ["safetensors"]
    state[8] += 1
    assert job.written(job.commit(table=state)) == ["rows", "safetensors"]
    job.require_exact()


def test_region_files_are_merged_and_read_at_most_three_tenths_more(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "LEAST_TENSOR_BYTES", 64)
    job, state = Job(tmp_path), table(4000)
    draw = torch.Generator().manual_seed(0)
    written = []
    for _ in range(80):
        state[torch.randint(0, 4000, (20,), generator=draw)] += 1
        checkpoint = job.commit(table=state)
        written += job.written(checkpoint)
        regions = [file.size_bytes for file in job.files(checkpoint) if file.name.endswith(".rows")]
        assert len(regions) <= 16
        assert sum(regions) <= 0.31 * state.numel()
    assert 1 <= written.count("base") <= 3
    job.require_exact(*sorted(job.states)[::9])


def test_a_base_is_linked_by_a_limited_number_of_checkpoints(job, monkeypatch):
    monkeypatch.setattr(planning, "MOST_LINKS", 3)
    state = table()
    written = [job.written(job.commit(table=state))[0] for _ in range(9)]
    assert written == ["base", *3 * ["safetensors"]] * 2 + ["base"]
    job.require_exact()


def test_region_files_that_cannot_be_read_are_named(job, monkeypatch):
    state = table()
    job.commit(table=state)
    state[3] += 1
    newest = job.commit(table=state)
    with monkeypatch.context() as patched:
        patched.setattr("holdfast.incremental.region_file.available_bytes", lambda: 10)
        with pytest.raises(MemoryError, match=r"\.rows and those before it, \d+ bytes, do not fit"):
            restore.load(job.store, JOB, newest, from_disk=True)
        found = restore.load(job.store, JOB, newest).tensors  # rows are read when they are laid over
        assert torch.equal(found["table"], state)
    with monkeypatch.context() as patched:
        patched.setattr("holdfast.incremental.layered_file.find_spec", lambda name: None)
        with pytest.raises(HoldfastError, match="need numpy: pip install numpy"):
            restore.load(job.store, JOB, newest)
    job.require_exact(newest)


def test_rows_that_change_again_and_again_need_no_new_base(job):
    state = table(4000)
    written = []
    for _ in range(60):
        state[:100] += 1  # 2.5 %
        written += job.written(job.commit(table=state))
    assert written.count("base") == 1
    job.require_exact(*sorted(job.states)[::9])


def test_each_checkpoint_is_whole_without_the_others(job):
    state = table()
    for _ in range(5):
        state[3] += 1
        newest = job.commit(table=state)
    for checkpoint in sorted(job.states)[:-1]:
        job.store.delete(JOB, checkpoint, job.attempt)
    job.require_exact(newest)
    assert scrub(job.store, JOB, newest).state == "sound"


def test_no_stored_file_opens_as_a_safetensors_file(job):
    safetensors = pytest.importorskip("safetensors")
    state = table()
    job.commit(table=state)
    state[3] += 1
    newest = job.commit(table=state)
    stale = [file.name for file in job.files(newest) if not file.name.endswith(".safetensors")]
    assert len(stale) == 2
    for name in stale:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(job.store.path(JOB, newest) / name, "pt")


def test_a_base_is_written_after_damage_and_in_a_new_lineage(job):
    state = table()
    job.commit(table=state)
    job.commit(table=state)
    assert "base" in job.written(job.commit(table=state, may_link=False))
    assert "base" not in job.written(job.commit(table=state))
    assert "base" in job.written(job.commit(table=state, lineage=2))


def test_files_that_may_be_damaged_are_not_linked_later_either(job):
    """Damage was found, and the checkpoint that followed was written without a plan."""
    state = table()
    job.commit(table=state)
    job.planner.plan(1, [], memoryview(b""), set(), may_link=False)
    assert all(file.written_by is None for file in job.files(job.commit(table=state)))


def test_auto_chooses_tensors_of_which_few_rows_change(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "LEAST_TENSOR_BYTES", 64)
    job, sparse, dense = Job(tmp_path, "auto"), table(seed=1), table(seed=2)
    written = []
    for _ in range(4):
        sparse[3] += 1
        dense += 1
        written.append(job.written(job.commit(sparse=sparse, dense=dense)))
    assert written == [["safetensors"], ["base", "safetensors"], ["rows", "safetensors"], ["rows", "safetensors"]]
    manifest = restore.manifest(job.store, JOB, max(job.states))
    assert {each.name: each.file for each in manifest.tensors}["dense"] == "rank-0.safetensors"
    job.require_exact()


@pytest.mark.parametrize("lacking", [None, "moments"])
def test_the_first_checkpoint_is_compared_with_samples_that_were_taken_before(tmp_path, monkeypatch, lacking):
    """Unless a tensor of it is new: it is then sampled with all others."""
    monkeypatch.setattr(planning, "LEAST_TENSOR_BYTES", 64)
    job = Job(tmp_path, "auto")
    state = {"sparse": table(seed=1), "dense": table(seed=2), "moments": table(seed=3)}
    job.planner.observe(1, {name: tensor for name, tensor in state.items() if name != lacking})
    written = []
    for _ in range(3):
        state["sparse"][3] += 1
        state["moments"][3] += 1
        state["dense"] += 1
        written.append(job.written(job.commit(**state)))
    assert written[:2] == ([["safetensors"], ["base", "safetensors"]] if lacking else
                           [["base", "safetensors"], ["rows", "safetensors"]])  # fmt: skip
    assert written[2] == ["rows", "safetensors"]
    tensors = restore.manifest(job.store, JOB, max(job.states)).tensors
    assert [each.name for each in tensors if each.file == "rank-0.safetensors"] == ["dense"]
    job.require_exact()


def test_a_state_that_cannot_be_sampled_before_is_sampled_by_the_first_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "LEAST_TENSOR_BYTES", 64)
    job, state = Job(tmp_path, "auto"), table()
    job.planner.observe(1, {"table": torch.zeros(100, 64, dtype=torch.uint8).t()})
    written = []
    for _ in range(3):
        state[3] += 1
        written.append(job.written(job.commit(table=state)))
    assert written == [["safetensors"], ["base", "safetensors"], ["rows", "safetensors"]]


def test_auto_seldom_samples_a_dense_state(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "LEAST_TENSOR_BYTES", 64)
    hashed = []
    original = planning.hash_rows
    monkeypatch.setattr(planning, "hash_rows", lambda rows: hashed.append(len(rows)) or original(rows))
    job, dense = Job(tmp_path, "auto"), table()
    for _ in range(100):
        dense += 1
        assert job.written(job.commit(dense=dense)) == ["safetensors"]
    assert len(hashed) <= 10


def test_a_tensor_that_becomes_dense_is_written_as_others_are(job):
    state, more = table(seed=1), table(seed=2)
    job.commit(state=state, more=more)
    state += 1
    more[3] += 1
    assert job.written(job.commit(state=state, more=more)) == ["base", "safetensors"]
    state += 1
    more[4] += 1
    last = job.commit(state=state, more=more)
    assert job.written(last) == ["rows", "safetensors"]
    manifest = restore.manifest(job.store, JOB, last)
    assert {each.name: each.file for each in manifest.tensors}["state"] == "rank-0.safetensors"
    job.require_exact()


def test_two_writes_at_the_same_time_link_from_the_same_checkpoint(job):
    """As with `max_in_flight=2`: the second is planned before the first is durable."""
    state = table()
    job.commit(table=state)
    settle, waiting = job.planner.settle, []
    job.planner.settle = lambda checkpoint, *, is_durable: waiting.append(checkpoint)
    for row in 3, 4:
        state[row] += 1
        job.commit(table=state)
    for checkpoint in waiting:
        settle(checkpoint, is_durable=True)
    job.planner.settle = settle
    state[5] += 1
    job.commit(table=state)
    job.require_exact()
    assert checkpoint_id(4, 1) in job.states
