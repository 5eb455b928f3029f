import collections
import random

import numpy
import pytest
import torch

from holdfast import Variables
from holdfast.errors import IncompatibleCheckpoint
from holdfast.state import Registry


def trained(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def round_trip(registry, into):
    """What `registry` captures, copied as a snapshot would, applied to `into`."""
    captured = registry.capture({})
    tensors = {name: tensor.clone() for name, tensor in captured.tensors.items()}
    into.apply(captured.trees, tensors)


def test_an_object_without_state_dict_is_refused_by_its_keyword():
    with pytest.raises(TypeError, match=r"Session\(lr=\.\.\.\): float has no state_dict\(\)"):
        Registry({"lr": 0.1})


def test_functions_stay_with_the_script(caplog):
    model = torch.nn.Linear(8, 2)
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), lr=1.0), lambda i: 0.5**i)
    registry = Registry({"v": Variables(f=len), "scheduler": schedule})
    assert "f" not in registry.capture({}).trees["v"]
    assert "v.f is a function" in caplog.text


def test_optimizer_state_keeps_every_scalar_and_the_users_names():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75), amsgrad=True)
    trained(model, optimizer)
    registry = Registry({"model": model, "optimizer": optimizer})
    assert {"model.weight", "optimizer.state.exp_avg.weight", "optimizer.state.step.bias"} <= set(
        registry.capture({}).tensors
    )
    other = torch.nn.Linear(8, 2)
    twin = torch.optim.AdamW(other.parameters(), lr=9.0)
    round_trip(registry, Registry({"model": other, "optimizer": twin}))
    assert {k: v for k, v in twin.param_groups[0].items() if k != "params"} == {
        k: v for k, v in optimizer.param_groups[0].items() if k != "params"
    }
    torch.manual_seed(1)
    trained(model, optimizer)
    torch.manual_seed(1)
    trained(other, twin)
    assert torch.equal(model.weight, other.weight)


