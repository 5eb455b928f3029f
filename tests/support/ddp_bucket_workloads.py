"""Workloads for tests of gradient buckets: train, then resume in a new DistributedDataParallel."""

import contextlib
import copy
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from holdfast.state.ddp_buckets import bucket_layout, restore_buckets

WIDTH = 24


class ReorderedModel(nn.Module):
    """Uses its layers in another order than it defines them."""

    def __init__(self, frozen=False, mixed=False, tied=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(5))
        self.dropout = nn.Dropout(0.1)
        if frozen:
            self.layers[1].requires_grad_(False)
        if mixed:
            self.layers[2].to(torch.bfloat16)
        if tied:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        for number in (2, 0, 4, 1, 3):
            layer = self.layers[number]
            x = x + self.dropout(self.norms[number](layer(x.to(layer.weight.dtype)).float()).relu())
        return x


class BucketJob:
    def __init__(self, *, bucket_bytes=4000, group=None, net=None, compiled=None, by_hand=False, **ddp):
        torch.manual_seed(1)
        self.net = ReorderedModel(**(net or {}))
        inner = torch.compile(self.net, backend="eager") if compiled == "inside" else self.net
        cap = bucket_bytes / (1 << 20)
        self.ddp = DistributedDataParallel(inner, bucket_cap_mb=cap, process_group=group, **ddp)
        self.by_hand = by_hand
        if by_hand:
            self.ddp.require_manual_backward_finalization = True
        self.forward = torch.compile(self.ddp, backend="eager") if compiled == "outside" else self.ddp
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def step(self, accumulate=1):
        for left in reversed(range(accumulate)):
            self.backward(last=not left)
        digest = self.digest()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return digest

    def backward(self, last=True):
        with contextlib.nullcontext() if last else self.ddp.no_sync():
            self.forward(torch.randn(8, WIDTH)).square().mean().backward()
        if last and self.by_hand:
            self.ddp.finalize_backward()

    def gradients(self):
        return [parameter.grad for parameter in self.net.parameters()]

    def digest(self):
        found = hashlib.sha256()
        for tensor in [*self.net.state_dict().values(), *self.gradients()]:
            if tensor is not None:
                found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return found.hexdigest()

    def state(self):
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()))

    def load(self, net, optimizer, rng):
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        torch.set_rng_state(rng)


def resume(stage, *, warm, at=3, steps=6, accumulate=1, subgroup=None, **how):
    """Of each step, whether a job that went on in a fresh module did what the uninterrupted one did."""
    group = dist.new_group(subgroup) if subgroup else None
    if subgroup and dist.get_rank() not in subgroup:
        return [True] * steps
    job = BucketJob(group=group, **how)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(at):
        job.step(accumulate)
    layout, state = bucket_layout(job.ddp), job.state()
    expected = [job.step(accumulate) for _ in range(steps)]
    torch.manual_seed(5)  # another process has drawn other numbers
    fresh = BucketJob(group=group, **how)
    if warm:
        assert restore_buckets(fresh.ddp, layout) is None
        assert sorted(bucket_layout(fresh.ddp)) == sorted(layout)
    fresh.load(*state)
    found = [fresh.step(accumulate) for _ in range(steps)]
    assert not warm or sorted(bucket_layout(fresh.ddp)) == sorted(layout) == sorted(reported(fresh.ddp))
    return [a == b for a, b in zip(expected, found, strict=True)]


def reported(ddp):
    """The layout as DDP's own statistics have it."""
    text = ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    return [[int(number) for number in bucket.split()] for bucket in text.split(",")]


def layout_of(**how):
    job = BucketJob(**how)
    job.step()
    job.step()
    return bucket_layout(job.ddp)


def layouts(stage):
    """At each time that it is asked for, from the first to the third iteration."""
    job, found = BucketJob(), []
    found.append(bucket_layout(job.ddp))
    job.backward(last=False)
    found.append(bucket_layout(job.ddp))
    for _ in range(3):
        job.backward()
        found.append(bucket_layout(job.ddp))
    return [*found, reported(job.ddp)]


