import collections
import copy
import enum
import json
import math

import msgspec
import numpy
import pytest
import torch

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.shards import names_in
from holdfast.state.encoder import Encoder
from holdfast.state.tree import decode, require_readable


def there_and_back(value):
    """Through a tree, as JSON holds it, and tensors copied as a snapshot would."""
    encoder = Encoder((), set())
    tree = json.loads(msgspec.json.encode(encoder.encode("value", value)))
    assert names_in(tree) == encoder.tensors.keys()
    return decode(tree, {name: tensor.clone() for name, tensor in encoder.tensors.items()}, copy=True)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -3, 2**70, 0.1, math.inf, -math.inf, "text", b"\x00bytes", 1 + 2j, (1, (2, "x")),
        [1, [2]], {1: "a", (2, 3): None}, {"$tensor": 3}, {"x": {"$y": 1}}, {1, 2}, frozenset([3]),
        collections.deque([1, 2]), collections.Counter({3: 2}), torch.Size([2, 3]), torch.bfloat16,
        torch.device("cpu"), bytearray(b"\x00bytes"), collections.OrderedDict(b=1, a=2), {2.5: {"$x": "y"}},
        *(numpy.dtype(name).type(1.5) for name in ("float16", "float32", "float64", "complex64", "complex128")),
        *(numpy.dtype(name).type(1) for name in ("bool", "int8", "int32", "int64", "uint8", "uint64")),
        numpy.uint64(2**64 - 1), numpy.float64(math.inf), [numpy.float64(0.1), 0.1],
        "half a pair \ud800 é \\u00e9", {"\udfff": "\ud83d\ude00"},
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


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class History(list):
    pass


class Weights(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        collections.defaultdict(int), collections.namedtuple("Point", "x y")(1, 2), Text("a"), Number(3),
        History([1]), torch.ones(2).as_subclass(Weights), numpy.ma.masked_array([1.0]), numpy.str_("a"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_come_back_as_something_else_is_refused(value):
    with pytest.raises(TypeError, match=r"v\.value: a .* would come back as a plain|store value\.item"):
        Encoder((), set()).encode("v", {"value": value})


class Phase(str, enum.Enum):  # noqa: UP042  # as scripts have it that were written before StrEnum
    WARM = "warm"


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Enum):
    ON = object()


@pytest.mark.parametrize("member", [Phase.WARM, Level.LOW, Mode.ON])
def test_a_member_of_an_enum_is_refused_by_its_path_with_a_way_out(member):
    name = type(member).__name__
    with pytest.raises(
        TypeError, match=rf"loop\.phase: cannot store .* {name}\.\w+: .* Store its value, .*{name}\("
    ):
        Encoder((), set()).encode("loop", {"phase": member})
    with pytest.raises(TypeError, match=r"loop\.seen: the key .*: cannot store the enum member"):
        Encoder((), set()).encode("loop", {"seen": {member: 1}})


@pytest.mark.parametrize(
    ("array", "way_out"),
    [
        (numpy.array([object()]), r"array\.tolist\(\)"),
        (numpy.array(["a", "bc"]), r"array\.tolist\(\)"),
        (numpy.array(["2026-01-01"], dtype="datetime64[D]"), r'array\.astype\("int64"\)'),
        (numpy.zeros(2, dtype=[("a", "i4"), ("b", "f8")]), "one array for each field"),
        (numpy.zeros(2, dtype=numpy.longdouble), r'array\.astype\("float64"\)'),
        (numpy.arange(3, dtype=">f4"), r'newbyteorder\("="\)'),
        (numpy.zeros(2, dtype=[("a", "i4"), ("b", "i8")])["b"], r"array\.copy\(\)"),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_an_array_that_cannot_be_stored_is_refused_by_its_path_with_a_way_out(array, way_out):
    with pytest.raises(TypeError, match=rf"loop\.array: cannot store .*; store .*{way_out}"):
        Encoder((), set()).encode("loop", {"array": array})


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")  # of torch: quantized and nested tensors are going, or coming
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (quantized, r"cannot store a quantized tensor; .*dequantize\(\)"),
        (lambda: torch.eye(2).to_sparse(), r"cannot store a torch\.sparse_coo tensor; .*to_dense\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "cannot store a nested tensor"),
        (lambda: torch.ones(2, device="meta"), "a tensor on the meta device has no values"),
    ],
)
def test_a_tensor_that_cannot_be_stored_is_refused_by_its_path(make, told):
    with pytest.raises(TypeError, match=rf"loop\.x: {told}"):
        Encoder((), set()).encode("loop", {"x": make()})


def test_a_list_that_holds_itself_is_refused():
    value = [1, {}]
    value[1]["again"] = value
    with pytest.raises(TypeError, match=r"loop\.1\.again: a list that holds itself cannot be stored"):
        Encoder((), set()).encode("loop", value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6).t(), torch.randn(8)[::2], torch.randn(3, 1).expand(3, 4), torch.randn(1).expand(2, 2),
        torch.arange(6.0).unfold(0, 3, 1), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last), torch.empty(3, 0).t(),
        torch.randn(2, dtype=torch.complex64).conj().imag,
    ],
)  # fmt: skip
def test_a_tensor_keeps_its_strides(tensor):
    found = there_and_back({"x": tensor})["x"]
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_tensors_that_differ_in_a_sign_that_is_not_applied_yet_are_two():
    pair = torch.randn(2, dtype=torch.complex64)
    found = there_and_back([pair.imag, pair.conj().imag])
    assert torch.equal(found[0], -found[1])


