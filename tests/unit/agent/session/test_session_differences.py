"""What a checkpoint and the script have different: named, kept on request, or refused with nothing changed."""

import pytest
import torch

import holdfast
from holdfast.errors import IncompatibleCheckpoint, RestoreFailed


class Average:
    """An object of the script, which loads the state of its own version only."""

    def __init__(self, version=1, refuses_all=False):
        self.values, self._version, self._refuses_all = torch.zeros(4), version, refuses_all

    def state_dict(self):
        return {"values": self.values, "version": self._version}

    def load_state_dict(self, state):
        self.values = state["values"]
        if self._refuses_all or state["version"] != self._version:
            self.values = None
            raise RuntimeError("another version")


class Job:
    def __init__(self, store, weight_decay=0.01, **objects):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=weight_decay)
        self.session = holdfast.Session(
            "job",
            store=store,
            every=1,
            model=self.model,
            optimizer=self.optimizer,
            loop=holdfast.Variables(),
            **objects,
        )

    def train(self, until):
        self.session.resume()
        while self.session.iteration < until:
            self.optimizer.zero_grad()
            self.model(torch.randn(2, 4)).square().mean().backward()
            self.optimizer.step()
            self.session.step()
            self.session.wait(300)
        return self

    def close(self):
        self.session._close("SIGKILL")


def trained(store, until=2, **arguments):
    job = Job(store, **arguments).train(until)
    job.close()
    return job


@pytest.fixture
def jobs():
    """Jobs to close after the test."""
    made = []
    yield made
    for job in made:
        job.close()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_differing_setting_is_named_once_and_the_script_may_keep_its_own(tmp_path, caplog, jobs):
    trained(tmp_path)
    jobs.append(Job(tmp_path, weight_decay=0.5).train(4))
    (message,) = warnings(caplog)
    assert message == (
        "job: settings of the checkpoint replace those of the script: optimizer weight_decay 0.01 (here 0.5). To "
        'use the script\'s, call session.keep(optimizer="weight_decay") before session.resume(), or give an '
        'adapter keep_settings={"optimizer": "weight_decay"}'
    )
    assert jobs[0].optimizer.param_groups[0]["weight_decay"] == 0.01
    jobs.pop().close()
    caplog.clear()
    kept = Job(tmp_path, weight_decay=0.5)
    jobs.append(kept)
    kept.session.keep(optimizer="weight_decay")
    kept.train(6)
    assert kept.optimizer.param_groups[0]["weight_decay"] == 0.5
    with pytest.raises(ValueError, match=r"call it before session\.resume\(\)"):
        kept.session.keep("optimizer")
    jobs.pop().close()
    jobs.append(Job(tmp_path, weight_decay=0.5).train(7))
    assert jobs[0].optimizer.param_groups[0]["weight_decay"] == 0.5
    assert warnings(caplog) == []


def test_an_adapter_keeps_settings_and_objects_by_an_argument(tmp_path, caplog, jobs):
    trained(tmp_path)
    kept = Job(
        tmp_path,
        weight_decay=0.5,
        average=Average(),
        keep_settings={"optimizer": ["weight_decay"], "average": None},
    )
    jobs.append(kept)
    kept.train(4)
    assert kept.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert not [message for message in warnings(caplog) if "replace those of the script" in message]
    with pytest.raises(
        ValueError, match=r"session\.keep\(optimizer='weight_decy'\): no such setting; there are: lr"
    ):
        Job(tmp_path, keep_settings={"optimizer": "weight_decy"})
    with pytest.raises(ValueError, match="the session has no 'optimiser'; it has model, optimizer, loop"):
        Job(tmp_path, keep_settings={"optimiser": "lr"})


def test_a_restore_in_place_keeps_the_setting_too(tmp_path, caplog, jobs):
    trained(tmp_path)
    kept = Job(tmp_path, weight_decay=0.5)
    jobs.append(kept)
    kept.session.keep(optimizer=["weight_decay"])
    kept.train(4)
    kept.session.restore(2)
    kept.session.step()
    assert kept.session.iteration == 2
    assert kept.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert warnings(caplog) == []


def test_an_object_that_does_not_fit_is_refused_with_the_way_to_start_without_it(tmp_path, caplog, jobs):
    trained(tmp_path)

    def with_average():
        jobs.append(Job(tmp_path, average=Average()))
        return jobs[-1]

    with pytest.raises(
        IncompatibleCheckpoint, match=r"holds no 'average'.*call session\.keep\(\"average\"\) before"
    ):
        with_average().session.resume()
    jobs.pop().close()
    kept = with_average()
    kept.session.keep("average")
    kept.average = kept.session._training.registry.objects["average"]
    kept.average.values.fill_(7)
    kept.train(3)
    assert (
        "average starts as the script created it, as session.keep requests: the checkpoint holds no" in caplog.text
    )
    assert kept.optimizer.state
    jobs.pop().close()
    again = with_average()
    again.session.keep("average")
    again.session.resume()
    assert (again.session._training.registry.objects["average"].values == 7).all()


