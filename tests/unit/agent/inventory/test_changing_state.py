"""State that training changes and no checkpoint holds is named once; what is saved, or computed anew, is not."""

import collections
import logging
import random
import types

import numpy
import pytest
import torch

import holdfast
from holdfast.inventory import attribute_walk, changing_state


class Loop:
    """A session over a model, with iterations in which the script changes what it likes."""

    def __init__(self, store, model=None, optimizer=None, every=1, **given):
        self.model = torch.nn.Linear(4, 1) if model is None else model
        parameters = list(self.model.parameters()) or [torch.nn.Parameter(torch.zeros(1))]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1) if optimizer is None else optimizer
        given = {"model": self.model, "optimizer": self.optimizer, **given}
        self.session = holdfast.Session("job", store=store, every=every, **given)

    def run(self, change, iterations=12):
        with self.session as session:
            session.resume()
            for iteration in range(1, iterations + 1):
                change(iteration)
                session.step()
                if (comparing := session._training._watch._changing._comparing) is not None:
                    comparing.result()


@pytest.fixture
def named(caplog, tmp_path, monkeypatch):
    """Return a function that trains, and returns the paths of each report."""
    monkeypatch.setattr(changing_state, "SLICE_SECONDS", 60.0)
    monkeypatch.setattr(changing_state, "START_SECONDS", 60.0)

    def run(loop, change, iterations=14):
        caplog.clear()
        loop.run(change, iterations)
        reports = [text for each in caplog.records if "training changes " in (text := each.getMessage())]
        assert not [each for each in caplog.records if each.levelno > logging.WARNING]
        return [text.partition("training changes ")[2].partition(", which no")[0] for text in reports]

    return run


class Holder:
    """An object of the script."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Trainer(Holder):
    """An object of the script with a `state_dict` that has a part of it."""

    saved = ()

    def state_dict(self):
        return {new: getattr(self, name) for name, new in self.saved}

    def load_state_dict(self, state_dict): ...


class Slotted:
    __slots__ = ("state",)

    def __init__(self):
        self.state = 0


class SlottedQueue(Slotted):
    """An iterable object that the session is given."""

    __slots__ = ()

    def __iter__(self):
        return iter(())

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state_dict):
        self.state = state_dict["state"]


class Normalization(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.initialized = False


class WithExtraState(Normalization):
    def get_extra_state(self):
        return {"initialized": self.initialized}

    def set_extra_state(self, state):
        self.initialized = state["initialized"]


def set_attribute(item, name, value):
    return lambda iteration: setattr(item, name, value(iteration))


def test_a_flag_that_the_first_iteration_sets_is_named(named, tmp_path):
    model = torch.nn.Sequential(Normalization(), torch.nn.Linear(4, 1))
    (report,) = named(Loop(tmp_path, model), set_attribute(model[0], "initialized", lambda _: True))
    assert report == "model.0.initialized (False → True)"


def test_a_change_is_named_although_no_checkpoint_was_taken_before_the_next_comparison(named, tmp_path):
    model = torch.nn.Sequential(Normalization(), torch.nn.Linear(4, 1))
    loop = Loop(tmp_path, model, every=1000, trainer=Trainer())
    (report,) = named(loop, set_attribute(model[0], "initialized", lambda _: True))
    assert report == "model.0.initialized (False → True)"


def test_a_given_object_without_attributes_does_not_end_the_comparison(named, tmp_path):
    model = torch.nn.Sequential(Normalization(), torch.nn.Linear(4, 1))
    loop = Loop(tmp_path, model, queue=SlottedQueue())
    (report,) = named(loop, set_attribute(model[0], "initialized", lambda _: True))
    assert report == "model.0.initialized (False → True)"


@pytest.mark.parametrize(
    "value",
    [
        lambda iteration: 1.0 / (1 + iteration),
        lambda iteration: iteration,
        lambda iteration: f"stage {iteration}",
        lambda iteration: [iteration, iteration + 1],
        lambda iteration: {"a": {"b": iteration}},
        lambda iteration: list(range(1000 + iteration)),
        lambda iteration: collections.deque([iteration], maxlen=1),
        lambda iteration: torch.full((3,), iteration),
        lambda iteration: torch.full((300, 300), float(iteration)),
        lambda iteration: [{"input_ids": torch.full((2, 3), iteration)}],
        lambda iteration: numpy.full((40, 40), iteration),
        lambda iteration: numpy.float64(iteration),
    ],
)
def test_a_value_that_changes_is_named(named, tmp_path, value):
    loop = Loop(tmp_path)
    loop.model.state = value(0)
    (report,) = named(loop, set_attribute(loop.model, "state", value))
    assert report.startswith("model.state")


def test_attributes_of_an_optimizer_are_compared(named, tmp_path):
    model = torch.nn.Linear(4, 1)

    class Adagrad(torch.optim.SGD):
        momentum_initialized = False

    optimizer = Adagrad(model.parameters(), lr=0.1)
    optimizer.momentum_initialized, optimizer._step = False, 0

    def change(iteration):
        optimizer.momentum_initialized, optimizer._step = True, iteration

    reports = named(Loop(tmp_path, model, optimizer), change)
    assert [each.split(" ")[0] for each in reports] == ["optimizer.momentum_initialized", "optimizer._step"]


class Fused(torch.optim.SGD):
    """Fills scalar tensors with its settings at each step, as optimizers with a compiled step do."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self._lr_t, self._step_t, self._scale_t, self._scaled_lr_t = (torch.tensor(0.0) for _ in range(4))

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                self._step_t.fill_(state["step"])
            self._lr_t.fill_(group["lr"])
            self._scaled_lr_t.fill_(group["lr"] * 0.7)
        self._scale_t += 1  # is carried on, although the number of steps is equal


