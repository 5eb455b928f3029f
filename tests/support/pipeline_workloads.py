"""Jobs that train a model in the stages of a pipeline, on any number of ranks and stages."""

import logging
import os
import signal
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.torch_internals import learns_shapes
from tests.support.training_log import bits, digest

WIDTH, LAYERS, BATCH, MICROBATCHES, SAMPLES, EPOCHS = 6, 8, 8, 4, 48, 3


class Model(nn.Module):
    """Layers by name, so that a stage is the model without the other layers."""

    def __init__(self, norm=True):
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in range(LAYERS)})
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("cache", torch.zeros(2), persistent=False)  # in each stage, under the same name
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        for layer in self.layers.values():
            x = self.dropout(torch.tanh(layer(x)))
        self.cache += 1
        return x if self.head is None else self.head(self.norm(x)).squeeze(1)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        numbers = torch.randn(WIDTH, generator=generator)
        return index, numbers, numbers.sum()


def stage_of(model, number, count):
    """The model without the layers of other stages."""
    stage = deepcopy(model)
    for layer in range(LAYERS):
        if not number * LAYERS // count <= layer < (number + 1) * LAYERS // count:
            del stage.layers[str(layer)]
    if number < count - 1:
        stage.norm = stage.head = None
    return stage


def loss_of(output, target):
    return (output - target).square().mean()


def examples(number, count):
    """Of a microbatch: without them, the first iteration of each process runs every stage once more."""
    size = BATCH // MICROBATCHES
    inside = torch.empty(size, WIDTH)
    return {
        "input_args": inside.clone().requires_grad_(number > 0),
        "output_args": torch.empty(size, requires_grad=True) if number == count - 1 else inside.requires_grad_(),
    }


