import collections
import math

import numpy
import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError
from holdfast.format.dtypes import stored_as
from holdfast.format.manifest import TensorRange, lay_out
from holdfast.state import round_trip
from holdfast.state.adapters import ModuleAdapter
from holdfast.state.registry import Registry
from holdfast.state.round_trip import RoundTrip, describe, difference
from holdfast.store import open_store
from tests.support import small_session
from tests.support.small_session import session_of

VALUES = [
    None,
    True,
    -0.0,
    math.nan,
    2**70,
    "word",
    b"bytes",
    [1, 2.0, "three"],
    (1, (2,)),
    {"a": {"b": [None]}},
    {1: "one", "1": "one"},
    collections.deque([1], maxlen=2),
    {3, 4},
    torch.Size([2, 3]),
    torch.float16,
    torch.ones(2, 3, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    numpy.arange(6).reshape(2, 3),
]


def compared(was, now):
    return difference("x", describe(was), describe(now))


@pytest.mark.parametrize("value", VALUES, ids=[f"{number}-{type(v).__name__}" for number, v in enumerate(VALUES)])
def test_a_value_is_what_it_is(value):
    assert compared({"value": value}, {"value": value}) is None


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (1, True, "x would be restored as bool True, and is int 1"),
        (1, 1.0, "x would be restored as float 1.0, and is int 1"),
        (0.0, -0.0, "x would be restored as float -0.0, and is float 0.0"),
        ((1,), [1], "x would be restored as list of 1 items, and is tuple of 1 items"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "x would be restored as dict ('b', 'a'), and is dict ('a', 'b')"),
        ({"a": [1, "b"]}, {"a": [1, "c"]}, "x.a.1 would be restored as str 'c', and is str 'b'"),
        (bytearray(b"a"), b"a", "x would be restored as bytes b'a', and is bytearray b'a'"),
        (
            torch.ones(2),
            torch.ones(2).double(),
            "restored as tensor of float64 (2,), and is tensor of float32 (2,)",
        ),
        (torch.ones(1), torch.ones(()), "restored as tensor of float32 (), and is tensor of float32 (1,)"),
        (numpy.float64(1), 1.0, "x would be restored as float 1.0, and is float64 of float64 ()"),
        (collections.deque(maxlen=1), collections.deque(), "and is deque of 0 items, at most 1"),
    ],
)
def test_what_would_come_back_otherwise_is_named_with_its_path(was, now, message):
    assert message in compared(was, now)


def test_what_training_changes_afterwards_is_compared_as_it_was():
    value = {"list": [1], "bytes": bytearray(b"a")}
    before = describe(value)
    value["list"].append(2)
    value["bytes"] += b"b"
    assert difference("x", before, describe({"list": [1], "bytes": bytearray(b"a")})) is None


def test_functions_are_left_out_as_a_checkpoint_leaves_them_out():
    assert compared({"a": 1, "f": print}, {"a": 1}) is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.complex128, torch.float8_e5m2]
)
def test_the_layout_that_is_written_gives_back_dtypes_and_shapes(dtype):
    registry = Registry({"loop": holdfast.Variables(w=torch.zeros(2, 3, dtype=dtype))})
    captured = registry.capture({})
    trip = registry.round_trip(captured)
    stored = {name: stored_as(name, tensor) for name, tensor in captured.tensors.items()}
    slots = lay_out((name, dtype, shape) for name, (dtype, shape, _) in stored.items())
    views = {name: view for name, (_, _, view) in stored.items() if view is not None}
    trip.require_same(captured.trees, slots, views, {})
    assert trip.holds
    slots = [TensorRange(s.name, s.dtype, (*s.shape, 1), s.start, s.end) for s in slots]
    with pytest.raises(HoldfastError, match=r"would be restored as"):
        trip.require_same(captured.trees, slots, views, {})


def notices_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def run(store, iterations=3, **options):
    model, optimizer, session = session_of(store, loop=holdfast.Variables(pair=(1, 2)), **options)
    with session:
        for _ in range(iterations):
            small_session.iterate(model, optimizer, session)
            session.wait(300)


