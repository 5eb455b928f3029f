import collections
import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from holdfast import Variables
from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.state.registry import Registry


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
    with pytest.raises(IncompatibleCheckpoint, match=r"noise: random\.Random here, another kind of object in the"):
        Registry({"noise": random.Random()}).check(saved.trees, shapes_of(saved))


def test_a_loss_scale_comes_back_with_its_count():
    one, two = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5) for _ in range(2))
    one.load_state_dict(one.state_dict() | {"scale": 4.0, "_growth_tracker": 3})
    round_trip(Registry({"scaler": one}), Registry({"scaler": two}))
    assert two.state_dict() == one.state_dict()


def test_tied_weights_are_stored_once_and_buffers_outside_the_state_dict_too():
    class TiedLayers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.b.weight = self.a.weight
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    one, two = TiedLayers(), TiedLayers()
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
    with pytest.raises(IncompatibleCheckpoint, match="differ in 1 entries, such as 'bias'"):
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
    with pytest.raises(IncompatibleCheckpoint, match=r"optimizer: \[2, 1\] parameters by group here, \[2\]"):
        Registry({"optimizer": optimizer}).check(saved.trees, shapes_of(saved))


def test_another_kind_of_optimizer_is_refused_and_one_with_a_new_setting_is_not():
    model = torch.nn.Linear(8, 2)
    saved = Registry({"optimizer": torch.optim.Adam(model.parameters())}).capture({})
    with pytest.raises(IncompatibleCheckpoint, match=r"optimizer: this SGD has dampening, .* has amsgrad, betas"):
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
    with pytest.raises(ValueError, match=rf"Session\({keyword}=\.\.\.\): this name is reserved"):
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


def fit(registry, into):
    """As at a resume: what does not fit `into` is refused, and the rest applied."""
    captured = registry.capture({})
    into.check(captured.trees, shapes_of(captured))
    into.apply(captured.trees, {name: tensor.clone() for name, tensor in captured.tensors.items()})


class Extra(torch.nn.Linear):
    extra = "unset"

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [0, None, {}, [], False, "", collections.OrderedDict(a=1), {"x": [1]}], ids=repr)
def test_any_extra_state_of_a_module_comes_back(extra):
    one, two = Extra(2, 2), Extra(2, 2)
    one.extra = extra
    fit(Registry({"model": one}), Registry({"model": two}))
    assert two.extra == extra
    assert type(two.extra) is type(extra)


def test_parameters_require_gradients_as_they_did(caplog):
    caplog.set_level("INFO")

    def make():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        model[0].requires_grad_(False)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}

    one, two = make(), make()
    registry = Registry(one)
    registry.capture({})
    one["model"][0].weight.requires_grad_()  # a capture that finds the same tensors must see it, too
    one["model"][1].bias.requires_grad_(False)
    fit(registry, Registry(two))
    expected = {"0.weight": True, "0.bias": False, "1.weight": True, "1.bias": False}
    assert {name: each.requires_grad for name, each in two["model"].named_parameters()} == expected
    assert "model: restored requires_grad of 2 parameters (such as 0.weight) from the checkpoint" in caplog.text
    caplog.clear()
    fit(registry, Registry(one))
    assert "requires_grad" not in caplog.text


def test_a_parameter_in_variables_is_that_which_the_model_has():
    def make():
        model = torch.nn.BatchNorm1d(2)
        loop = Variables(w=model.weight, mean=model.running_mean, alias=model.bias.detach(), best=None)
        return {"loop": loop, "model": model, "optimizer": torch.optim.SGD(model.parameters())}

    one, two = make(), make()
    one["loop"].best = one["model"].weight.detach().clone()
    registry = Registry(one)
    assert not [name for name in registry.capture({}).tensors if name.startswith("loop") and name != "loop.best"]
    fit(registry, Registry(two))
    loop, model = two["loop"], two["model"]
    assert loop.w is model.weight
    assert loop.mean is model.running_mean
    assert loop.alias.data_ptr() == model.bias.data_ptr()
    assert not loop.alias.requires_grad
    assert loop.best.data_ptr() != model.weight.data_ptr()


@pytest.mark.parametrize(
    "make_one", [torch.nn.Parameter, lambda x: x.requires_grad_()], ids=["parameter", "tensor"]
)
def test_what_an_optimizer_trains_in_variables_is_what_it_goes_on_to_train(make_one):
    def make():
        loop = Variables(w=make_one(torch.zeros(2)), others=[make_one(torch.zeros(3))])
        return {"loop": loop, "optimizer": torch.optim.SGD([loop.w, *loop.others], lr=1.0, momentum=0.9)}

    def train(objects):
        loop = objects["loop"]
        for _ in range(2):
            objects["optimizer"].zero_grad()
            ((loop.w - 1).square().sum() + (loop.others[0] - 2).square().sum()).backward()
            objects["optimizer"].step()

    one, two = make(), make()
    train(one)
    trained = two["optimizer"].param_groups[0]["params"]
    fit(Registry(one), Registry(two))
    assert two["loop"].w is trained[0]
    assert two["loop"].others[0] is trained[1]
    train(one)
    train(two)
    assert torch.equal(two["loop"].w, one["loop"].w)
    assert torch.equal(two["loop"].others[0], one["loop"].others[0])


