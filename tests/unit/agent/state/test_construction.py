"""Settings that the script changed since the checkpoint are named, and kept on request."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast.errors import IncompatibleCheckpoint
from holdfast.state.construction import describe
from holdfast.state.registry import Registry, shapes_of

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Job:
    def __init__(self, schedule=None, optimizer=SGD, **settings):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = optimizer(self.model.parameters(), **settings)
        objects = {"model": self.model, "optimizer": self.optimizer}
        self.schedule = schedule(self.optimizer) if schedule else None
        if schedule:
            objects["scheduler"] = self.schedule
        self.registry = Registry(objects)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step(*([1.0] if isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau) else []))
        return self

    def rates(self, steps):
        rates = []
        for _ in range(steps):
            self.train(1)
            rates.append(self.optimizer.param_groups[0]["lr"])
        return rates


def resume(saved, into, *, older=False):
    """Resume `into` from what `saved` is now; return the messages about settings."""
    captured = saved.registry.capture({})
    trees = dict(captured.trees)
    if older:
        trees = {k: {n: v for n, v in tree.items() if n != "construction"} for k, tree in trees.items()}
    shapes = shapes_of(captured)
    into.registry.check(trees, shapes)
    messages = describe(into.registry.differences(trees, shapes))
    into.registry.apply(trees, {name: tensor.clone() for name, tensor in captured.tensors.items()}, shapes)
    return messages


ADAMW = torch.optim.AdamW
OPTIMIZERS = [
    (SGD, {"lr": 0.5}, "lr 0.1 (here 0.5)"),
    (SGD, {"nesterov": True}, "nesterov False (here True)"),
    (ADAMW, {"betas": (0.8, 0.9)}, "betas (0.9, 0.999) (here (0.8, 0.9))"),
    (ADAMW, {"weight_decay": 0}, "weight_decay 0.01 (here 0)"),
    (ADAMW, {"amsgrad": True}, "amsgrad False (here True)"),
    (ADAMW, {"foreach": False}, "foreach None (here False)"),
    (torch.optim.Adadelta, {"eps": 1.0}, "eps 1e-06 (here 1.0)"),
    (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe"}, "line_search_fn None (here 'strong_wolfe')"),
    (torch.optim.LBFGS, {"history_size": 5}, "history_size 100 (here 5)"),
]


@pytest.mark.parametrize("older", [False, True], ids=["today", "older"])
@pytest.mark.parametrize(
    ("optimizer", "here", "what"), OPTIMIZERS, ids=lambda each: getattr(each, "__name__", str(each))[:40]
)
def test_a_setting_of_an_optimizer_is_named_with_both_values_and_the_way_to_take_the_scripts(
    optimizer, here, what, older
):
    one, two = Job(optimizer=optimizer), Job(optimizer=optimizer, **here)
    (message,) = resume(one, two, older=older)
    (name,) = here
    assert message == (
        f"settings of the checkpoint replace those of the script: optimizer {what}. To use the script's, call "
        f'session.keep(optimizer="{name}") before session.resume(), or give an adapter '
        f'keep_settings={{"optimizer": "{name}"}}'
    )
    assert two.optimizer.param_groups[0][name] == one.optimizer.param_groups[0][name]


def warm_up(optimizer, length=4):
    return lr_scheduler.LambdaLR(optimizer, lambda count: min(1.0, count / length))


def decayed(count, *, num_warmup_steps, factor):
    return factor ** max(0, count - num_warmup_steps)


def sequence(optimizer, length=8, warm=2):
    parts = [
        lr_scheduler.LinearLR(optimizer, total_iters=warm),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=length),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [warm])


def chained(optimizer, gamma=0.9):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, gamma)]
    )


SCHEDULES = [
    (lr_scheduler.CosineAnnealingLR, {"T_max": 8}, {"T_max": 16}, "T_max 8 (here 16)"),
    (lr_scheduler.StepLR, {"step_size": 2}, {"step_size": 3}, "step_size 2 (here 3)"),
    (lr_scheduler.ExponentialLR, {"gamma": 0.9}, {"gamma": 0.8}, "gamma 0.9 (here 0.8)"),
    (lr_scheduler.MultiStepLR, {"milestones": [2, 3]}, {"milestones": [4]}, "milestones (2, 3) (here (4))"),
    (lr_scheduler.LinearLR, {"total_iters": 8}, {"total_iters": 9}, "total_iters 8 (here 9)"),
    (lr_scheduler.PolynomialLR, {"power": 1.0}, {"power": 2.0}, "power 1.0 (here 2.0)"),
    (lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 3}, {"T_0": 4}, "T_0 3 (here 4)"),
    (sequence, {"length": 8}, {"length": 12}, "T_max 8 (here 12)"),
    (sequence, {"warm": 2}, {"warm": 3}, "total_iters 2 (here 3), milestones (2) (here (3))"),
    (chained, {"gamma": 0.9}, {"gamma": 0.7}, "gamma 0.9 (here 0.7)"),
]


@pytest.mark.parametrize(
    ("make", "before", "now", "what"), SCHEDULES, ids=lambda each: getattr(each, "__name__", str(each))[:40]
)
def test_a_setting_of_a_schedule_is_named_and_kept_as_if_the_job_had_had_it_from_the_start(
    make, before, now, what
):
    one, two = Job(functools.partial(make, **before)).train(5), Job(functools.partial(make, **now))
    (message,) = resume(one, two)
    assert f"scheduler {what}. To use the script's, call session.keep(scheduler=" in message
    assert two.schedule.state_dict() == one.schedule.state_dict()
    kept, expected = Job(functools.partial(make, **now)), Job(functools.partial(make, **now))
    names = [part.split()[0] for part in what.split("), ")]
    kept.registry.keep((), {"scheduler": names})
    assert resume(one, kept) == []
    expected.train(5)
    assert kept.optimizer.param_groups[0]["lr"] == pytest.approx(expected.optimizer.param_groups[0]["lr"])
    assert kept.rates(6) == pytest.approx(expected.rates(6))


def test_a_one_cycle_schedule_is_lengthened():
    def cycle(total):
        return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=total)

    one, two, expected = Job(cycle(8)).train(7), Job(cycle(16)), Job(cycle(16)).train(7)
    (message,) = resume(one, two)
    assert "scheduler total_steps 8 (here 16). To use the script's, call session.keep(scheduler=\"total" in message
    kept = Job(cycle(16))
    kept.registry.keep((), {"scheduler": ["total_steps"]})
    assert resume(one, kept) == []
    assert kept.rates(8) == pytest.approx(expected.rates(8))
    assert kept.optimizer.param_groups[0]["momentum"] == pytest.approx(
        expected.optimizer.param_groups[0]["momentum"]
    )


def test_what_a_schedule_derives_from_an_argument_is_compared_too():
    def cycle(share):
        return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20, pct_start=share)

    (message,) = resume(Job(cycle(0.3)), Job(cycle(0.5)))
    assert "scheduler _schedule_phases" in message


def test_a_plateau_schedule_keeps_its_count_with_the_scripts_patience():
    def plateau(patience):
        return lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience)

    one, two = Job(plateau(10)).train(3), Job(plateau(4))
    two.registry.keep((), {"scheduler": ["patience"]})
    assert resume(one, two) == []
    assert (two.schedule.patience, two.schedule.num_bad_epochs) == (4, one.schedule.num_bad_epochs)


def test_values_of_functions_are_named_as_those_in_force():
    (message,) = resume(Job(warm_up), Job(functools.partial(warm_up, length=6)))
    assert message == (
        "the checkpoint was trained with other settings than those of the script; the script's are in force: "
        "scheduler length 4 (here 6)"
    )

    def partial(**arguments):
        return lambda optimizer: lr_scheduler.LambdaLR(optimizer, functools.partial(decayed, **arguments))

    one = Job(partial(num_warmup_steps=2, factor=0.5))
    (message,) = resume(one, Job(partial(num_warmup_steps=3, factor=0.5)))
    assert "scheduler num_warmup_steps 2 (here 3)" in message
    decay = [Job(lambda o, f=f: lr_scheduler.LambdaLR(o, f)) for f in (lambda i: 0.9**i, lambda i: 0.8**i)]
    (message,) = resume(*decay)
    assert "constants of <lambda> (0.9) (here (0.8))" in message


def test_a_difference_is_named_at_each_resume_until_the_scripts_value_is_in_force():
    one, two, three = Job(lr=0.1), Job(lr=0.2), Job(lr=0.2)
    assert len(resume(one, two)) == 1
    assert len(resume(two.train(1), three)) == 1
    four, five = Job(lr=0.2), Job(lr=0.2)
    four.registry.keep((), {"optimizer": ["lr"]})
    assert resume(three, four) == []
    assert four.optimizer.param_groups[0]["lr"] == 0.2
    assert resume(four, five) == []


def test_the_scripts_learning_rate_moves_a_schedule_and_several_settings_are_kept():
    def cosine(length):
        return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)

    one, two = Job(cosine(20), lr=0.1).train(5), Job(cosine(30), lr=0.4, weight_decay=0.3)
    (message,) = resume(one, Job(cosine(30), lr=0.4, weight_decay=0.3))
    assert 'session.keep(optimizer=["lr", "weight_decay"], scheduler="T_max")' in message
    two.registry.keep((), {"optimizer": ["lr", "weight_decay"], "scheduler": ["T_max"]})
    assert resume(one, two) == []
    assert two.optimizer.param_groups[0]["weight_decay"] == 0.3
    assert two.rates(4) == pytest.approx(Job(cosine(30), lr=0.4).train(5).rates(4))
    rate_only = Job(cosine(20), lr=0.4)
    rate_only.registry.keep((), {"optimizer": ["lr"]})
    resume(one, rate_only)
    assert rate_only.rates(4) == pytest.approx(Job(cosine(20), lr=0.4).train(5).rates(4))


def test_groups_are_compared_one_by_one():
    def groups(parameters, decay=0.1):
        weight, bias = parameters
        return torch.optim.AdamW(
            [{"params": [weight], "weight_decay": decay}, {"params": [bias], "lr_scale": 0.5}]
        )

    one, two = Job(optimizer=groups), Job(optimizer=functools.partial(groups, decay=0.2))
    (message,) = resume(one, two)
    assert "optimizer weight_decay 0.1 (here 0.2). To" in message
    kept = Job(optimizer=functools.partial(groups, decay=0.2))
    kept.registry.keep((), {"optimizer": ["weight_decay"]})
    resume(one, kept)
    assert [group["weight_decay"] for group in kept.optimizer.param_groups] == [0.2, 0.01]


class Counting(torch.optim.SGD):
    """Keeps counters among the settings of its groups, as optimizers without a schedule do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group |= {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "d": 1e-6, "train_mode": False}
        self.defaults |= {"k": 0, "weight_sum": 0.0}

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += 0.5
            group["lr_max"], group["d"], group["train_mode"] = 3.0, 0.1, True
        return super().step(closure)