def test_scalars_that_a_step_fills_with_settings_are_not_named(named, tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = Fused(model.parameters())

    def change(iteration):
        optimizer.param_groups[0]["lr"] = 0.1 / iteration
        optimizer.step()

    (report,) = named(Loop(tmp_path, model, optimizer), change)
    assert report == "optimizer._scale_t"


def test_a_deep_environment_is_found(named, tmp_path):
    generators = Holder(numpy=numpy.random.default_rng(1), python=random.Random(1), torch=torch.Generator())
    environment = Holder(state=numpy.zeros(4), slotted=Slotted(), generators=generators)
    for number in range(8):
        environment = Holder(**{f"level{number}": environment})
    path = "trainer.it.level7.level6.level5.level4.level3.level2.level1.level0"

    def change(iteration):
        deep = trainer.it.level7.level6.level5.level4.level3.level2.level1.level0
        deep.state[0] = iteration
        deep.slotted.state = iteration
        deep.generators.numpy.random()
        deep.generators.python.random()
        torch.rand(1, generator=deep.generators.torch)

    trainer = Trainer(it=environment)
    (report,) = named(Loop(tmp_path, trainer=trainer), change)
    for name in ("state", "slotted.state", "generators.numpy", "generators.python", "generators.torch"):
        assert f"{path}.{name}" in report


def test_alike_attributes_are_named_together(named, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), *(Normalization() for _ in range(9)))

    def change(iteration):
        for each in list(model)[1:]:
            each.initialized = True

    assert named(Loop(tmp_path, model), change) == [
        "model.1.initialized (False → True) and 8 more such attributes"
    ]


def test_what_the_first_batch_creates_is_named_and_a_mask_is_not(named, tmp_path):
    loop = Loop(tmp_path)
    loop.model.scale = loop.model.inputs = loop.model.causal_mask = loop.model.rows = None

    def change(iteration):
        if iteration == 1:
            loop.model.scale, loop.model.causal_mask = torch.rand(4), torch.ones(4, 4)
            loop.model.inputs, loop.model.rows = [{"input_ids": torch.arange(4)}], torch.arange(4)

    assert named(loop, change) == ["model.scale, model.inputs"]


def test_what_a_state_dict_has_is_not_named(named, tmp_path):
    trainer = Trainer(_step=0, _epochs=0, best_value=0.5, initialized=False, ema=torch.zeros(4), other=0)
    trainer.saved = (
        ("_step", "step"),
        ("_epochs", "n"),
        ("best_value", "best_reward"),
        ("initialized", "is_initialized"),
        ("ema", "ema"),
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), WithExtraState())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loop = Loop(tmp_path, model, optimizer, trainer=trainer, schedule=schedule, scaler=torch.amp.GradScaler("cpu"))

    def change(iteration):
        optimizer.step()
        schedule.step()
        trainer._step, trainer._epochs = iteration, 3 * iteration
        trainer.best_value, trainer.initialized = 0.5 / iteration, True
        trainer.ema = torch.full((4,), float(iteration))
        model[1].initialized = True

    assert named(loop, change) == []


