import msgspec
import pytest
import torch
from safetensors.torch import load as load_safetensors

from holdfast import format as fmt
from holdfast.errors import DamagedCheckpoint, UnknownFormat


def test_slots_lie_back_to_back_and_are_aligned_to_their_elements():
    slots = fmt.lay_out([("b", "BOOL", (3,)), ("a", "F64", (2,)), ("c", "BF16", (5,)), ("e", "F32", (0, 4))])
    assert [s.name for s in slots] == ["e", "a", "c", "b"]
    assert [s.start for s in slots] == [0, *[s.end for s in slots[:-1]]]
    assert all(s.start % fmt.ITEM_BYTES[s.dtype] == 0 for s in slots)


def test_tensors_of_whole_cache_lines_begin_with_one_whatever_lies_beside_them():
    slots = fmt.lay_out(
        [("odd", "I64", (1,)), ("w", "F32", (64, 3)), ("b", "BF16", (32,)), ("head", "F32", (10,))]
    )
    assert [s.name for s in slots] == ["b", "w", "odd", "head"]
    assert [s.start % fmt.LINE_BYTES for s in slots if not (s.end - s.start) % fmt.LINE_BYTES] == [0, 0]


def test_a_payload_opens_with_plain_safetensors():
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    slots = fmt.lay_out([("x", "I16", (2, 3)), ("scalar", "F32", ()), ("empty", "F32", (0,))])
    data = torch.tensor(2.5).numpy().tobytes() + tensor.numpy().tobytes()
    found = load_safetensors(fmt.payload_header(slots, {"job": "j"}) + data)
    assert torch.equal(found["x"], tensor)
    assert found["scalar"].item() == 2.5
    assert found["empty"].shape == (0,)


def test_the_data_section_is_aligned_to_a_cache_line():
    for name in ("a", "ab", "a long name of a tensor"):
        assert len(fmt.payload_header(fmt.lay_out([(name, "F32", (1,))]), {})) % 64 == 0


def manifest(**changes):
    values = {
        "job": "j", "iteration": 7, "lineage": 1, "attempt": 1, "kind": "scheduled", "created_at": 0.0,
        "parent": None, "world_size": 1, "files": [], "tensors": [], "state": {},
    }  # fmt: skip
    return fmt.Manifest(**values | changes)


def test_a_manifest_comes_back_as_it_was():
    before = manifest(state={"model": {"w": {"$tensor": "model.w"}}}, timings={"write_seconds": 0.25})
    assert fmt.decode_manifest(fmt.encode_manifest(before)) == before


def test_a_future_format_is_named_with_the_way_out():
    data = msgspec.json.decode(fmt.encode_manifest(manifest()))
    with pytest.raises(UnknownFormat, match="format 2; this Holdfast reads format 1: upgrade holdfast"):
        fmt.decode_manifest(msgspec.json.encode(data | {"format": 2}))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe", b'{"format": 1, "job": 3}'])
def test_what_is_no_manifest_is_damaged(data):
    with pytest.raises(DamagedCheckpoint, match="is not a manifest"):
        fmt.decode_manifest(data)
