"""Examples in the OpenAPI document, made from the structs themselves: none is ever out of date."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.protocol.messages import PROTOCOL

_AT = 1_790_000_000.0
_BY_NAME: dict[str, object] = {
    "job": "char-gpt",
    "project": "default",
    "projects": ["default"],
    "name": "on call",
    "uid": "6f1c2a9d4e8b",
    "host": "node-1",
    "policy": "checkfreq",
    "checkpoint": "000000001200-1",
    "safety_checkpoint": "000000001260-1",
    "parent": "000000001200-1",
    "from_checkpoint": "000000001200-1",
    "resumed_from": "000000001200-1",
    "label": "before the new data",
    "pin": "000000001200-1",
    "pinned_by": "ada",
    "iteration": 1200,
    "from_iteration": 1260,
    "to_iteration": 1200,
    "first_iteration": 1,
    "last_iteration": 1260,
    "applied_iteration": 1201,
    "durable_iteration": 1204,
    "lineage": 1,
    "from_lineage": 1,
    "attempt": 1,
    "rank": 0,
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
    "changed_by": "ada",
    "acknowledged_by": "ada",
    "silenced_by": None,
    "silenced_until": None,
    "resolved_at": None,
    "resolved_why": None,
    "seconds": 3600.0,
    "until": None,
    "key": "6d0c7a51b7f24f35",
    "field": "budget",
    "before": "3.5%",
    "after": "2%",
    "summary": "budget 3.5% → 2%",
    "limit": 600.0,
    "for_seconds": 0.0,
    "jobs": "*",
    "rule": "no_progress",
    "kind": None,
    "unit": "seconds",
    "title": "No progress",
    "message": "no new iteration for more than 10 min",
    "meaning": "Longest time without a new iteration",
    "target": "https://hooks.example.org/holdfast",
    "secret": None,
    "payload_bytes": 108_000_000,
    "store_free_bytes": 250_000_000_000,
    "status": "running",
    "error": "unknown_job",
    "token": "…",
    "prefix": "hf_2f60813062",
    "digest": "9f86d081884c7d65",
    "action": "settings.edit",
    "request_id": "0b7f3e5c9a1d4e62",
    "definition": "Iterations that stand",
    "protocol": PROTOCOL,
    "version": 3,
}
"""What a field of that name holds, where that is of its type; anything else follows from the type alone."""
_IDS = {"Alert": 7, "NoticeRow": 12, "AlertDelivery": 31, "AuditEntry": 104}
_DEEPEST = 6


def example_of(kind: Any) -> Any:
    """A value of a type, as JSON holds it."""
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
            return "000000001200-1" if name == "id" else "as told"
    return None


def _struct(kind: msgspec.inspect.StructType, depth: int) -> dict[str, Any]:
    told = {kind.tag_field: kind.tag} if kind.tag_field is not None else {}
    for field in kind.fields:
        value = _example(field.type, field.name, depth + 1)
        told[field.encode_name] = _IDS.get(kind.cls.__name__, value) if field.name == "id" else value
    return told


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