def test_a_checkpoint_that_would_come_back_otherwise_is_reported_and_not_listed(tmp_path, monkeypatch, caplog):
    real = round_trip.decode_without_memory

    def forgets_tuples(tree, shapes):
        value = real(tree, shapes)
        return {**value, "pair": list(value["pair"])} if "pair" in value else value

    monkeypatch.setattr(round_trip, "decode_without_memory", forgets_tuples)
    run(tmp_path)
    assert open_store(tmp_path).checkpoints("m") == []
    (notice,) = [each for each in notices_of(caplog) if "could not be loaded" in each]
    assert notice == (
        "m: a checkpoint of this state could not be loaded: loop.pair would be restored as list of 2 items, and "
        "is tuple of 2 items; training continues"
    )
    monkeypatch.undo()
    run(tmp_path)
    assert len(open_store(tmp_path).checkpoints("m")) == 3


def test_a_checkpoint_that_the_objects_would_refuse_is_reported_and_not_listed(tmp_path, monkeypatch, caplog):
    def check(part, tree, shapes):
        raise KeyError("_extra_state")

    monkeypatch.setattr(ModuleAdapter, "check", check)
    run(tmp_path)
    assert open_store(tmp_path).checkpoints("m") == []
    assert "a checkpoint of this state could not be loaded: KeyError: '_extra_state'; training" in caplog.text


def test_once_a_comparison_has_held_no_further_checkpoint_is_compared(tmp_path, monkeypatch):
    made = []
    real = RoundTrip.require_same

    def require_same(trip, *arguments):
        made.append(trip)
        real(trip, *arguments)

    monkeypatch.setattr(RoundTrip, "require_same", require_same)
    run(tmp_path)
    assert [trip.holds for trip in made] == [True]


class CallCounter:
    """Says something else at each call of `state_dict`, as what reports the time that has passed."""

    calls = 0

    def state_dict(self):
        self.calls += 1
        return {"calls": self.calls}

    def load_state_dict(self, state_dict):
        self.calls = state_dict["calls"]


class NamedAsModules:
    """Its state has the entries that the tree of a module has."""

    def state_dict(self):
        return {"state": 1, "metadata": 2, "buffers": 3}

    def load_state_dict(self, state_dict):
        assert state_dict == self.state_dict()


class AddsFirst(torch.optim.AdamW):
    def state_dict(self):
        return {"added": 1, **super().state_dict()}


@pytest.mark.parametrize("item", [CallCounter(), NamedAsModules()], ids=["changes", "named as modules"])
def test_a_state_is_asked_for_once_and_compared_as_the_kind_of_object_that_it_is_of(tmp_path, item):
    run(tmp_path, iterations=1, item=item)
    assert len(open_store(tmp_path).checkpoints("m")) == 1


def require_same(registry):
    captured = registry.capture({})
    stored = {name: stored_as(name, tensor) for name, tensor in captured.tensors.items()}
    slots = lay_out((name, dtype, shape) for name, (dtype, shape, _) in stored.items())
    registry.round_trip(captured).require_same(captured.trees, slots, {}, {})


@pytest.mark.parametrize(
    "value",
    [{math.nan: 1}, {torch.arange(3)}],
    ids=["NaN", "a tensor"],
)
def test_keys_and_items_of_sets_are_compared_by_what_is_in_them(value):
    require_same(Registry({"loop": holdfast.Variables(value=value)}))


def test_the_order_of_what_is_in_a_frozenset_is_not_compared():
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert repr(one) != repr(other)
    assert compared({one: {(1, one)}}, {other: {(1, other)}}) is None


def test_keys_that_are_equal_and_of_different_types_are_different():
    assert compared({True: 1}, {1: 1}) == "x would be restored as dict (1), and is dict (True)"


def test_an_optimizer_may_put_entries_of_its_own_before_those_of_torch():
    weight = torch.nn.Parameter(torch.ones(2))
    require_same(Registry({"optimizer": AddsFirst([weight])}))
