"""Random generators that a loader reaches: in its dataset, transforms, collate function and samplers.

The numbers that a sampler counts, such as its iterations, belong to them: its order may follow from them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.data.reachable import is_global_generator, reachable
from holdfast.state.rng import StatefulGenerator, is_generator

logger = logging.getLogger("holdfast")


SAMPLERS = ("sampler", "batch_sampler")
"""Attributes of a loader that are samplers, of any class."""


class SamplerCounters:
    """The whole numbers of a sampler that change while it is used, such as `self.round += 1` in its `__iter__`.

    Numbers that do not change are settings of the script, which no checkpoint replaces.
    """

    kind = "counters"

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._first = sampler, self._numbers(sampler)

    @staticmethod
    def _numbers(sampler: Any) -> dict[str, int]:
        # `set_epoch` sets the epoch: the session or the script calls it
        left_out = "epoch" if hasattr(sampler, "set_epoch") else None
        attributes = getattr(sampler, "__dict__", {}).items()
        return {name: value for name, value in attributes if type(value) is int and name != left_out}

    def state_dict(self) -> dict[str, Any]:
        changed = {name: n for name, n in self._numbers(self._sampler).items() if self._first.get(name, n) != n}
        return {"kind": self.kind, "numbers": changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        now = self._numbers(self._sampler)
        numbers = {name: n for name, n in (self._first | state["numbers"]).items() if name in now}
        self._sampler.__dict__.update(numbers)


class GeneratorStates:
    """The generators and counters that are reachable from the parts of a loader, by path, and their states."""

    def __init__(self, **parts: Any) -> None:
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self._known: dict[str, StatefulGenerator | SamplerCounters] | None = None
        self._at_position: Mapping[str, Any] | None = None
        """States to set when the loader gets to its position."""

    def _search(self) -> dict[str, StatefulGenerator | SamplerCounters]:
        found: dict[str, StatefulGenerator | SamplerCounters] = {}
        for name, part in self._parts.items():
            for path, item in reachable(name, part):
                if is_generator(item) and not is_global_generator(item):
                    found[path] = StatefulGenerator(item)
                elif _is_sampler_of_script(item, path):
                    found[path] = SamplerCounters(item)
        return found

    @property
    def _found(self) -> dict[str, StatefulGenerator | SamplerCounters]:
        if self._known is None:
            self._known = self._search()
        return self._known

    @property
    def paths(self) -> list[str]:
        """Paths of the generators."""
        return [path for path, each in self._found.items() if isinstance(each, StatefulGenerator)]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the states at the position, which the loader may have yet to reach."""
        return self._at_position or {path: each.state_dict() for path, each in self._found.items()}

    def load_at_position(self, states: Mapping[str, Any] | None) -> None:
        """Set these states when `reach` is called; `None` cancels an earlier call."""
        self._at_position = states

    def reach(self) -> None:
        """Set the states of the position, which the loader has reached."""
        states, self._at_position = self._at_position, None
        self.load_state_dict(states or {}, counters=False)

    def load_state_dict(self, states: Mapping[str, Any], *, counters: bool = True) -> None:
        """Set the states. What the objects do not have any more, or not yet, is reported.

        Without `counters`, those stay: a sampler that is read again from its start counts again.
        """
        if any(path not in self._found for path in states):
            counted = {path: each for path, each in self._found.items() if isinstance(each, SamplerCounters)}
            self._known = {**self._search(), **counted}
        if not counters:
            states = {path: state for path, state in states.items() if state["kind"] != SamplerCounters.kind}
        missing = [path for path, state in states.items() if not self._load(path, state)]
        if missing:
            logger.warning(
                "the checkpoint holds the state of %s, which this loader does not have: its random numbers will "
                "differ. Create it before the session resumes, as the script did for the checkpoint",
                ", ".join(missing),
            )

    def _load(self, path: str, state: Mapping[str, Any]) -> bool:
        generator = self._found.get(path)
        if generator is None or generator.kind != state["kind"]:
            return False
        generator.load_state_dict(dict(state))
        return True


def _is_sampler_of_script(item: Any, path: str) -> bool:
    """Whether an object is a sampler that is not one of torch and does not save its position itself."""
    is_own = type(item).__module__.partition(".")[0] not in ("torch", "torchdata", "builtins", "holdfast")
    is_sampler = isinstance(item, torch.utils.data.Sampler) or path in SAMPLERS
    return is_own and is_sampler and not hasattr(item, "state_dict")


class LoaderGenerators:
    """The generators of a `holdfast.DataLoader` that draw in this process.

    Args:
        continued: those that go on from their state at the position.
        repeated: those whose numbers an epoch draws again, from its start, to get to the position.
    """

    def __init__(self, continued: GeneratorStates, repeated: GeneratorStates) -> None:
        self._continued, self._repeated = continued, repeated
        self._first: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        """States before the first batch."""
        self._starts: dict[int, Mapping[str, Any]] = {}
        """States of the repeated ones at the start of the last epochs."""

    @property
    def repeats(self) -> bool:
        return bool(self._repeated.paths)

    def begin(self, epoch: int, *, begun: bool) -> None:
        """Before an epoch draws; with `begun`, a part of it has been given already and is drawn again."""
        if self._first is None:
            self._first = self._continued.state_dict(), self._repeated.state_dict()
        if begun and epoch in self._starts:
            self._repeated.load_state_dict(self._starts[epoch])
        earlier = {each: states for each, states in self._starts.items() if each in (epoch - 1, epoch + 1)}
        self._starts = {**earlier, epoch: self._repeated.state_dict()}

    def reach(self) -> None:
        """At the position, when what comes before it has been drawn again."""
        self._continued.reach()

    def continued(self) -> Mapping[str, Any]:
        return self._continued.state_dict()

    def state_dict(self, epoch: int, *, begun: bool, continued: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the states at a position; `continued` if those are not the current ones."""
        starts = self._starts.get(epoch) if begun else None
        return {
            "continued": self.continued() if continued is None else continued,
            "repeated": self._repeated.state_dict() if starts is None else starts,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, epoch: int, *, begun: bool) -> None:
        """Go to a position, or to the start for `None`, which is also what older checkpoints hold."""
        self._starts = {}
        self._continued.load_at_position(None)
        if state is None:
            if self._first is None or begun:
                return
            state = dict(zip(("continued", "repeated"), self._first, strict=True))
        self._continued.load_state_dict(state["continued"])
        if begun:
            self._starts = {epoch: state["repeated"]}
            self._continued.load_at_position(state["continued"])
        else:
            self._repeated.load_state_dict(state["repeated"])