@pytest.mark.parametrize("older", [False, True], ids=["today", "older"])
def test_what_training_changes_is_no_setting(older):
    one, two = Job(optimizer=Counting).train(3), Job(optimizer=Counting)
    assert resume(one, two, older=older) == []
    assert two.optimizer.param_groups[0]["k"] == 3
    for make in (warm_up, sequence, chained, lambda o: lr_scheduler.CosineAnnealingLR(o, 8)):
        assert resume(Job(make).train(3), Job(make), older=older) == []
    cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=20)
    for optimizer in (SGD, ADAMW):
        assert resume(Job(cycle, optimizer).train(3), Job(cycle, optimizer), older=older) == []


def test_a_rate_that_the_script_sets_in_every_iteration_is_no_difference():
    one = Job().train(1)
    one.optimizer.param_groups[0]["lr"] = 0.033
    assert resume(one, Job()) == []


def test_unknown_names_are_refused_with_those_that_there_are():
    job = Job(lambda o: lr_scheduler.StepLR(o, 3))
    with pytest.raises(
        ValueError, match=r"session\.keep: the session has no 'optim'; it has model, optimizer, sch"
    ):
        job.registry.keep((), {"optim": ["lr"]})
    with pytest.raises(ValueError, match=r"session\.keep\(optimizer='decay'\): .* there are: lr, momentum, "):
        job.registry.keep((), {"optimizer": ["decay"]})
    with pytest.raises(
        ValueError, match=r"keep\(scheduler='T_max'\): no such setting; there are: step_size, gamma"
    ):
        job.registry.keep((), {"scheduler": ["T_max"]})