def test_moments_kept_in_float32_come_back_in_float32_beside_bfloat16_parameters():
    def make():
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.Adam([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.state[parameter]["exp_avg"] = torch.tensor([0.1, 0.2, 0.3])
        return parameter, optimizer

    (_, before), (parameter, after) = make(), make()
    round_trip(Registry({"optimizer": before}), Registry({"optimizer": after}))
    assert after.state[parameter]["exp_avg"].dtype == torch.float32
    assert after.state[parameter]["exp_avg"].tolist() == pytest.approx([0.1, 0.2, 0.3])


class OneOfAKind(torch.optim.Optimizer):
    """State of every shape: a plain number, float64, nested lists and dicts, of another dtype than parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5, "betas": (0.1, 0.2), "note": None})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0.0) + 1.0
                state["step"] = torch.tensor(state["count"], dtype=torch.float64)
                state["history"] = [torch.rand(3), {"second": torch.rand(2, dtype=torch.float64)}]
                state["skipped"] = None


def test_any_shape_of_optimizer_state_comes_back_in_its_own_dtypes():
    def make():
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = OneOfAKind([parameter])
        optimizer.step()
        return parameter, optimizer

    (one, before), (two, after) = make(), make()
    before.step()
    round_trip(Registry({"optimizer": before}), Registry({"optimizer": after}))
    then, now = before.state[one], after.state[two]
    assert (now["count"], type(now["count"]), now["skipped"]) == (2.0, float, None)
    for a, b in [
        (then["step"], now["step"]),
        (then["history"][0], now["history"][0]),
        (then["history"][1]["second"], now["history"][1]["second"]),
    ]:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_in_any_dtype_comes_back_in_it(dtype):
    def make():
        model = torch.nn.Linear(8, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        trained(model, optimizer)
        for state in optimizer.state.values():
            state["step"] = state["step"].to(dtype)
        return {"model": model, "optimizer": optimizer}

    one, two = make(), make()
    two["optimizer"].state.clear()
    round_trip(Registry(one), Registry(two))
    assert {s["step"].dtype for s in two["optimizer"].state.values()} == {dtype}


SCHEDULES = {
    "nested": lambda s, o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, total_iters=3), s.CosineAnnealingLR(o, 20)], milestones=[3]
    ),
    "chained": lambda s, o: s.ChainedScheduler([s.LinearLR(o, 0.1), s.ExponentialLR(o, 0.9)]),
    "cyclic": lambda s, o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one cycle": lambda s, o: s.OneCycleLR(o, 0.5, total_steps=30),
    "warm restarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 4, 2),
    "polynomial": lambda s, o: s.PolynomialLR(o, 20),
    "function": lambda s, o: s.LambdaLR(o, lambda i: 0.9**i),
    "averaging": lambda s, o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=6),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_any_schedule_goes_on_where_it_was(kind):
    def make():
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "schedule": SCHEDULES[kind](torch.optim.lr_scheduler, optimizer)}

    def rates(objects, steps):
        found = []
        for _ in range(steps):
            objects["optimizer"].step()
            objects["schedule"].step()
            group = objects["optimizer"].param_groups[0]
            found.append((group["lr"], group["momentum"]))
        return found

    one, two = make(), make()
    rates(one, 5)
    round_trip(Registry(one), Registry(two))
    assert rates(two, 9) == rates(one, 9)


GENERATORS = {
    "torch.Generator": (lambda: torch.Generator().manual_seed(4), lambda g: torch.rand(3, generator=g).tolist()),
    "numpy.random.Generator": (lambda: numpy.random.default_rng(4), lambda g: g.normal(size=3).tolist()),
    "numpy.random.MT19937": (
        lambda: numpy.random.Generator(numpy.random.MT19937(4)),
        lambda g: g.normal(size=3).tolist(),
    ),
    "numpy.random.RandomState": (lambda: numpy.random.RandomState(4), lambda g: g.normal(size=3).tolist()),
    "random.Random": (lambda: random.Random(4), lambda g: [g.gauss(0, 1) for _ in range(3)]),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_the_scripts_own_goes_on_where_it_was(kind):
    make, draw = GENERATORS[kind]
    one, two = make(), make()
    draw(one)
    registry = Registry({"noise": one})
    draw(two)
    draw(two)
    Registry({"noise": two}).check(registry.capture({}).trees, shapes_of(registry.capture({})))
    round_trip(registry, Registry({"noise": two}))
    assert draw(two) == draw(one)


def test_a_generator_of_another_kind_is_refused():
    saved = Registry({"noise": torch.Generator()}).capture({})
    with pytest.raises(IncompatibleCheckpoint, match=r"noise: random\.Random here, torch\.Generator on cpu"):
        Registry({"noise": random.Random()}).check(saved.trees, shapes_of(saved))
    saved = Registry({"noise": Variables()}).capture({})
    with pytest.raises(IncompatibleCheckpoint, match=r"noise: random\.Random here, something else in the"):
        Registry({"noise": random.Random()}).check(saved.trees, shapes_of(saved))


def test_a_loss_scale_comes_back_with_its_count():
    one, two = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5) for _ in range(2))
    one.load_state_dict(one.state_dict() | {"scale": 4.0, "_growth_tracker": 3})
    round_trip(Registry({"scaler": one}), Registry({"scaler": two}))
    assert two.state_dict() == one.state_dict()


def test_tied_weights_are_stored_once_and_buffers_outside_the_state_dict_too():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.b.weight = self.a.weight
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    one, two = Tied(), Tied()
    one.scratch.fill_(5)
    registry = Registry({"model": one})
    assert "model.b.weight" not in registry.capture({}).tensors
    round_trip(registry, Registry({"model": two}))
    assert torch.equal(two.b.weight, one.b.weight)
    assert two.scratch.tolist() == [5, 5]


def test_only_what_an_optimizer_changes_may_be_copied_later():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    deferred = Registry({"model": model, "optimizer": optimizer}).capture({}).deferred
    assert {"model.0.weight", "model.1.weight", "optimizer.state.exp_avg.0.weight"} <= deferred
    assert not {n for n in deferred if "running" in n or "num_batches" in n or n.startswith("rng")}
    assert not Registry({"model": model}).capture({}).deferred  # nothing would hold the update back


def test_a_model_that_changed_is_refused_by_the_tensor_that_differs():
    saved = Registry({"model": torch.nn.Linear(8, 2)}).capture({})
    shapes = {name: (str(t.dtype), tuple(t.shape)) for name, t in saved.tensors.items()}
    with pytest.raises(IncompatibleCheckpoint, match=r"model\.weight: \(2, 9\) of .* in the model, \(2, 8\)"):
        Registry({"model": torch.nn.Linear(9, 2)}).check(saved.trees, shapes)
    with pytest.raises(IncompatibleCheckpoint, match="holds no 'ema'; it has model"):
        Registry({"ema": torch.nn.Linear(8, 2)}).check(saved.trees, shapes)
    with pytest.raises(IncompatibleCheckpoint, match="differ in 1 entries, 'bias'"):
        Registry({"model": torch.nn.Linear(8, 2, bias=False)}).check(saved.trees, shapes)


def shapes_of(captured):
    return {name: (str(t.dtype), tuple(t.shape)) for name, t in captured.tensors.items()}


def test_another_dtype_another_buffer_and_other_groups_are_refused():
    model = torch.nn.Linear(8, 2)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    optimizer = torch.optim.SGD(model.parameters())
    saved = Registry({"model": model, "optimizer": optimizer}).capture({})
    double = torch.nn.Linear(8, 2, dtype=torch.float64)
    with pytest.raises(IncompatibleCheckpoint, match=r"float64 in the model, .*float32 in the check"):
        Registry({"model": double}).check(saved.trees, shapes_of(saved))
    model.scratch = torch.zeros(3)
    with pytest.raises(IncompatibleCheckpoint, match=r"model\.scratch: \(3,\)"):
        Registry({"model": model}).check(saved.trees, shapes_of(saved))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(IncompatibleCheckpoint, match=r"optimizer: .* of \[2, 1\] parameters here, of \[2\]"):
        Registry({"optimizer": optimizer}).check(saved.trees, shapes_of(saved))


def test_another_kind_of_optimizer_is_refused_and_one_with_a_new_setting_is_not():
    model = torch.nn.Linear(8, 2)
    saved = Registry({"optimizer": torch.optim.Adam(model.parameters())}).capture({})
    with pytest.raises(IncompatibleCheckpoint, match=r"optimizer: this SGD has dampening, .* had amsgrad, betas"):
        Registry({"optimizer": torch.optim.SGD(model.parameters())}).check(saved.trees, shapes_of(saved))
    newer = torch.optim.Adam(model.parameters())
    newer.param_groups[0]["since_next_torch"] = True
    Registry({"optimizer": newer}).check(saved.trees, shapes_of(saved))


def test_a_cache_that_a_models_first_use_makes_comes_back_before_it_is_used():
    class Cached(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2))

        def warm(self):
            self.inner[0].register_buffer("cache", torch.full((3,), 7.0), persistent=False)

    one, two = Cached(), Cached()
    one.warm()
    saved = Registry({"model": one}).capture({})
    Registry({"model": two}).check(saved.trees, shapes_of(saved))
    round_trip(Registry({"model": one}), Registry({"model": two}))
    assert two.inner[0].cache.tolist() == [7, 7, 7]
    assert "inner.0.cache" not in two.state_dict()


def test_a_module_with_extra_state_is_its_own_match():
    class Quantized(torch.nn.Linear):
        amax = 1.0

        def get_extra_state(self):
            return {"amax": self.amax}

        def set_extra_state(self, state):
            self.amax = state["amax"]

    one, two = Quantized(8, 2), Quantized(8, 2)
    one.amax = 3.5
    saved = Registry({"model": one}).capture({})
    Registry({"model": two}).check(saved.trees, shapes_of(saved))
    round_trip(Registry({"model": one}), Registry({"model": two}))
    assert two.amax == 3.5


@pytest.mark.parametrize("keyword", ["rng", "session", "gradients"])
def test_a_keyword_that_checkpoints_use_themselves_is_refused(keyword):
    with pytest.raises(ValueError, match=rf"Session\({keyword}=\.\.\.\): this name is taken"):
        Registry({keyword: Variables()})


def test_variables_given_by_the_script_stay_and_those_of_undone_iterations_go():
    before = Variables(best=1.0, recent=collections.deque([1, 2], maxlen=2))
    registry = Registry({"v": before})
    captured = registry.capture({})
    before.later = 3
    after = Variables(best=0.0, recent=None, patience=7, callback=len)
    after.later = 4
    for target in (before, after):
        Registry({"v": target}).apply(captured.trees, captured.tensors)
    assert not hasattr(before, "later")
    assert (after.best, after.patience, after.callback) == (1.0, 7, len)
    after.recent.append(3)
    assert list(after.recent) == [2, 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compiler
def test_a_compiled_model_has_the_names_of_the_plain_one():
    model = torch.nn.Linear(8, 2)
    assert "model.weight" in Registry({"model": torch.compile(model, backend="eager")}).capture({}).tensors
