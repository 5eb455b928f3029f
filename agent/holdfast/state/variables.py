"""Values that a loop carries from one iteration to the next."""

from __future__ import annotations

from typing import Any


class Variables:
    """Named values that are saved and restored with the other objects: `Variables(best_loss=math.inf)`.

    A value is None, a number, a string, bytes, a dense tensor, a NumPy array, or a list, tuple, set, dict or deque
    of values. It comes back equal and in its own type; members of enums and objects of other classes are refused.
    Two names for one list or tensor are two names for one again, and a parameter is the one that the model has, or
    that the optimizer trains.

    Read and assign values as attributes. A name given here that a checkpoint does not hold keeps its value when
    one is loaded; a name assigned later goes away with the iterations that a restore undoes.
    """

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name == "_declared" or hasattr(type(self), name):
                raise ValueError(f"Variables({name}=...): a name that it needs itself; give the value another")
        self.__dict__.update(values, _declared=frozenset(values))

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_declared"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in self.state_dict().keys() - state_dict.keys() - self._declared:
            del self.__dict__[name]
        self.__dict__.update(state_dict)

    def __getattr__(self, name: str) -> Any:  # for type checkers: any name may be there
        raise AttributeError(f"Variables has no {name!r}; it has {', '.join(self.state_dict()) or 'none'}")

    def __repr__(self) -> str:
        return f"Variables({', '.join(f'{k}={v!r}' for k, v in self.state_dict().items())})"
