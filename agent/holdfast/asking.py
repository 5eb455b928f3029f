"""What every kind of question to a server has in common."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from holdfast.conversation import Conversation, UnreachableError

T = TypeVar("T")


class Asking:
    """Sends a request, and reads the answer as what it is."""

    _server: Conversation

    def _send(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        return self._server.send(method, path, body, **more)

    def _ask(self, method: str, path: str, kind: type[T], body: object = None, **more: Any) -> T:
        return convert(self._send(method, path, body, **more), kind)

    def _rows(self, path: str, name: str, kind: type[T]) -> list[T]:
        answer = self._send("GET", path)
        rows = answer.get(name, []) if isinstance(answer, dict) else answer
        return [convert(row, kind) for row in rows]


def convert(answer: Any, kind: type[T]) -> T:
    try:
        # Not strict: what JSON has no number for comes as "nan", "inf" and "-inf".
        return msgspec.convert(answer, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnreachableError(f"the server speaks another version of Holdfast's language: {error}") from None
