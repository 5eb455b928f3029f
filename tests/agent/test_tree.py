import collections
import json
import math

import numpy
import pytest
import torch

from holdfast.errors import IncompatibleCheckpoint
from holdfast.shards import names_in
from holdfast.tree import Encoder, decode


def there_and_back(value):
    """Through a tree, as JSON holds it, and tensors copied as a snapshot would."""
    encoder = Encoder((), set())
    tree = json.loads(json.dumps(encoder.encode("value", value), allow_nan=False))
    assert names_in(tree) == encoder.tensors.keys()
    return decode(tree, {name: tensor.clone() for name, tensor in encoder.tensors.items()}, copy=True)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -3, 2**70, 0.1, math.inf, -math.inf, "text", b"\x00bytes", 1 + 2j, (1, (2, "x")),
        [1, [2]], {1: "a", (2, 3): None}, {"$tensor": 3}, {"x": {"$y": 1}}, {1, 2}, frozenset([3]),
        collections.deque([1, 2]), collections.Counter({3: 2}), torch.Size([2, 3]), torch.bfloat16,
        torch.device("cpu"),
        numpy.float32(2.5),
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_and_arrays_come_back_as_they_were():
    array = numpy.arange(6.0).reshape(2, 3)
    nan, found = there_and_back([math.nan, array])
    assert math.isnan(nan)
    assert numpy.array_equal(found, array)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3), torch.empty(0, 4), torch.randn(4, 6).t(), torch.randn(3).to(torch.bfloat16),
        torch.randn(5).to(torch.float8_e4m3fn), torch.randn(2, dtype=torch.complex64).conj(),
        torch.randn(4)[::2], torch.tensor([True, False]),
    ],
)  # fmt: skip
def test_a_tensor_keeps_dtype_shape_and_bits(tensor):
    found = there_and_back(tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.resolve_conj(), tensor.resolve_conj())


def test_what_only_pickle_could_store_is_refused_by_its_path():
    with pytest.raises(TypeError, match=r"loop\.history\.0: cannot store a .*object"):
        Encoder((), set()).encode("loop", {"history": [object()]})


@pytest.mark.parametrize("value", [collections.defaultdict(int), collections.namedtuple("Point", "x y")(1, 2)])
def test_what_would_come_back_as_something_else_is_refused(value):
    with pytest.raises(TypeError, match=r"v\.value: a .* would come back as a plain"):
        Encoder((), set()).encode("v.value", value)


def test_an_unknown_tag_is_not_guessed_at():
    with pytest.raises(IncompatibleCheckpoint, match=r"\$future"):
        decode({"$future": 1}, {}, copy=True)
