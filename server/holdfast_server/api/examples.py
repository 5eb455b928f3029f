"""Examples in the OpenAPI document, generated from the structs."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.protocol.wire import PROTOCOL

_AT = 1_790_000_000.0
_BY_NAME: dict[str, object] = {
    "job": "char-gpt",
    "project": "default",
    "host": "node-1",
    "policy": "checkfreq",
    "checkpoint": "000000001200-1",
    "safety_checkpoint": "000000001260-1",
    "label": "before the new data",
    "iteration": 1200,
    "world_size": 8,
    "every": 50,
    "retention": "last 5, every 1000",
    "interval": 50,
    "budget": 0.035,
    "measured_overhead": 0.021,
    "predicted_overhead": 0.03,
    "loss": 2.31,
    "who": "ada",
    "created_by": "ada",
    "silenced_until": None,
    "resolved_at": None,
    "seconds": 3600.0,
    "until": None,
    "field": "budget",
    "before": "3.5%",
    "after": "2%",
    "jobs": "*",
    "rule": "no_progress",
    "kind": None,
    "message": "no new iteration for 12 min (limit 10 min)",
    "target": "https://hooks.example.org/holdfast",
    "secret": None,
    "payload_bytes": 108_000_000,
    "reused_bytes": 0,
    "raw_bytes": 0,
    "token": "…",
    "prefix": "hf_2f60813062",
    "action": "settings.edit",
    "protocol": PROTOCOL,
}
"""Values by field name, used if they fit the type. Other values follow from the type."""
_DEEPEST = 6


def example_of(kind: Any) -> Any:
    """Return an example value of a type, as in JSON."""
    return _example(msgspec.inspect.type_info(kind), "", 0)


def _example(kind: msgspec.inspect.Type, name: str, depth: int) -> Any:
    inspect = msgspec.inspect
    known = _BY_NAME.get(name, inspect)
    if known is not inspect and _fits(known, kind):
        return known
    match kind:
        case inspect.StructType():
            return _struct(kind, depth)
        case inspect.DataclassType():
            return {field.encode_name: _example(field.type, field.name, depth + 1) for field in kind.fields}
        case inspect.UnionType():
            return _of_union(kind, name, depth)
        case inspect.ListType() | inspect.CollectionType() | inspect.VarTupleType():
            return [] if depth > _DEEPEST else [_example(kind.item_type, name.removesuffix("s"), depth + 1)]
        case inspect.TupleType():
            return [_example(item, name, depth + 1) for item in kind.item_types]
        case inspect.DictType():
            return {_key(kind): _example(kind.value_type, name, depth + 1)}
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return _AT if name == "at" or name.endswith(("_at", "since", "now")) else 1.5
        case inspect.StrType():
            return "000000001200-1" if name == "id" else "text"
    return None


def _struct(kind: msgspec.inspect.StructType, depth: int) -> dict[str, Any]:
    tag = {kind.tag_field: kind.tag} if kind.tag_field is not None else {}
    return tag | {field.encode_name: _example(field.type, field.name, depth + 1) for field in kind.fields}


def _of_union(kind: msgspec.inspect.UnionType, name: str, depth: int) -> Any:
    others = [one for one in kind.types if not isinstance(one, msgspec.inspect.NoneType)]
    structs = any(isinstance(one, msgspec.inspect.StructType) for one in others)
    if structs and depth > _DEEPEST and len(others) < len(kind.types):
        return None
    return _example(others[0], name, depth)


def _fits(value: object, kind: msgspec.inspect.Type) -> bool:
    inspect = msgspec.inspect
    match kind:
        case inspect.UnionType():
            return any(_fits(value, one) for one in kind.types)
        case inspect.LiteralType():
            return value in kind.values
        case inspect.NoneType():
            return value is None
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool)
        case inspect.FloatType():
            return isinstance(value, float)
        case inspect.ListType():
            return isinstance(value, list) and all(_fits(one, kind.item_type) for one in value)
    return False


def _key(kind: msgspec.inspect.DictType) -> str:
    key = kind.key_type
    return str(key.values[0]) if isinstance(key, msgspec.inspect.LiteralType) else "loss"
