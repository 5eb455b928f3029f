"""Workloads for the tests of `multi_rank`."""

import os

import torch
import torch.distributed as dist


def mean(stage, number):
    tensor = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(tensor)
    return {"mean": tensor.item() / dist.get_world_size(), "threads": torch.get_num_threads(), "pid": os.getpid()}


def large(stage):
    return torch.arange(1 << 20).add(dist.get_rank())


def fail_alone(stage, rank):
    if dist.get_rank() == rank:
        raise KeyError("lost")
    dist.barrier()


def die_alone(stage, rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), 9)
    dist.barrier()


def steps(stage):
    stage.ready()
    for step in range(3):
        dist.barrier()
        stage.tell("step", step)
    stage.ready()
    dist.barrier()