class Average:
    """Averages of weights in a plain dict, which is all that its state has."""

    def __init__(self, model):
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}
        self.updates = 0

    def update(self, model):
        self.updates += 1
        for name, value in model.state_dict().items():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value + 0.01

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state_dict):
        self.shadow = dict(state_dict)


def test_a_dict_of_tensors_that_a_state_dict_returns_is_not_named(named, tmp_path):
    model = torch.nn.Linear(4, 1)
    average = Average(model)
    (report,) = named(Loop(tmp_path, model, average=average), lambda _: average.update(model))
    assert report.startswith("average.updates (")


class CopyingAverage(Average):
    def state_dict(self):
        return {name: value.clone() for name, value in self.shadow.items()}


class ForgettingAverage(Average):
    def state_dict(self):
        return {"count": 1}


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
@pytest.mark.parametrize(("kind", "count"), [(CopyingAverage, 0), (ForgettingAverage, 1)])
def test_a_dict_of_tensors_is_named_unless_a_state_dict_returns_copies(
    named, tmp_path, monkeypatch, device, kind, count
):
    if device == "accelerator":  # elements of its tensors are never compared with those of a state
        monkeypatch.setattr(attribute_walk, "is_accelerator", lambda device: True)
    model = torch.nn.Linear(4, 1)
    average = kind(model)
    reports = named(Loop(tmp_path, model, average=average), lambda _: average.update(model))
    assert "\n".join(reports).count("average.shadow") == count


class AverageOfDiffusers(CopyingAverage):
    """Stands for `EMAModel`: what its state leaves out, each update computes anew."""

    __module__ = "diffusers.training_utils"


def test_an_average_of_diffusers_is_not_named(named, tmp_path):
    average = AverageOfDiffusers(model := torch.nn.Linear(4, 1))
    assert named(Loop(tmp_path, model, average=average), lambda _: average.update(model)) == []


def test_what_variables_have_is_not_named(named, tmp_path):
    loop_state = holdfast.Variables(temperature=1.0)
    loop = Loop(tmp_path, loop=loop_state)
    loop.model.temperature = 1.0

    def change(iteration):
        loop_state.temperature = loop.model.temperature = 0.9**iteration

    assert named(loop, change) == []


def test_results_caches_logs_and_parts_of_torch_are_not_named(named, tmp_path):
    model = torch.nn.Sequential(torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4)), torch.nn.LSTM(4, 1))
    loop = Loop(tmp_path, model)
    model.last_loss = model.elapsed_time = model.max_seq_len_cached = model.attention = model.log = 0
    model.itself, model.alias, model.of_autograd = [model[1]], list(model.parameters()), None

    def change(iteration):
        model(torch.rand(2, 4))[0].sum().backward()
        loop.optimizer.step()
        model.last_loss, model.elapsed_time, model.max_seq_len_cached = 1.0 / iteration, iteration, iteration
        model.attention, model.log = torch.rand(4), [iteration]
        loop.optimizer.radam_buffer = [[iteration, 4.5 + iteration, 1.0 / iteration]]
        model.of_autograd = model[0].weight.sum()
        model.eval() if iteration % 2 else model.train()

    assert named(loop, change) == []


@pytest.mark.parametrize("name", ["p", "momentum"])
def test_a_setting_of_a_module_of_torch_that_the_script_anneals_is_named(named, tmp_path, name):
    part = {"p": torch.nn.Dropout(0.9), "momentum": torch.nn.BatchNorm1d(4)}[name]
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), part)

    def change(iteration):
        setattr(part, name, 0.5 / iteration)

    (report,) = named(Loop(tmp_path, model), change)
    assert report.startswith(f"model.1.{name} (")


class Leveled(torch.utils.data.Dataset):
    """A dataset with a difficulty, a count that nothing reads, and an epoch that the loop sets."""

    def __init__(self):
        self.level, self.reads, self.epoch, self.last = 1.0, 0, 0, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.reads += 1
        self.last = index
        return torch.rand(4) * self.level + self.epoch


