"""What a loop itself carries from one iteration to the next."""

from __future__ import annotations

from typing import Any


class Variables:
    """Named values that are checkpointed and come back with the rest: `Variables(best_loss=math.inf)`.

    Values are scalars, strings, tensors, and nested lists, tuples and dicts of them; read and assign them
    as attributes.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.clear()
        self.__dict__.update(state_dict)

    def __repr__(self) -> str:
        return f"Variables({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"