@pytest.mark.parametrize("older", [False, True], ids=["today", "older"])
def test_another_schedule_is_refused(older):
    steps, cosine = (lambda o: lr_scheduler.StepLR(o, 3)), (lambda o: lr_scheduler.CosineAnnealingLR(o, 3))
    with pytest.raises(IncompatibleCheckpoint, match=r"scheduler: .*CosineAnnealingLR"):
        resume(Job(steps), Job(cosine), older=older)


def test_schedules_of_equal_attributes_are_told_apart_by_their_class():
    one, two = (
        Job(lambda o, kind=kind: kind(o, lambda count: 0.5))
        for kind in (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR)
    )
    with pytest.raises(
        IncompatibleCheckpoint, match="scheduler: a MultiplicativeLR here, a LambdaLR in the checkpoint"
    ):
        resume(one, two)


class WithArguments(lr_scheduler.LRScheduler):
    def __init__(self, optimizer, length):
        self.length = length
        super().__init__(optimizer)

    def get_lr(self):
        return [base * max(0.0, 1 - self.last_epoch / self.length) for base in self.base_lrs]

    def step(self, value=None):
        if self.last_epoch >= 0 and value is None:
            raise ValueError("give the metric")
        super().step()


def test_a_schedule_that_cannot_be_replayed_is_refused_before_anything_changes():
    def make(length):
        job = Job(lambda o: WithArguments(o, length))
        job.optimizer.step()
        job.schedule.step(1.0)
        return job

    one, two = make(8), Job(lambda o: WithArguments(o, 16))
    two.registry.keep((), {"scheduler": ["length"]})
    with pytest.raises(IncompatibleCheckpoint, match=r"scheduler: its steps cannot be repeated .*give the metric"):
        resume(one, two)