class Strength:
    def __init__(self):
        self.strength = 1

    def __call__(self, samples):
        return torch.stack(samples) * self.strength


@pytest.mark.parametrize("make", [holdfast.DataLoader, torch.utils.data.DataLoader])
@pytest.mark.parametrize(("workers", "number"), [(0, 1), (1, 0)])
def test_a_number_of_a_dataset_or_collate_function_that_training_changes_is_named(
    named, tmp_path, make, workers, number
):
    dataset, collate_fn = Leveled(), Strength()
    nested = torch.utils.data.ConcatDataset([torch.utils.data.Subset(dataset, [0, 1, 2, 3]), dataset])
    loop = Loop(tmp_path)
    batches = loop.session.batches(
        make(nested, batch_size=2, collate_fn=collate_fn, num_workers=workers), epochs=None
    )

    def change(iteration):
        next(batches)
        dataset.level, collate_fn.strength, dataset.epoch = 1 + 0.1 * iteration, iteration, iteration

    reports = named(loop, change)
    assert len(reports) == number
    for path in ("loader.dataset.datasets[1].level (", "loader.collate_fn.strength ("):
        assert all(path in each for each in reports)
    assert not any(word in each for each in reports for word in ("reads", "last", "epoch"))


class Stream(torch.utils.data.IterableDataset):
    """A stream with its own position."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def __iter__(self):
        while True:
            self.position += 1
            yield torch.full((4,), float(self.position))


def test_the_position_of_a_stream_is_not_named(named, tmp_path):
    loop = Loop(tmp_path)
    batches = loop.session.batches(holdfast.DataLoader(Stream(), batch_size=2), epochs=None)
    assert named(loop, lambda iteration: next(batches)) == []


def test_a_number_of_a_dataset_that_variables_have_is_not_named(named, tmp_path):
    dataset, variables = Leveled(), holdfast.Variables(level=1.0)
    loop = Loop(tmp_path, variables=variables)
    batches = loop.session.batches(holdfast.DataLoader(dataset, batch_size=2), epochs=None)

    def change(iteration):
        next(batches)
        dataset.level = variables.level = 1 + 0.1 * iteration

    assert named(loop, change) == []


def test_no_code_of_the_script_runs():
    class Careful(Trainer):
        @property
        def costly(self):
            raise AssertionError("a property was read")

        def __getattr__(self, name):
            raise AssertionError(f"__getattr__({name!r}) was called")

        def __len__(self):
            raise AssertionError("__len__ was called")

        def state_dict(self):
            return {}

    class Mapping(dict):
        def items(self):
            raise AssertionError("items() was called")

        __iter__ = __getitem__ = __len__ = items

    walk = changing_state.AttributeWalk({"trainer": Trainer(inner=Careful(value=0, entries=Mapping(a=1)))}, set())
    assert walk.advance(lambda: False)
    assert walk.found["trainer.inner.value"].parts == {"": ("int", 0)}
    assert walk.found["trainer.inner.entries"].parts == {"": ("Mapping", 1), "['a']": ("int", 1)}


def test_subclasses_of_objects_of_the_session_are_left_out():
    class Position(holdfast.Variables):
        pass

    trainer = Trainer(position=Position(step=1), other=Holder(step=1))
    walk = changing_state.AttributeWalk({"trainer": trainer}, set())
    assert walk.advance(lambda: False)
    assert "trainer.other.step" in walk.found
    assert not [path for path in walk.found if path.startswith("trainer.position")]


def test_a_capture_goes_on_at_the_next_iteration(caplog, tmp_path, monkeypatch):
    monkeypatch.setattr(changing_state, "SLICE_SECONDS", 0.0)  # one step each
    monkeypatch.setattr(changing_state, "START_SECONDS", 0.0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), Normalization())
    Loop(tmp_path, model).run(set_attribute(model[1], "initialized", lambda iteration: iteration > 60), 300)
    assert "training changes model.1.initialized (False → True)" in caplog.text


def test_a_capture_keeps_no_object_of_the_script(tmp_path):
    loop = Loop(tmp_path)
    loop.model.part = types.SimpleNamespace(value=1)
    walk = changing_state.AttributeWalk({"model": loop.model}, set())
    assert walk.advance(lambda: False)
    attribute = walk.found["model.part.value"]
    del loop.model.part
    assert attribute.holder() is None
    loop.session.close()