class PipelineJob:
    """One rank of a job with `per_rank` stages on each rank, beside `kind` data parallelism over the rest."""

    def __init__(self, store, *, ranks=None, per_rank=1, kind=None, groups=1, norm=True, parts=False, **options):
        world_size = dist.get_world_size()
        ranks = ranks or world_size
        copies = world_size // ranks
        mesh = init_device_mesh("cpu", (ranks, copies), mesh_dim_names=("pp", "dp"))
        self.pp, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        count = ranks * per_rank
        torch.manual_seed(1)
        model = Model(norm)
        self.numbers = [self.pp + ranks * each for each in range(per_rank)]
        self.modules = [stage_of(model, number, count) for number in self.numbers]
        if kind == "fsdp":
            for module in self.modules:
                fully_shard(module, mesh=mesh["dp"])
        trained = self.modules
        if kind == "ddp":
            trained = [DistributedDataParallel(module, process_group=mesh.get_group("dp")) for module in trained]
        parameters = [p for module in self.modules for p in module.parameters()]
        split = [{"params": parameters}]
        if groups > 1:
            weights = [p for p in parameters if p.ndim > 1]
            split = [{"params": weights}, {"params": [p for p in parameters if p.ndim <= 1], "lr": 1e-3}]
        self.optimizer = torch.optim.AdamW(split, lr=1e-2)
        self.optimizers = [self.optimizer]
        if parts:  # an optimizer for each stage, as torchtitan has
            self.optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in self.modules]
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=50) for o in self.optimizers]
        torch.manual_seed(100 + self.pp)
        self.is_last = count - 1 in self.numbers
        self.schedule = None
        if ranks > 1:
            group = mesh.get_group("pp")
            stages = [
                PipelineStage(module, number, count, torch.device("cpu"), group=group, **examples(number, count))
                for module, number in zip(trained, self.numbers, strict=True)
            ]
            make = Schedule1F1B if per_rank == 1 else ScheduleInterleaved1F1B
            given = stages[0] if per_rank == 1 else stages
            self.schedule = make(given, MICROBATCHES, loss_fn=loss_of)
        else:
            stages = trained
        self.loader = holdfast.DataLoader(
            Samples(), batch_size=BATCH, shuffle=True, seed=1, rank=replica, world_size=copies
        )
        more = {f"optimizer{number or ''}": each for number, each in enumerate(self.optimizers)}
        self.session = holdfast.Session(
            "job", store=store, model=stages,
            scheduler=self.schedulers[0], state=more, **{"every": 1, "keep": 1000, "max_in_flight": 2} | options,
        )  # fmt: skip
        self.losses = {}

    def batches(self):
        return self.session.batches(self.loader, epochs=EPOCHS)

    def train(self, numbers, target):
        """One iteration; the loss on the last stage, else None."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._pipelined(numbers, target) if self.schedule is not None else self._plain(numbers, target)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        if loss is not None:
            self.losses[self.session.iteration + 1] = bits(loss)
        return loss

    def _pipelined(self, numbers, target):
        losses = []
        inputs = (numbers,) if 0 in self.numbers else ()
        self.schedule.step(
            *inputs, target=target if self.is_last else None, losses=losses if self.is_last else None
        )
        return torch.stack(losses).mean().item() if self.is_last else None

    def _plain(self, numbers, target):
        for module in self.modules:
            numbers = module(numbers)
        loss = loss_of(numbers, target)
        loss.backward()
        return loss.item()

    def state(self):
        """Digests of all that this rank has, by name."""
        found, states = {}, {k: v for each in self.optimizers for k, v in each.state.items()}
        for module in self.modules:
            for name, value in module.state_dict().items():
                found[name] = digest(_whole(value))
            for name, parameter in module.named_parameters():
                moments = {key: _whole(value) for key, value in states.get(parameter, {}).items()}
                found[f"moments of {name}"] = digest(moments)
        return found


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach()


def train(stage, store, until=None, kill_at=None, log=None, **options):
    """Train; the rank `kill_at[0]` kills itself in the iteration `kill_at[1]`, after its update.

    The rank with the last stage appends the loss of each iteration to the file `log`.
    """
    job = PipelineJob(store, **options)
    start = None
    for _, numbers, target in job.batches():
        start = job.session.iteration if start is None else start
        loss = job.train(numbers, target)
        if log is not None and loss is not None:
            with Path(log).open("a") as file:
                file.write(f"{job.session.iteration + 1} {bits(loss)}\n")
        if kill_at is not None and kill_at == [dist.get_rank(), job.session.iteration + 1]:
            os.kill(os.getpid(), signal.SIGKILL)
        job.session.step(**({} if loss is None else {"loss": loss}))
        job.session.wait(60)
        if until is not None and job.session.iteration >= until:
            break
    state = job.state()
    job.session.close()
    return {"start": start, "losses": job.losses, "state": state}


def resumed(stage, store, **options):
    """The state right after a resume."""
    job = PipelineJob(store, **options)
    start = job.session.resume()
    state = job.state()
    job.session._close("interrupted")
    return {"start": start, "state": state}


def logged_warnings():
    """The list to which the warnings of Holdfast are added from now on."""
    said, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("holdfast").addHandler(handler)
    return said


def refused(stage, store, how):
    """Why a session with these stages cannot begin, and whether a step has changed anything."""
    torch.manual_seed(1)
    model, rank = Model(), dist.get_rank()
    given = [stage_of(model, rank, 2)]
    if how == "tied":
        given[0].head = nn.Linear(WIDTH, 1)  # on both ranks
    elif how == "renamed":
        given = [nn.Sequential(*given[0].layers.values())]
    elif how == "one rank":
        given = given if rank else given[0]
    elif how == "missing":
        del given[0].layers["3" if rank == 0 else "7"]
    elif how == "same list":
        given = given * 2
        given[1] = deepcopy(given[1])
    elif how == "none":
        given = []
    try:
        session = holdfast.Session("job", store=store, model=given)
        session.resume()
    except (ValueError, holdfast.HoldfastError) as error:
        return str(error)
    return ""


def restored_in_place(stage, store, **options):
    """The state after iteration 3, and after a restore of it in place; and what was logged of objects."""
    said = logged_warnings()
    job, states, restored = PipelineJob(store, **options), [], []
    job.session.on_restored(lambda iteration, lineage: restored.append((iteration, job.state())))
    for _, numbers, target in job.batches():
        loss = job.train(numbers, target)
        job.session.step(**({} if loss is None else {"loss": loss}))
        job.session.wait(60)
        if job.session.iteration == 3 and not restored:
            states.append(job.state())
        if job.session.iteration == 5 and not restored:
            job.session.restore(3)
        if restored and job.session.iteration >= 6:
            break
    job.session.close()
    found = [each for each in said if "in no checkpoint" in each or "in no module" in each]
    return {"states": states, "restored": restored, "said": found}


def learning(stage):
    """One iteration without and with shapes: whether a notice is due, and what the iteration changed."""
    found = []
    for given in ({}, examples(0, 1)):
        torch.manual_seed(1)
        model = Model()
        pipelined = PipelineStage(model, 0, 1, torch.device("cpu"), **given)
        is_due = learns_shapes(pipelined)
        schedule = ScheduleGPipe(pipelined, MICROBATCHES, loss_fn=loss_of)
        schedule.step(torch.ones(BATCH, WIDTH), target=torch.ones(BATCH))
        changed = [model.cache, model.norm.running_mean, model.norm.num_batches_tracked, torch.rand(1)]
        found.append((is_due, [each.tolist() for each in changed]))
    return found
