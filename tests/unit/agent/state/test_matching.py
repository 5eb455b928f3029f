"""State of an optimizer follows the names of its parameters, not their order."""

import pytest
import torch
from torch import nn

from holdfast import Variables
from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.state.registry import Registry, shapes_of


class TwoLayers(nn.Module):
    def __init__(self, order=("first", "second"), wrap=lambda module: module):
        super().__init__()
        torch.manual_seed(0)
        layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
        for name in order:
            self.add_module(name, wrap(layers[name]))

    def forward(self, x):
        return self.second(self.first(x).relu())


def trained(model, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def resume(saved, into, *, labelled=True):
    """Load into `into` what `saved` captures now; `labelled` as checkpoints are written today."""
    captured = saved.capture({})
    trees = dict(captured.trees)
    if not labelled:
        for keyword, tree in trees.items():
            trees[keyword] = {k: v for k, v in tree.items() if k != "parameters"} if "$pairs" in tree else tree
    shapes = shapes_of(captured)
    into.check(trees, shapes)
    into.apply(trees, {name: tensor.clone() for name, tensor in captured.tensors.items()}, shapes)


def moments(model, optimizer):
    """The state of each parameter by its name without wrappers."""
    names = {p: n.replace("_orig_mod.", "").replace("module.", "") for n, p in model.named_parameters()}
    return {names[p]: values["exp_avg"] for p, values in optimizer.state.items()}


def require_same_moments(one, other):
    mine, theirs = moments(*one), moments(*other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def job(groups=lambda model: model.parameters(), optimizer=torch.optim.AdamW, **model):
    made = TwoLayers(**model)
    trains = optimizer(groups(made), lr=0.05)
    return made, trains, Registry({"model": made, "optimizer": trains})


@pytest.mark.parametrize("labelled", [True, False], ids=["today", "older"])
def test_parameters_in_another_order_get_their_own_moments(labelled):
    one, two = job(), job(order=("second", "first"))
    trained(*one[:2])
    resume(one[2], two[2], labelled=labelled)
    require_same_moments(one[:2], two[:2])
    trained(*one[:2])
    trained(*two[:2])
    require_same_moments(one[:2], two[:2])


def test_parameters_in_another_order_get_their_own_moments_in_place():
    one, two = job(), job(order=("second", "first"))
    trained(*one[:2])
    trained(*two[:2], steps=1)
    captured = one[2].capture({})
    two[2].apply(captured.trees, captured.tensors, shapes_of(captured), adopt=False)
    require_same_moments(one[:2], two[:2])


class Averages:
    """Averages of parameters by their order, as libraries keep them."""

    def __init__(self, model):
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


def test_tensors_that_an_object_holds_by_the_order_of_parameters_are_named():
    def with_averages(**options):
        model, optimizer, _ = job(**options)
        return Registry({"model": model, "optimizer": optimizer, "ema": Averages(model)})

    captured = with_averages().capture({})
    shapes = shapes_of(captured)
    assert with_averages().reordered(captured.trees, shapes) == []
    (message,) = with_averages(order=("second", "first")).reordered(captured.trees, shapes)
    assert "if ema (Averages) holds tensors by their order, it mixes them up" in message


def by_kind(model, kinds):
    named = list(model.named_parameters())
    decay = {"bias": 0.0, "weight": 0.5}
    return [
        {"params": [p for n, p in named if n.endswith(kind)], "weight_decay": decay[kind], "kind": kind}
        for kind in kinds
    ]


def test_groups_in_another_order_keep_their_settings():
    one = job(lambda model: by_kind(model, ("weight", "bias")))
    two = job(lambda model: by_kind(model, ("bias", "weight")))
    trained(*one[:2])
    resume(one[2], two[2])
    require_same_moments(one[:2], two[:2])
    assert [(g["kind"], g["weight_decay"]) for g in two[1].param_groups] == [("bias", 0.0), ("weight", 0.5)]


def test_parameters_in_another_group_keep_their_moments(caplog):
    def split(*names):
        return lambda model: [
            {"params": [p for n, p in model.named_parameters() if n not in names]},
            {"params": [p for n, p in model.named_parameters() if n in names], "weight_decay": 0.5},
        ]

    one, two = job(split("second.weight")), job(split("second.weight", "first.bias"))
    trained(*one[:2])
    resume(one[2], two[2])
    require_same_moments(one[:2], two[:2])
    assert [g["weight_decay"] for g in two[1].param_groups] == [0.01, 0.5]
    assert "optimizer: model.first.bias in another parameter group than in the checkpoint" in caplog.text
    trained(*two[:2])


def test_parameters_that_only_one_side_trains_are_named():
    def weights(model):
        return [p for n, p in model.named_parameters() if n.endswith("weight")]

    def by_other_layer(model):
        return [*model.first.parameters(), model.second.weight, nn.Parameter(torch.ones(4))]

    trains_all, trains_weights = job(), job(weights)
    with pytest.raises(
        IncompatibleCheckpoint, match=r"\[2\] parameters .*first\.bias, model\.second\.bias only in"
    ):
        resume(trains_all[2], trains_weights[2])
    with pytest.raises(IncompatibleCheckpoint, match=r"\[4\] parameters .*model\.second\.bias only here"):
        resume(trains_weights[2], trains_all[2])
    one, two = job(lambda model: model.first.parameters()), job(lambda model: model.second.parameters())
    with pytest.raises(
        IncompatibleCheckpoint, match=r"model\.second\.bias only here; model\.first\.weight, .* only in"
    ):
        resume(one[2], two[2])


def test_a_refused_optimizer_changes_nothing():
    one, two = job(), job(lambda model: model.first.parameters())
    trained(*one[:2])
    before = {name: tensor.clone() for name, tensor in two[0].state_dict().items()}
    with pytest.raises(IncompatibleCheckpoint):
        resume(one[2], two[2])
    assert all(torch.equal(before[name], tensor) for name, tensor in two[0].state_dict().items())
    assert not two[1].state


@pytest.mark.parametrize("labelled", [True, False], ids=["today", "older"])
def test_tied_weights_match_under_each_of_their_names(labelled):
    def tied(order):
        model = TwoLayers(order)
        model.second.weight = model.first.weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return model, optimizer, Registry({"model": model, "optimizer": optimizer})

    one, two = tied(("first", "second")), tied(("second", "first"))
    trained(*one[:2])
    resume(one[2], two[2], labelled=labelled)
    for name in ("first.weight", "first.bias", "second.bias"):
        mine, theirs = one[0].get_parameter(name), two[0].get_parameter(name)
        assert torch.equal(one[1].state[mine]["exp_avg"], two[1].state[theirs]["exp_avg"]), name


def test_parameters_outside_modules_match_by_their_order_and_shape():
    def make(*sizes):
        loop = Variables(**{f"w{i}": torch.ones(size, requires_grad=True) for i, size in enumerate(sizes)})
        optimizer = torch.optim.AdamW(loop.state_dict().values(), lr=0.05)
        for each in loop.state_dict().values():
            each.grad = torch.ones_like(each) * each.numel()
        optimizer.step()
        return optimizer, Registry({"optimizer": optimizer})

    one, two = make(2, 3), make(2, 3)
    resume(one[1], two[1])
    assert [v["exp_avg"].shape for v in two[0].state.values()] == [(2,), (3,)]
    with pytest.raises(
        IncompatibleCheckpoint, match=r"optimizer: parameter 0 has the shape \(3,\) here, \(2,\) in"
    ):
        resume(one[1], make(3, 2)[1])


def test_a_vector_over_all_parameters_is_refused_for_another_order():
    def lbfgs(order):
        model = TwoLayers(order)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05)
        inputs = torch.randn(8, 4)

        def closure():
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        return Registry({"model": model, "optimizer": optimizer})

    resume(lbfgs(("first", "second")), lbfgs(("first", "second")))
    with pytest.raises(
        IncompatibleCheckpoint, match=r"optimizer: its parameters are in another order .* one vector"
    ):
        resume(lbfgs(("first", "second")), lbfgs(("second", "first")))


def compiled(module):
    return torch.compile(module, backend="eager")


def plain(module):
    return module


def inner(module):
    return next(each for each in module.modules() if isinstance(each, nn.Linear))


WRAPPERS = [(compiled, plain), (plain, compiled), (nn.DataParallel, plain), (plain, nn.DataParallel)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compiler
@pytest.mark.parametrize("labelled", [True, False], ids=["today", "older"])
@pytest.mark.parametrize(("before", "now"), WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_wrappers_of_inner_modules_do_not_change_names(before, now, labelled):
    one, two = job(wrap=before), job(wrap=now, order=("second", "first"))
    for number, parameter in enumerate(one[0].parameters()):  # without the compiler
        parameter.grad = torch.full_like(parameter, number)
    one[1].step()
    one[0].first.requires_grad_(False)
    inner(one[0].second).register_buffer("cache", torch.full((), 3), persistent=False)  # made by the first batch
    inner(one[0].second).weight.grad.fill_(7)
    resume(one[2], two[2], labelled=labelled)
    require_same_moments(one[:2], two[:2])
    assert inner(two[0].second).cache == 3
    names = {n.replace("_orig_mod.", "").replace("module.", ""): p for n, p in two[0].named_parameters()}
    assert [n for n, p in names.items() if not p.requires_grad] == ["first.weight", "first.bias"]
    assert (names["second.weight"].grad == 7).all()


def test_a_module_that_only_looks_wrapped_keeps_its_own_name():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.module = nn.Linear(2, 1)

    one, two = Averaged(), Averaged()
    nn.init.ones_(one.weight)
    resume(Registry({"model": one}), Registry({"model": two}))
    assert torch.equal(two.weight, one.weight)
    with pytest.raises(IncompatibleCheckpoint):
        resume(Registry({"model": one}), Registry({"model": nn.Linear(2, 1)}))


@pytest.mark.parametrize("labels", [1, [1], [["a"]], [["a", "b", "c", 4]], [["a", "b", "c", ["4"]]]], ids=str)
def test_invalid_labels_are_damage(labels):
    one, two = job(), job()
    captured = one[2].capture({})
    trees = {**captured.trees, "optimizer": {**captured.trees["optimizer"], "parameters": labels}}
    with pytest.raises(DamagedCheckpoint, match=r"state\.optimizer\.parameters"):
        two[2].check(trees, shapes_of(captured))