def never_rebuilt(stage):
    job = BucketJob(find_unused_parameters=True)
    job.step()
    return bucket_layout(job.ddp), restore_buckets(BucketJob(find_unused_parameters=True).ddp, [[0]])


def asked_or_not(stage, *, asked, **how):
    job, digests = BucketJob(**how), []
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(4):
        for left in (1, 0):
            job.backward(last=not left)
            if asked:
                bucket_layout(job.ddp)
        digests.append(job.digest())
        job.optimizer.step()
    return digests


def disturbed(stage, *, static_graph, in_no_sync):
    """What a warm-up changes of what is the script's."""
    layout = layout_of(static_graph=static_graph)
    job, called = BucketJob(static_graph=static_graph), []
    parameters = list(job.net.parameters())
    for parameter in parameters:
        parameter.register_hook(lambda _: called.append("a tensor's"))
        parameter.register_post_accumulate_grad_hook(lambda _: called.append("an optimizer's"))
    parameters[0].grad = torch.full_like(parameters[0], 3.0)
    gradients, rng, before = job.gradients(), torch.get_rng_state(), job.digest()
    with job.ddp.no_sync() if in_no_sync else contextlib.nullcontext():
        assert restore_buckets(job.ddp, layout) is None
    assert all(a is b for a, b in zip(gradients, job.gradients(), strict=True))
    assert job.digest() == before
    assert torch.equal(rng, torch.get_rng_state())
    assert not called
    job.step()
    assert len(called) == 2 * len(parameters)


def warmed_before(stage):
    """One rank alone asks for what is there already."""
    job = BucketJob()
    job.step()
    job.step()
    layout = bucket_layout(job.ddp)
    if dist.get_rank() == 0:
        return (
            restore_buckets(job.ddp, layout),
            restore_buckets(job.ddp, layout[::-1]),
            restore_buckets(job.ddp, [layout[0][::-1], *layout[1:]]),
        )
    return None


def keep(state, bucket):
    state.append("called")
    return default_hooks.allreduce_hook(None, bucket)


def with_hook(stage, *, hook, **how):
    layout, job, state = layout_of(**how), BucketJob(**how), []
    if hook == "keep":
        job.ddp.register_comm_hook(state, keep)
    else:
        job.ddp.register_comm_hook(None, getattr(default_hooks, hook))
    why = restore_buckets(job.ddp, layout)
    assert not state
    return why


def refused(stage, *, what):
    layout = layout_of(static_graph=what == "called before")
    if what == "fewer parameters":
        return restore_buckets(BucketJob(net={"frozen": True}).ddp, layout)
    if what == "larger buckets":
        return restore_buckets(BucketJob(bucket_bytes=1 << 20).ddp, layout)
    if what == "called before":
        job = BucketJob(static_graph=True)
        job.backward()
        return restore_buckets(job.ddp, layout)
    ddp = delaying(
        [name for name, parameter in ReorderedModel(frozen=True).named_parameters() if parameter.requires_grad]
    )
    assert bucket_layout(ddp) is None
    return restore_buckets(ddp, layout)


def delaying(names):
    """With parameters that are summed up at the end, by DDP itself and not by the reducer."""
    torch.manual_seed(1)
    net = ReorderedModel(frozen=True)
    return DistributedDataParallel(
        net,
        bucket_cap_mb=4000 / (1 << 20),
        delay_all_reduce_named_params=[(name, net.get_parameter(name)) for name in names],
        param_to_hook_all_reduce=net.layers[0].weight,
    )


def delayed_in_part(stage):
    """Some parameters are not the reducer's; the others are known by their numbers in it."""
    names = ["layers.0.weight", "norms.3.bias"]
    ddp, fresh = delaying(names), delaying(names)
    for _ in range(3):
        ddp(torch.randn(8, WIDTH)).square().mean().backward()
    layout = bucket_layout(ddp)
    assert sorted(layout) == sorted(reported(ddp))
    assert restore_buckets(fresh, layout) is None
    assert sorted(bucket_layout(fresh)) == sorted(layout)
    fresh(torch.randn(8, WIDTH)).square().mean().backward()
    return sum(map(len, layout))