@pytest.mark.parametrize(
    "array",
    [
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)), numpy.arange(6.0)[::-1], numpy.arange(8)[::2],
        numpy.arange(24).reshape(2, 3, 4)[:, ::-1, ::-2], numpy.broadcast_to(numpy.arange(3.0), (2, 3)),
        numpy.array(2.5), numpy.zeros((0, 3)), numpy.arange(3, dtype="uint16"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_an_array_keeps_its_layout_and_whether_it_can_be_written_to(array):
    found = there_and_back({"x": array})["x"]
    assert type(found) is numpy.ndarray
    assert (found.dtype, found.shape, found.strides) == (array.dtype, array.shape, array.strides)
    assert found.flags.writeable == array.flags.writeable
    assert numpy.array_equal(found, array)


def test_a_view_into_a_far_larger_tensor_comes_back_without_the_gaps_and_says_so(caplog):
    column = torch.randn(1 << 10, 1 << 10)[:, 0]
    found = there_and_back({"x": column})["x"]
    assert torch.equal(found, column)
    assert found.is_contiguous()
    assert "value.x is a view of a far larger tensor" in caplog.text


@pytest.mark.parametrize(
    "value",
    [
        [1, 2], {"a": 1}, {1: 2}, {3}, collections.deque([1], maxlen=2), collections.OrderedDict(a=1),
        collections.Counter("aa"), bytearray(b"x"), numpy.arange(3), torch.ones(3), [], [torch.ones(1)],
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_two_names_for_one_object_are_two_names_for_one_again(value):
    found = there_and_back({"a": value, "b": {"c": (1, value)}, "other": copy.deepcopy(value)})
    assert found["a"] is found["b"]["c"][1]
    assert found["other"] is not found["a"]
    assert repr(found["a"]) == repr(value)


def test_tensors_and_arrays_on_the_same_memory_are_on_the_same_memory_again():
    tensor = torch.zeros(3, requires_grad=True)
    found = there_and_back({"a": tensor, "view": tensor.detach(), "array": tensor.detach().numpy()})
    found["view"][0] = 1.0
    assert found["a"].tolist() == found["array"].tolist() == [1, 0, 0]
    assert (found["a"].requires_grad, found["view"].requires_grad) == (True, False)


def test_tensors_that_overlap_in_part_are_stored_twice_and_said_once(caplog):
    tensor, encoder = torch.arange(6.0), Encoder((), set())
    encoder.encode("loop", {"all": tensor, "part": tensor[2:4], "again": tensor[2:4]})
    assert caplog.text.count("loop.part shares memory with loop.all") == 1
    caplog.clear()
    encoder.encode("chunks", list(torch.randn(6).chunk(3)))
    assert not caplog.text


def test_a_tensor_asks_for_gradients_again_and_a_parameter_is_one():
    parameter, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    found = there_and_back([torch.ones(2, requires_grad=True), parameter, frozen, torch.ones(2)])
    assert [type(each) for each in found] == [torch.Tensor, torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]
    assert [each.requires_grad for each in found] == [True, True, False, False]
    assert all(each.is_leaf for each in found)


def test_the_state_of_a_module_keeps_its_versions():
    state = torch.nn.BatchNorm1d(2).state_dict()
    found = there_and_back({"best": state})["best"]
    assert type(found) is collections.OrderedDict
    assert found._metadata == state._metadata


def test_an_unknown_tag_is_not_guessed_at():
    with pytest.raises(IncompatibleCheckpoint, match=r"\$future"):
        decode({"$future": 1}, {}, copy=True)


@pytest.mark.parametrize(
    "tree",
    [
        {"$dtype": "save"}, {"$dtype": "hub"}, {"$dtype": "Tensor"}, {"$scalar": "object", "value": 1},
        {"$scalar": "float64", "value": "x"}, {"$int": "x"}, {"$tensor": "nothing"}, {"$shared": "nothing"},
        {"$pairs": [[[1], 2]]}, {"$bytes": 3}, {"$complex": []}, {"$set": [[1]]},
        *({"$tensor": "x", "strides": strides} for strides in ([1 << 50], [-1], [1, 1], "1")),
        {"$ndarray": {"$tensor": "half"}},
    ],
)  # fmt: skip
def test_a_tree_that_nobody_wrote_is_damage(tree):
    shapes = {"x": ("torch.float32", (2,)), "half": ("torch.bfloat16", (2,))}
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: state\.loop: "):
        require_readable("loop", {"value": [tree]}, shapes)


def test_a_dtype_or_device_of_another_torch_is_no_damage():
    with pytest.raises(IncompatibleCheckpoint, match="this torch has no dtype 'float3_e1m1'"):
        require_readable("loop", {"$dtype": "float3_e1m1"}, {})
    with pytest.raises(IncompatibleCheckpoint, match="this torch knows no device 'abacus'"):
        require_readable("loop", {"$device": "abacus"}, {})


def test_what_a_tree_refers_to_is_looked_at_without_its_memory():
    encoder = Encoder((), set())
    tree = encoder.encode("x", {"a": torch.ones(2), "b": numpy.arange(3)[::-1]})
    shapes = {name: (str(t.dtype), tuple(t.shape)) for name, t in encoder.tensors.items()}
    shapes["x.a"] = ("torch.float32", (1 << 40,))
    assert require_readable("x", tree, shapes)["a"].shape == (1 << 40,)


@pytest.mark.parametrize("device", ["cuda:0", "mps", "meta"])  # every torch can make a tensor on the last
def test_a_stand_in_takes_no_memory_on_the_device_that_its_tensor_was_on(device):
    tree = {"$tensor": "a", "device": device, "strides": [1, 1 << 20], "requires_grad": True}
    found = require_readable("x", {"a": tree}, {"a": ("torch.float32", (1 << 20, 1 << 20))})["a"]
    assert (found.shape, found.dtype, found.requires_grad) == ((1 << 20, 1 << 20), torch.float32, True)
    assert (found.device.type, found.untyped_storage().nbytes()) == ("cpu", 4)


@pytest.mark.parametrize("strides", [[1 << 20, 1], [-(1 << 20), -1], [1, 1 << 20]])
def test_the_stand_in_of_an_array_takes_no_memory(strides):
    tree = {"$ndarray": {"$tensor": "a"}, "strides": strides}
    found = require_readable("x", {"a": tree}, {"a": ("torch.uint8", (1 << 20, 1 << 20))})["a"]
    assert (found.shape, found.dtype) == ((1 << 20, 1 << 20), numpy.uint8)


@pytest.mark.parametrize("device", ["cuda:99", "mps", "xpu", "meta"])
def test_a_tensor_of_a_device_that_is_not_here_comes_back_on_the_cpu(device):
    found = decode({"$tensor": "a", "device": device}, {"a": torch.ones(2)}, copy=True)
    assert (found.device.type, found.tolist()) == ("cpu", [1, 1])
