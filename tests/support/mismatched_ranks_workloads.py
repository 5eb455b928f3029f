"""Workloads whose ranks differ in iteration, model or state."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.checkpoint import restore
from holdfast.engine import rank_coordination


class SynchronousJob:
    """Session that waits for each checkpoint, and records the notices."""

    def __init__(self, store, **objects):
        options = {"every": 1, "keep": 100, "max_in_flight": 2}
        self.told = []
        self.session = holdfast.Session("j", store=store, **options, **objects)
        notice = self.session._reporter.notice
        self.session._reporter.notice = lambda *said: (self.told.append(said[2]), notice(*said))
        self.started_from = self.session.resume()

    def step(self):
        self.session.step()
        self.session.wait(300)

    def end(self):
        """Without a last checkpoint."""
        self.session._close("interrupted")

    def checkpoints(self):
        return self.session._saver.history.store.checkpoints("j")


def trained(model, optimizer, size=4):
    model(torch.full((2, size), dist.get_rank() + 1.0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def miscounting(stage, store, how):
    """Rank 1 calls `step` once more, or once less, after the tenth of forty updates."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = holdfast.Variables(updates=0)
    job = SynchronousJob(store, model=model, optimizer=optimizer, loop=loop)
    for update in range(1, 41):
        trained(model, optimizer)
        loop.updates = update
        if update < 10:
            job.step()  # no earlier checkpoint is being written when the counts begin to differ
            continue
        odd = update == 10 and dist.get_rank() == 1
        for _ in range({"twice": 2, "not at all": 0}[how] if odd else 1):
            job.session.step()
    job.end()
    where = [job.session._saver.history.store, "j"]
    found = [[restore.load(*where, c, rank=r).state["loop"]["updates"] for r in (0, 1)] for c in job.checkpoints()]
    return found, job.told


def stages(stage, store):
    """Pipeline stages whose parameters have the same names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(dist.get_rank() // 2)
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = SynchronousJob(store, model=model, optimizer=optimizer)
    for _ in range(3):
        job.step()
    job.end()
    return job.checkpoints(), job.told


class LocalMomentum(torch.optim.Optimizer):
    """Keeps plain tensors of this rank's rows."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad.to_local(), self.state[parameter]
            state.setdefault("moment", torch.zeros_like(gradient)).mul_(0.9).add_(gradient)
            parameter.to_local().sub_(self.param_groups[0]["lr"] * state["moment"])


def local_state(stage, store):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    optimizer = LocalMomentum(model.parameters(), lr=0.1)
    job = SynchronousJob(store, model=model, optimizer=optimizer)
    for _ in range(0 if job.started_from else 3):
        trained(model, optimizer)
        job.step()
    job.end()
    return job.started_from, [state["moment"].tolist() for state in optimizer.state.values()]


def trained_later(stage, store, how):
    """Parameters below a DistributedDataParallel that it does not know, or does not reduce."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[-1].weight.requires_grad_(how != "unfrozen")
    replicated = DistributedDataParallel(model)
    if how == "added":
        model.append(nn.Linear(4, 4, bias=False))
    model[-1].weight.requires_grad_(True)
    optimizer = torch.optim.SGD(replicated.parameters(), lr=0.1)
    job = SynchronousJob(store, model=replicated, optimizer=optimizer)
    for _ in range(0 if job.started_from else 3):
        trained(replicated, optimizer)
        job.step()
    job.end()
    return job.started_from, model[-1].weight.tolist()


def unsynchronised(stage, store):
    """Updates by each rank's own gradients, as in local SGD."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = SynchronousJob(store, model=model, optimizer=optimizer)
    trained(model, optimizer)
    job.step()
    with model.no_sync():
        for _ in range(3):
            trained(model, optimizer)
            job.step()
    job.end()
    return job.checkpoints(), job.told


def accumulating(stage, store, how):
    """`fully_shard` holds gradients that it has not synchronised where an iteration ends."""
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = SynchronousJob(store, model=model, optimizer=optimizer)
    for synchronised in (False, True) * 4:
        getattr(model, how)(synchronised)
        model(torch.ones(2, 4)).sum().backward()
        if synchronised:
            optimizer.step()
            optimizer.zero_grad()
        job.step()
    job.end()
    return job.checkpoints(), job.told


WRAPS = {
    "itself": lambda replicated: replicated,
    "compiled": lambda replicated: torch.compile(replicated, backend="eager"),
    "below another": lambda replicated: nn.Sequential(replicated),
    "the one inside": lambda replicated: replicated.module,
}


def given(stage, store, how):
    """The script gives a replicated module, a wrapper of it, or the module that is replicated."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = SynchronousJob(store, model=WRAPS[how](replicated), optimizer=optimizer)
    trained(replicated, optimizer)
    captured = job.session._training.capture()
    job.end()
    own = sorted(n for n in captured.rank_local if n.startswith("model"))
    return own, captured.trees["session"]["reducers"], job.told


def not_supported(stage):
    refused = []
    model = nn.Linear(4, 4)
    for keyword, item in (
        ("model", nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))),
        ("optimizer", ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)),
    ):
        try:
            holdfast.Session("j", **{keyword: item})
        except TypeError as error:
            refused.append(str(error))
    return refused


def larger(stage, store, width):
    """A model that has grown since."""
    model = nn.Linear(4, width)
    fully_shard(model)
    try:
        job = SynchronousJob(store, model=model)
    except holdfast.IncompatibleCheckpoint as error:
        return str(error)
    for _ in range(4):
        job.step()
    job.end()
    return None


def leaving(stage, store, where):
    """Rank 0 leaves its loop; rank 1 waits for it in a collective of the script's, as one that trains on does."""
    rank_coordination.END_SECONDS = 1.0
    loop = holdfast.Variables(count=0)
    loader = holdfast.DataLoader(list(range(80)), batch_size=2)
    job = SynchronousJob(store, loop=loop)
    for count, _ in enumerate(job.session.batches(loader)):
        if count == 10 and dist.get_rank() == 0 and where == "within an iteration":
            break
        job.session.step()
        if count == 10 and dist.get_rank() == 0:
            break
        if count == 10:
            try:
                dist.barrier()
            except RuntimeError:
                break
    job.session.close()
    return job.session.iteration
