"""Random generators that a loader reaches: in its dataset, transforms, collate function and samplers.

Counters of a sampler, and what training changes in it, are saved too: its order may depend on them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from holdfast.data.reachable import is_global_generator, reachable
from holdfast.state.rng import StatefulGenerator, is_generator

if TYPE_CHECKING:
    from holdfast.data.sampler_values import SamplerValues

logger = logging.getLogger("holdfast")


SAMPLERS = ("sampler", "batch_sampler")
"""Attributes of a loader that are samplers, of any class."""
_SEARCHES = range(2, 8)
"""Numbers of reads of the states before which new generators are looked for, such as one in a cache."""
_UNCHANGED: Mapping[str, Any] = {"numbers": {}}
"""State of a sampler with its first values."""


class GeneratorStates:
    """The generators and samplers that are reachable from the parts of a loader, by path, and their states."""

    def __init__(self, **parts: Any) -> None:
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self._known: dict[str, StatefulGenerator | SamplerValues] | None = None
        self._reads, self._late = 0, dict[str, StatefulGenerator]()
        self._at_position: Mapping[str, Any] | None = None
        """States to set when the loader gets to its position."""

    def _search(self) -> dict[str, StatefulGenerator | SamplerValues]:
        found: dict[str, StatefulGenerator | SamplerValues] = {}
        for name, part in self._parts.items():
            for path, item in reachable(name, part):
                if is_generator(item) and not is_global_generator(item):
                    found[path] = StatefulGenerator(item)
                elif _is_sampler(item, path):
                    from holdfast.data.sampler_values import SamplerValues  # few loaders have one of their own

                    found[path] = SamplerValues(item)
        return found

    @property
    def _found(self) -> dict[str, StatefulGenerator | SamplerValues]:
        if self._known is None:
            self._known = self._search()
        return self._known

    @property
    def _samplers(self) -> dict[str, SamplerValues]:
        return {path: each for path, each in self._found.items() if not isinstance(each, StatefulGenerator)}

    @property
    def paths(self) -> list[str]:
        """Paths of the generators."""
        return [path for path, each in self._found.items() if isinstance(each, StatefulGenerator)]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the states at the position, which the loader may have yet to reach."""
        if self._at_position is not None:
            return self._at_position
        self._reads += 1
        if self._parts and self._reads in _SEARCHES:
            from holdfast.data.hidden_generators import look_again

            self._late = look_again(self._parts, self._found, self._late)
        generators = {path: self._found[path].state_dict() for path in self.paths}
        return generators | self.sampler_values()

    def sampler_values(self) -> dict[str, Any]:
        """Return what has changed in samplers, now."""
        states = {path: each.state_dict() for path, each in self._samplers.items()}
        return {path: state for path, state in states.items() if state["numbers"]}

    def load_at_position(self, states: Mapping[str, Any] | None) -> None:
        """Set these states when `reach` is called; `None` cancels an earlier call."""
        self._at_position = states

    def reach(self, *, generators: bool = True, samplers: bool = True) -> None:
        """Set the states of the position, which the loader has reached; of `samplers` if they have, too."""
        states, self._at_position = self._at_position, None
        if states is not None:
            if generators:
                self._load_generators(states)
            if samplers:
                self.go_on(states)

    def go_on(self, states: Mapping[str, Any]) -> None:
        """Set what training has changed in samplers: not what they count again while they are read again."""
        for path, each in self._samplers.items():
            each.go_on(states.get(path, _UNCHANGED))

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Set the states. What the objects do not have any more, or not yet, is reported."""
        self._load_generators(states)
        for path, each in self._samplers.items():
            each.load_state_dict(states.get(path, _UNCHANGED))

    def _load_generators(self, states: Mapping[str, Any]) -> None:
        if any(path not in self._found for path in states):
            self._known = {**self._search(), **self._samplers}
        missing = [path for path, state in states.items() if not self._load(path, state)]
        if missing:
            logger.warning(
                "the checkpoint holds the state of %s, which this loader does not have: its random numbers will "
                "differ. Create it with the loader, before the session resumes",
                ", ".join(missing),
            )

    def _load(self, path: str, state: Mapping[str, Any]) -> bool:
        """Load the state of a generator; return whether there is such an object."""
        found = self._found.get(path)
        if found is None or found.kind != state["kind"]:
            return False
        if isinstance(found, StatefulGenerator):
            found.load_state_dict(dict(state))
        return True


def _is_sampler(item: Any, path: str) -> bool:
    """Whether an object is a sampler that does not save its position itself."""
    is_other = type(item).__module__.partition(".")[0] in ("torchdata", "builtins", "holdfast")
    is_sampler = isinstance(item, torch.utils.data.Sampler) or path in SAMPLERS
    return is_sampler and not is_other and not hasattr(item, "state_dict")


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
        self._values: Mapping[str, Any] | None = None
        """States at the position of what is repeated, until it is reached. Of samplers alone if they are ahead."""
        self.is_ahead = self.is_by_hand = False
        """Whether samplers are read before their batches are given, and whether batches may be left unused."""

    @property
    def repeats(self) -> bool:
        return bool(self._repeated.paths)

    def begin(self, epoch: int, *, begun: bool) -> None:
        """Before an epoch draws; with `begun`, a part of it has been given already and is drawn again."""
        if self._first is None:
            self._first = self._continued.state_dict(), self._repeated.state_dict()
        if begun and epoch in self._starts:
            if self._values is None:
                self._values = self._now(is_ahead=self.is_ahead or self.is_by_hand)
            self._repeated.load_state_dict(self._starts[epoch])
        earlier = {each: states for each, states in self._starts.items() if each in (epoch - 1, epoch + 1)}
        self._starts = {**earlier, epoch: self._repeated.state_dict()}

    def _now(self, *, is_ahead: bool) -> Mapping[str, Any]:
        return self._repeated.sampler_values() if is_ahead else self._repeated.state_dict()

    def reach(self, *, passed: bool = False) -> None:
        """At the position, or with `passed` after it, when what comes before it has been drawn again."""
        self._continued.reach()
        values, self._values = self._values, None
        if values is not None:  # training may draw from a generator of a sampler, too
            self._repeated.load_at_position(values)
            self._repeated.reach(generators=not passed)

    def continued(self) -> Mapping[str, Any]:
        return self._continued.state_dict()

    def state_dict(self, epoch: int, *, begun: bool, continued: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the states at a position; `continued` if those are not the current ones."""
        starts = self._starts.get(epoch) if begun else None
        states = {
            "continued": self.continued() if continued is None else continued,
            "repeated": self._repeated.state_dict() if starts is None else starts,
        }
        values = self._now(is_ahead=self.is_ahead) if self._values is None else self._values
        return states | ({"values": values} if starts is not None and (starts or values) else {})

    def load_state_dict(self, state: Mapping[str, Any] | None, epoch: int, *, begun: bool) -> None:
        """Go to a position, or to the start for `None`, which is also what older checkpoints hold."""
        self._starts, self._values = {}, None
        self._continued.load_at_position(None)
        if state is None:
            if self._first is None or begun:
                return
            state = dict(zip(("continued", "repeated"), self._first, strict=True))
        self._continued.load_state_dict(state["continued"])
        if begun:
            self._starts, self._values = {epoch: state["repeated"]}, state.get("values")
            self._continued.load_at_position(state["continued"])
        else:
            self._repeated.load_state_dict(state["repeated"])
