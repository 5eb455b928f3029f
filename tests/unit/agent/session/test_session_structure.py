"""Objects that a script changes while it trains: reported when it happens, and refused at a resume."""

import pytest
import torch
from torch.nn.utils import prune

import holdfast
from holdfast.errors import IncompatibleCheckpoint

CODE = "the objects have changed since training began"


class LateLayerModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.late = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("mask", None)

    def forward(self, x):
        return self.late(self.layer(x))


def adds_a_group(model, optimizer):
    optimizer.add_param_group({"params": list(model.late.parameters())})


def grows_a_buffer(model, optimizer):
    model.seen = torch.zeros(5)


def casts_a_buffer(model, optimizer):
    model.seen = model.seen.double()


def fills_a_buffer(model, optimizer):
    model.mask = torch.ones(2)


def prunes(model, optimizer):
    prune.l1_unstructured(model.late, "weight", 0.5)


def train(store, until, change=None, at=3, before=False):
    torch.manual_seed(0)
    model = LateLayerModel()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1, momentum=0.9)
    session = holdfast.Session("m", store=store, every=1, model=model, optimizer=optimizer)
    if before:
        change(model, optimizer)
    try:
        session.resume()
        while session.iteration < until:
            if change is not None and not before and session.iteration + 1 == at:
                change(model, optimizer)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            session.step()
            session.wait(300)
    finally:
        session._close("SIGKILL")


CHANGES = [
    (adds_a_group, "optimizer: [2, 2] parameters by group here, [2] in the checkpoint"),
    (grows_a_buffer, "model.seen: (5,) of torch.float32 in the model, (3,) of torch.float32 in the checkpoint"),
    (casts_a_buffer, "model.seen: (3,) of torch.float64 in the model, (3,) of torch.float32 in the checkpoint"),
    (fills_a_buffer, "such as 'mask'"),
    (prunes, "such as 'late.weight_mask'"),
]


@pytest.mark.parametrize(("change", "what"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_change_of_the_structure_is_reported_once_with_the_first_checkpoint_after_it(
    tmp_path, caplog, change, what
):
    train(tmp_path, 6, change)
    (told,) = [record.getMessage() for record in caplog.records if CODE in record.getMessage()]
    assert "checkpoints from iteration 3 on cannot be loaded when this script restarts" in told
    assert what in told
    with pytest.raises(IncompatibleCheckpoint, match=r"make that change before session\.resume\(\)"):
        train(tmp_path, 8, change, at=8)


def test_a_script_that_makes_the_change_before_it_resumes_goes_on_and_is_not_warned(tmp_path, caplog):
    train(tmp_path, 4, adds_a_group)
    caplog.clear()
    train(tmp_path, 6, adds_a_group, before=True)
    assert CODE not in caplog.text


def test_a_state_that_only_gets_moments_and_other_numbers_is_not_reported(tmp_path, caplog):
    train(tmp_path, 4)
    assert CODE not in caplog.text