def test_what_refuses_its_state_is_named_and_everything_is_put_back(tmp_path, jobs):
    trained(tmp_path, first=Average(), second=Average())
    first, second = Average(), Average(version=2)
    job = Job(tmp_path, first=first, second=second)
    jobs.append(job)
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    first.values.fill_(3)
    torch.manual_seed(5)
    with pytest.raises(
        IncompatibleCheckpoint,
        match=r"second: Average refused its state: RuntimeError: another version\. .*session\.keep\(\"second\"\)",
    ):
        job.session.resume()
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(before[name], tensor) for name, tensor in job.model.state_dict().items())
    assert not job.optimizer.state
    assert (first.values == 3).all()
    assert (second.values == 0).all()
    assert job.session.iteration == 0
    job.session.keep("second")
    assert job.session.resume() == 2
    assert (first.values == 0).all()
    assert (second.values == 0).all()
    assert job.optimizer.state


def test_a_refused_state_that_cannot_be_put_back_ends_the_script(tmp_path, jobs):
    trained(tmp_path, average=Average())
    jobs.append(Job(tmp_path, average=Average(refuses_all=True)))
    with pytest.raises(
        RestoreFailed, match=r"average: Average refused .* and average could not be put back .*start the"
    ):
        jobs[0].session.resume()


def test_a_state_refused_in_place_is_named_and_training_goes_on_from_where_it_was(tmp_path, caplog, jobs):
    average = Average()
    job = Job(tmp_path, average=average).train(3)
    jobs.append(job)
    average._version = 2  # as of a script that changed what it saves
    weight = job.model.weight.detach().clone()
    job.session.restore(2)
    job.session.step()
    assert job.session.iteration == 4
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "average: Average refused its state: RuntimeError: another version; training went back to" in error
    assert torch.equal(job.model.weight, weight)


@pytest.fixture
def train_on(tmp_path, caplog, jobs):
    """A function that goes on with a job until an iteration, and returns its warnings."""

    def train(given, until, dataset, batch_size=4):
        loader = holdfast.DataLoader(dataset, batch_size=batch_size)
        jobs.append(Job(tmp_path, **({"loader": loader} if given else {})))
        session = jobs[-1].session
        for _ in session.batches(loader):
            session.step()
            session.wait(300)
            if session.iteration >= until:
                break
        jobs.pop().close()
        return warnings(caplog)

    return train


@pytest.mark.parametrize("given", [False, True], ids=["drawn", "given"])
def test_settings_of_a_loader_are_named_once(train_on, caplog, given):
    data = torch.zeros(64, 4)
    assert train_on(given, 3, data, 4) == []
    (message,) = train_on(given, 4, data, 8)
    assert message.endswith(
        "other settings than those of the script; the script's are in force: loader batch_size 4 (here 8)"
    )
    caplog.clear()
    assert train_on(given, 5, data, 8) == []


@pytest.mark.parametrize("given", [False, True], ids=["drawn", "given"])
def test_another_random_split_is_named(train_on, given):
    def split(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.utils.data.random_split(torch.zeros(640, 4), [600, 40], generator=generator)[0]

    assert train_on(given, 3, split(1)) == []
    assert train_on(given, 4, split(1)) == []
    (message,) = train_on(given, 5, split(2))
    some = " (here ".join(f"({', '.join(map(str, split(seed).indices[::76]))})" for seed in (1, 2))
    assert message.endswith(f"the script's are in force: loader indices of 600 samples {some})")


@pytest.mark.parametrize("given", [False, True], ids=["drawn", "given"])
def test_a_subset_of_another_size_is_named_once(train_on, given):
    subset = torch.utils.data.Subset(torch.zeros(64, 4), list(range(40)))
    train_on(given, 3, subset)
    subset.indices += [40, 41, 42]
    (message,) = train_on(given, 4, subset)
    assert "the checkpoint was taken with 40 samples, and now there are 43 samples" in message


def test_settings_of_any_object_that_names_them_are_compared(tmp_path, caplog, jobs):
    def trainer(max_steps):
        made = Average()
        made.script_settings, made.replaced_settings = {"max_steps": max_steps}, {"version": 1}
        return made

    trained(tmp_path, trainer=trainer(8))
    jobs.append(Job(tmp_path, trainer=trainer(16)))
    jobs[0].session.resume()
    (message,) = warnings(caplog)
    assert message.endswith("in force: trainer max_steps 8 (here 16)")