def test_what_an_optimizer_trains_in_variables_is_refused_in_another_shape():
    def make(size):
        loop = Variables(w=torch.zeros(size, requires_grad=True))
        return Registry({"loop": loop, "optimizer": torch.optim.SGD([loop.w])})

    with pytest.raises(IncompatibleCheckpoint, match=r"optimizer: parameter 0 has the shape \(3,\) here, \(2,\)"):
        fit(make(2), make(3))
    older = make(2).capture({})
    del older.trees["optimizer"]["parameters"]
    with pytest.raises(
        IncompatibleCheckpoint, match=r"loop\.w: \(3,\) of torch\.float32 in the optimizer, \(2,\) of"
    ):
        make(3).check(older.trees, shapes_of(older))


def test_two_variables_that_hold_one_tensor_do_so_again():
    tensor = torch.zeros(2)
    one, two = Variables(x=tensor), Variables(y=tensor)
    a, b = Variables(), Variables()
    fit(Registry({"one": one, "two": two}), Registry({"one": a, "two": b}))
    assert a.x is b.y


def test_a_tensor_of_an_optimizers_state_in_variables_is_said_to_come_back_as_a_copy(caplog):
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    loop = Variables(m=optimizer.state[model.weight]["exp_avg"])
    Registry({"model": model, "optimizer": optimizer, "loop": loop}).capture({})
    assert "loop.m is part of an optimizer's state (optimizer.state.exp_avg.weight)" in caplog.text


def test_a_crafted_name_in_variables_is_damage():
    saved = Registry({"loop": Variables(x=1)}).capture({})
    for name in ("_declared", "load_state_dict", "__class__"):
        saved.trees["loop"] = {name: 1}
        with pytest.raises(DamagedCheckpoint, match=f"invalid name '{name}' of a variable"):
            Registry({"loop": Variables()}).check(saved.trees, shapes_of(saved))