class OwnSchedule:
    """A schedule of the script, with all its attributes in its state."""

    def __init__(self, optimizer, total, scale=math.inf):
        self.optimizer, self.total, self.scale, self.count = optimizer, total, scale, 0

    def step(self):
        self.count += 1

    def state_dict(self):
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state):
        vars(self).update(state)


def test_a_schedule_of_the_script_is_compared_too():
    one, two = Job(lambda o: OwnSchedule(o, 8)).train(3), Job(lambda o: OwnSchedule(o, 16))
    (message,) = resume(one, two)
    assert "scheduler total 8 (here 16)" in message
    assert (two.schedule.total, two.schedule.count) == (8, 3)
    kept = Job(lambda o: OwnSchedule(o, 16))
    kept.registry.keep((), {"scheduler": ["total"]})
    assert resume(one, kept) == []
    assert (kept.schedule.total, kept.schedule.count) == (16, 3)


@pytest.mark.parametrize("enabled", [(False, True), (True, False)], ids=["enabled", "disabled"])
def test_a_scaler_that_is_switched_is_named(enabled):
    one, two = (Registry({"scaler": torch.amp.GradScaler("cpu", enabled=each)}) for each in enabled)
    captured = one.capture({})
    two.check(captured.trees, shapes_of(captured))
    (message,) = describe(two.differences(captured.trees, shapes_of(captured)))
    assert message.endswith(f"in force: scaler enabled {enabled[0]} (here {enabled[1]})")
    before = two.objects["scaler"].state_dict()
    two.apply(captured.trees, captured.tensors, shapes_of(captured))
    assert two.objects["scaler"].state_dict() == before


def test_settings_of_a_scaler_are_named_and_kept():
    one, two, three = (
        Registry({"scaler": torch.amp.GradScaler("cpu", growth_interval=each)}) for each in (2000, 100, 100)
    )
    captured = one.capture({})
    (message,) = describe(two.differences(captured.trees, shapes_of(captured)))
    assert "scaler growth_interval 2000 (here 100)" in message
    three.keep((), {"scaler": ["growth_interval"]})
    three.apply(captured.trees, captured.tensors, shapes_of(captured))
    assert three.objects["scaler"].get_growth_interval() == 100


@pytest.mark.parametrize(
    "construction",
    [1, {}, {"kind": 1, "settings": {}, "fixed": {}}, {"kind": "SGD"}],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_construction_that_cannot_be_read_is_left_out(construction):
    one, two = Job(), Job()
    captured = one.registry.capture({})
    trees = {**captured.trees, "optimizer": {**captured.trees["optimizer"], "construction": construction}}
    two.registry.check(trees, shapes_of(captured))
    assert two.registry.differences(trees, shapes_of(captured)) == []


def test_an_optimizer_that_is_left_as_it_is_has_the_rate_of_its_schedule():
    def first_weight(parameters):
        return torch.optim.SGD([next(iter(parameters))], lr=0.1)

    def step(optimizer):
        return lr_scheduler.StepLR(optimizer, 2)

    one, two = Job(step).train(3), Job(step, first_weight)
    two.registry.keep(["optimizer"], {})
    captured = one.registry.capture({})
    shapes = shapes_of(captured)
    (message,) = two.registry.leave_unfitting(captured.trees, shapes)
    assert message.startswith(
        "optimizer starts as the script created it, as session.keep requests: optimizer: [1] parameters"
    )
    two.registry.check(captured.trees, shapes)
    two.registry.apply(captured.trees, captured.tensors, shapes)
    assert two.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert torch.equal(one.model.weight, two.model.weight)


def test_an_object_that_refers_to_a_schedule_and_has_a_state_of_its_own_is_no_schedule():
    class Trainer:
        def __init__(self, scheduler):
            self.scheduler, self.epoch = scheduler, 0

        def state_dict(self):
            return {"epoch": self.epoch, "schedule": self.scheduler.state_dict()}

        def load_state_dict(self, state):
            self.epoch = state["epoch"]
            self.scheduler.load_state_dict(state["schedule"])

    one, two = (Trainer(lr_scheduler.StepLR(SGD([nn.Parameter(torch.zeros(1))]), 3)) for _ in range(2))
    one.epoch = 4
    captured = Registry({"trainer": one}).capture({})
    into = Registry({"trainer": two})
    into.check(captured.trees, shapes_of(captured))
    into.apply(captured.trees, captured.tensors, shapes_of(captured))
    assert two.epoch == 4
