"""Optimizers inside wrappers: what is saved, whose steps are watched, and what a session says of them."""

import logging

import pytest
import torch

import holdfast
from holdfast.inventory.missing_state import missing
from holdfast.state.wrappers import optimizers_in, unwrapped
from tests.support.wrapped_optimizers import ByHand, Delegating, Flat, Gradients, Lookahead, Several


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


WRAPPED = {
    "delegating": lambda model: Delegating(adam(model)),
    "delegating twice": lambda model: Delegating(Delegating(adam(model))),
    "own state": lambda model: Lookahead(adam(model)),
    "own state inside": lambda model: Delegating(Lookahead(adam(model))),
    "several": lambda model: Several(adam(model[0]), adam(model[1])),
    "by hand": lambda model: ByHand(model.parameters()),
    "flat": lambda model: Flat(adam(model)),
}


class Run:
    def __init__(self, store, wrap, seed, job="job", **objects):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self.optimizer = wrap(self.model)
        self.session = holdfast.Session(
            job, store=store, every=3, model=self.model, optimizer=self.optimizer, **objects
        )

    def losses(self, until):
        self.session.resume()
        found = {}
        while self.session.iteration < until:
            loss = self.model(torch.rand(8, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found[self.session.iteration + 1] = loss.item()
            self.session.step()
            self.session.wait(300)
        return found

    def crash(self):
        self.session._close("SIGKILL")


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_optimizer_resumes_exactly_and_no_copy_is_torn(tmp_path, kind, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    whole = Run(tmp_path, WRAPPED[kind], seed=0, job="whole")
    expected = whole.losses(10)
    whole.crash()
    first = Run(tmp_path, WRAPPED[kind], seed=0)
    first.losses(8)
    first.crash()
    second = Run(tmp_path, WRAPPED[kind], seed=1)
    assert second.session.resume() == 6
    assert second.losses(10) == {iteration: expected[iteration] for iteration in (7, 8, 9, 10)}
    second.crash()
    assert "taken again at once" not in caplog.text
    assert "in no checkpoint: add" not in caplog.text


def test_a_wrapper_without_state_is_left_off_and_the_tensors_keep_their_names(tmp_path):
    run = Run(tmp_path, WRAPPED["delegating"], seed=0)
    run.losses(1)
    names = run.session._training.capture().tensors
    assert {"optimizer.state.exp_avg.0.weight", "optimizer.state.step.1.bias"} <= set(names)
    run.crash()


def test_a_plain_run_goes_on_from_a_wrapped_ones_checkpoint(tmp_path):
    wrapped = Run(tmp_path, WRAPPED["delegating"], seed=0)
    wrapped.losses(3)
    wrapped.crash()
    plain = Run(tmp_path, adam, seed=1)
    assert plain.session.resume() == 3
    assert plain.optimizer.state_dict()["state"][0]["step"] == 3
    plain.crash()


def test_the_optimizers_whose_hooks_run_are_found():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    plain = adam(model)
    assert unwrapped(Delegating(Delegating(plain))) is plain
    assert unwrapped(looking := Lookahead(plain)) is looking
    assert list(optimizers_in(looking)) == [plain]
    several = Several(plain, adam(model))
    assert list(optimizers_in(several)) == list(several.optimizers)
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    assert list(optimizers_in(schedule)) == []
    assert list(optimizers_in(model)) == []


def test_an_update_that_a_scaler_skips_is_not_counted(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    run = Run(tmp_path, lambda model: Delegating(adam(model), scaler), seed=0, scaler=scaler)
    run.session.resume()
    updates = []
    for scale in (1.0, float("inf"), 1.0):
        scaler.scale(run.model(torch.ones(8, 4)).mean() * scale).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        updates.append(run.session._training.updates)
        run.session.step()
    assert updates == [1, 1, 2]
    run.crash()


def test_an_optimizer_whose_steps_cannot_be_seen_is_reported():
    model = torch.nn.Linear(2, 2)
    (message,) = missing({"model": model, "optimizer": ByHand(model.parameters())})
    assert message.startswith("optimizer (ByHand) runs no hooks around its step: training waits while")


def test_a_schedule_over_a_wrapper_knows_the_optimizer_that_was_given():
    model = torch.nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(Delegating(plain), 0.9)
    for given in (plain, schedule.optimizer):
        assert missing({"model": model, "optimizer": given, "schedule": schedule}) == []
    (message,) = missing({"model": model, "schedule": schedule})
    assert "schedule.optimizer (Delegating) is in no checkpoint: add it" in message
    assert "Session(optimizer=...)" in message


def test_a_wrapper_without_a_state_dict_is_refused_with_the_way_out(tmp_path):
    class Noam:
        def __init__(self, optimizer):
            self.optimizer, self.rate = optimizer, 0

    optimizer = Noam(adam(torch.nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"Noam has no state_dict\(\).*Session\(opt=opt.optimizer\)"):
        holdfast.Session("job", store=tmp_path, opt=optimizer)


def test_an_optimizer_that_skips_init_and_has_no_state_dict_is_refused_with_the_way_out(tmp_path):
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters)}]

        def step(self, closure=None): ...

    with pytest.raises(TypeError, match=r"Bare neither calls torch.optim.Optimizer.__init__.*super\(\).__init__"):
        holdfast.Session("job", store=tmp_path, opt=Bare([torch.zeros(1)]))


class Accelerator:
    """accelerate.Accelerator, as far as gradient accumulation goes."""

    def __init__(self, num_steps):
        self.step, self.gradient_state = 0, Gradients(num_steps)

    @property
    def sync_gradients(self):
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value):
        self.gradient_state.sync_gradients = value

    def accumulate(self):
        self.step += 1
        self.sync_gradients = self.step % self.gradient_state.num_steps == 0


def test_the_counter_of_an_accumulation_is_asked_for_once_and_saved(tmp_path):
    model, accelerator = torch.nn.Linear(2, 2), Accelerator(num_steps=2)
    wrapped = Delegating(adam(model), gradient_state=accelerator.gradient_state)
    (message,) = missing({"model": model, "optimizer": wrapped})
    assert "accumulates gradients over 2 iterations" in message
    assert "add it to the session, Session(accelerator=...)" in message
    assert missing({"model": model, "optimizer": wrapped, "accelerator": accelerator}) == []
    with holdfast.Session("job", store=tmp_path, accelerator=accelerator) as session:
        session.resume()
        accelerator.accumulate()
        session.step()
    again = Accelerator(num_steps=2)
    with holdfast.Session("job", store=tmp_path, accelerator=again) as session:
        assert session.resume() == 1
    assert (again.step, again.sync_gradients) == (1, False)


def test_accelerate_resumes_exactly_within_an_accumulation(tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def losses(store, until):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Linear(4, 1)
        optimizer = adam(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        session = holdfast.Session(
            "job", store=store, every=1, model=model, optimizer=optimizer, schedule=schedule,
            accelerator=accelerator,
        )  # fmt: skip
        session.resume()
        found = {}
        while session.iteration < until:
            with accelerator.accumulate(model):
                loss = model(torch.rand(8, 4)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found[session.iteration + 1] = loss.item()
            session.step()
            session.wait(300)
        session._close("SIGKILL")
        return found

    whole = losses(tmp_path / "whole", 8)
    assert losses(tmp_path / "cut", 3) | losses(tmp_path / "cut", 8) == whole