class Odd(torch.optim.SGD):
    """Keeps what torch's load_state_dict would take apart."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(
                phase="warm",
                recent=collections.deque([1.5, torch.ones(2, dtype=torch.float64)], maxlen=2),
                seen=collections.OrderedDict(b=1, a=torch.ones(1, dtype=torch.float64)),
                counts=collections.Counter("aab"),
                raw=b"raw",
                moments=torch.randn(2, 3, dtype=parameter.dtype).t(),
            )


def test_state_of_an_optimizer_that_torch_takes_apart_is_put_together_again():
    def make():
        parameter = torch.nn.Parameter(torch.ones(3, 2))
        optimizer = Odd([parameter], lr=0.1)
        parameter.grad = torch.ones(3, 2)
        optimizer.step()
        return parameter, optimizer

    (one, before), (two, after) = make(), make()
    fit(Registry({"optimizer": before}), Registry({"optimizer": after}))
    then, now = before.state[one], after.state[two]
    assert (now["phase"], now["raw"], now["counts"]) == ("warm", b"raw", collections.Counter("aab"))
    assert [type(now[key]) for key in then] == [type(then[key]) for key in then]
    assert now["recent"].maxlen == 2
    assert now["recent"][1].dtype == now["seen"]["a"].dtype == torch.float64
    assert list(now["seen"]) == ["b", "a"]
    assert now["moments"].stride() == then["moments"].stride()
    assert torch.equal(now["moments"], then["moments"])


def test_an_array_in_the_state_of_an_optimizer_which_torch_cannot_load_is_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["history"] = [numpy.ones(2)]
    with pytest.raises(TypeError, match="optimizer: torch cannot load a NumPy array into an optimizer's state"):
        Registry({"optimizer": optimizer}).capture({})


class Buffered(torch.nn.Module):
    def __init__(self, *, persistent=False):
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 3).expand(2, 3), persistent=persistent)
        self.register_buffer("windows", torch.zeros(6).unfold(0, 3, 1), persistent=False)


def test_a_buffer_whose_elements_share_memory_comes_back():
    one, two = Buffered(), Buffered()
    one.table = torch.tensor([[1.0, 2.0, 3.0]]).expand(2, 3)
    address = two.table.data_ptr()
    fit(Registry({"model": one}), Registry({"model": two}))
    assert torch.equal(two.table, one.table)
    assert (two.table.data_ptr(), two.table.stride()) == (address, one.table.stride())
    one.table = torch.randn(2, 3)  # each row its own
    fit(Registry({"model": one}), Registry({"model": two}))
    assert torch.equal(two.table, one.table)
    assert "table" not in two.state_dict()


def test_a_buffer_that_torch_can_save_and_not_load_is_refused_at_the_start():
    with pytest.raises(
        TypeError, match=r"model\.table: torch cannot load .* expanded tensor, .*Register its clone"
    ):
        Registry({"model": Buffered(persistent=True)}).capture({})


def test_a_cache_in_a_part_of_a_model_that_is_not_there_is_refused():
    one, two = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(2, 2))
    one.add_module("late", torch.nn.Module())
    one.late.register_buffer("cache", torch.ones(2), persistent=False)
    with pytest.raises(IncompatibleCheckpoint, match=r"model\.late\.cache: the model has no module 'late'"):
        fit(Registry({"model": one}), Registry({"model": two}))


def test_a_teacher_made_under_inference_mode_comes_back():
    def make():
        with torch.inference_mode():
            teacher = torch.nn.BatchNorm1d(2)
            teacher.register_buffer("scratch", torch.randn(2), persistent=False)
        pair = torch.nn.ModuleDict({"teacher": teacher, "student": torch.nn.Linear(2, 2)})
        return {"pair": pair, "optimizer": torch.optim.SGD(pair["student"].parameters())}

    one, two = make(), make()
    with torch.inference_mode():
        one["pair"]["teacher"].running_mean.fill_(3)
    fit(Registry(one), Registry(two))
    assert two["pair"]["teacher"].running_mean.tolist() == [3, 3]
    assert torch.equal(two["pair"]["teacher"].scratch, one["pair"]["teacher"].scratch)
    assert torch.equal(two["pair"]["student"].weight, one["pair"]["student"].weight)
    assert not two["pair"]["student"].weight.is_inference()
    two["pair"]["student"](torch.ones(1, 2)).sum().backward()


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("lazy", [torch.nn.LazyLinear, lambda _: torch.nn.LazyBatchNorm1d()])
def test_a_lazy_module_is_refused_by_its_keyword_before_its_first_batch(lazy):
    model = torch.nn.Sequential(lazy(2))
    with pytest.raises(TypeError, match=r"Session\(net=\.\.\.\): 0\.\w+ of a lazy module is not initialized"):
        Registry({"net": model})
    model(torch.ones(4, 3))
    Registry({"net": model}).capture({})


def test_parameters_keep_their_memory_format():
    def make():
        return torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def train(model, optimizer):
        model(torch.ones(1, 3, 5, 5)).sum().backward()
        optimizer.step()

    one, two = make(), make()
    before, after = torch.optim.Adam(one.parameters()), torch.optim.Adam(two.parameters())
    train(one, before)
    fit(Registry({"model": one, "optimizer": before}), Registry({"model": two, "optimizer": after}))
    assert two.weight.is_contiguous(memory_format=torch.channels_last)
    assert after.state[two.weight]["exp_avg"].stride() == before.state[one.weight]["exp_avg"].stride()


def plateau():
    return torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize("name", ["_init_is_better", "step", "optimizer", "get_last_lr"])
def test_a_value_in_the_place_of_a_schedulers_code_is_damage(name):
    for make in (plateau, lambda: SCHEDULES["nested"](torch.optim.lr_scheduler, plateau().optimizer)):
        saved = Registry({"scheduler": make()}).capture({})
        entries = saved.trees["scheduler"]["$pairs"]
        nested = dict(entries).get("_schedulers")
        if name == "_init_is_better" and nested:
            continue
        if nested:
            nested[1][name] = 1.5
        else:
            entries.append([name, 1.5])
        with pytest.raises(DamagedCheckpoint, match=rf"state\.scheduler.*\.{name} is not a value of a"):
            Registry({"scheduler": make()}).check(saved.trees, shapes_of(saved))


class Warm(torch.optim.lr_scheduler.StepLR):
    """Gets attributes while it runs."""

    best = None

    def get_lr(self):
        self.best, self.later = 1.0, [2.0]
        return super().get_lr()


def test_attributes_that_a_scheduler_gets_while_it_runs_come_back():
    def make():
        return Warm(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), 3)

    one, two = make(), make()
    one.best, one.later = 7.0, [8.0]
    del two.later, two.best
    fit(Registry({"scheduler": one}), Registry({"scheduler": two}))
    assert (two.best, two.later) == (7.0, [8.0])


class Decay:
    """A function with a state, which torch saves and loads as its attributes."""

    def __init__(self):
        self.rate = 0.9

    def __call__(self, count):
        return self.rate**count


@pytest.mark.parametrize("kind", ["lambda", "cyclic"])
def test_a_function_with_a_state_in_a_scheduler_comes_back_and_no_code_of_it(kind):
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
        if kind == "lambda":
            return torch.optim.lr_scheduler.LambdaLR(optimizer, Decay())
        return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, scale_fn=Decay())

    def function(scheduler):
        return scheduler.lr_lambdas[0] if kind == "lambda" else scheduler._scale_fn_custom

    one, two = make(), make()
    function(one).rate = 0.25
    fit(Registry({"scheduler": one}), Registry({"scheduler": two}))
    assert function(two).rate == 0.25
    saved = Registry({"scheduler": one}).capture({})
    tree = dict(saved.trees["scheduler"]["$pairs"])
    (tree["lr_lambdas"][0] if kind == "lambda" else tree["_scale_fn_custom"])["__call__"] = 1
    with pytest.raises(DamagedCheckpoint, match="__call__ is not a value of a Decay"):
        Registry({"scheduler": two}).check(saved.trees, shapes_of(saved))


EVERY_SCHEDULE = SCHEDULES | {
    "plateau": lambda s, o: s.ReduceLROnPlateau(o),
    "steps": lambda s, o: s.MultiStepLR(o, [2, 3]),
    "step": lambda s, o: s.StepLR(o, 3),
    "multiplied": lambda s, o: s.MultiplicativeLR(o, lambda i: 0.9),
    "constant": lambda s, o: s.ConstantLR(o),
    "cosine": lambda s, o: s.CosineAnnealingLR(o, 20),
    "cyclic function": lambda s, o: s.CyclicLR(o, 0.01, 0.1, scale_fn=lambda i: 0.9**i, scale_mode="cycle"),
}


@pytest.mark.parametrize("kind", EVERY_SCHEDULE)
def test_every_schedule_of_torch_is_stored_and_fits(kind):
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return optimizer, EVERY_SCHEDULE[kind](torch.optim.lr_scheduler, optimizer)

    (optimizer, one), (_, two) = make(), make()
    for _ in range(3):
        optimizer.step()
        one.step(*([1.0] if kind == "plateau" else []))
    fit(Registry({"scheduler": one}), Registry({"scheduler": two}))
    state = two.state_dict()
    assert state == one.state_dict()
    assert [type(value) for value in state.values()] == [type(value) for value in one.state_dict().values()]


def test_another_kind_of_object_under_a_keyword_is_refused():
    saved = Registry({"x": Variables(a=1)}).capture({})
    with pytest.raises(IncompatibleCheckpoint, match="x: a module here, another kind of object in the checkpoint"):
        Registry({"x": torch.nn.Linear(2, 2)}).check(saved.trees, shapes_of(saved))
    with pytest.raises(IncompatibleCheckpoint, match="x: Variables here, another kind of object"):
        Registry({"x": Variables()}).check({"x": [1]}, {})
    with pytest.raises(IncompatibleCheckpoint, match="x: an optimizer here, another kind of object"):
        Registry({"x": plateau().optimizer}).check(saved.trees, shapes_of(saved))


@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.defaultdict])
def test_state_of_a_parameter_in_another_mapping_comes_back_or_is_refused(kind):
    class Keeping(torch.optim.SGD):
        def step(self, closure=None):
            parameter = self.param_groups[0]["params"][0]
            self.state[parameter] = kind()
            self.state[parameter]["moment"] = torch.full((2, 8), 3.0)

    def made(steps):
        model = torch.nn.Linear(8, 2)
        optimizer = Keeping(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.step()
        return optimizer

    if kind is collections.defaultdict:
        with pytest.raises(TypeError, match=r"optimizer\.0: a defaultdict would be restored as a plain dict"):
            Registry({"optimizer": made(1)}).capture({})
        return
    one, other = made(1), made(0)
    round_trip(Registry({"optimizer": one}), Registry({"optimizer": other}))
    (found,) = other.state.values()
    assert torch.equal(found["moment"], torch.full((2, 8), 3.0))


def test_a_model_that_every_rank_has_is_not_taken_for_stages():
    registry = Registry({"model": torch.nn.Linear(2, 2), "loader": Variables(position=1)})

    def tree(*names):
        return {"state": dict.fromkeys(names), "metadata": {}, "buffers": {}, "frozen": []}

    state = {"model": tree("weight", "bias", "removed"), "loader": {}}
    same = SimpleNamespace(state=state, rank_states={"1": {"loader": {}, "model": tree(*state["model"]["state"])}})
    assert registry.localized(same) is same
