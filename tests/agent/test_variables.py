import copy
import math

import pytest
import torch

import holdfast


def test_values_are_read_and_assigned_as_attributes():
    loop = holdfast.Variables(best=math.inf, batch=None)
    loop.best, loop.place = 1.5, 7
    assert loop.state_dict() == {"best": 1.5, "batch": None, "place": 7}
    assert repr(loop) == "Variables(best=1.5, batch=None, place=7)"
    assert copy.deepcopy(loop).state_dict() == loop.state_dict()


def test_a_checkpoint_takes_back_what_was_assigned_since_and_keeps_what_it_does_not_know():
    before = holdfast.Variables(best=2.0)
    before.batch = torch.ones(2)
    state = dict(before.state_dict())
    loop = holdfast.Variables(best=math.inf, new_in_this_version=3)
    loop.undone = 1
    loop.load_state_dict(state)
    assert loop.best == 2.0
    assert loop.batch.tolist() == [1, 1]
    assert loop.new_in_this_version == 3
    with pytest.raises(AttributeError, match=r"Variables has no 'undone'; it has .*best"):
        loop.undone  # noqa: B018


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict", "_declared"])
def test_a_name_that_it_needs_itself_is_refused(name):
    with pytest.raises(ValueError, match="give the value another"):
        holdfast.Variables(**{name: 1})
