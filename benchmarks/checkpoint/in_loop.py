"""Libraries that block the loop until all is written."""

from __future__ import annotations

import json

import torch
import torch.distributed.checkpoint as dcp

from .contender import Contender, fsync_tree
from .training import BenchmarkTraining


class BlockingContender(Contender):
    def save(self, step: int) -> None:
        self.write(step)
        fsync_tree(self.newest)
        self.written.now()

    def write(self, step: int) -> None:
        raise NotImplementedError


class TorchSave(BlockingContender):
    def write(self, step: int) -> None:
        torch.save(self.training.state(), self.place(step))

    def restore(self, fresh: BenchmarkTraining) -> None:
        fresh.load(torch.load(self.newest, weights_only=True, map_location=fresh.scale.device))


class Safetensors(BlockingContender):
    """safetensors: stores named tensors only, so the optimizer state is flattened, as its users must."""

    def write(self, step: int) -> None:
        from safetensors.torch import save_file

        state = self.training.state()
        tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
        for index, moments in state["optimizer"]["state"].items():
            tensors |= {f"optimizer.{index}.{key}": tensor for key, tensor in moments.items()}
        groups = json.dumps(state["optimizer"]["param_groups"])
        save_file(tensors, self.place(step), metadata={"param_groups": groups})

    def restore(self, fresh: BenchmarkTraining) -> None:
        from safetensors import safe_open

        model: dict[str, torch.Tensor] = {}
        moments: dict[int, dict[str, torch.Tensor]] = {}
        with safe_open(self.newest, framework="pt", device=fresh.scale.device) as file:
            groups = json.loads(file.metadata()["param_groups"])
            for name in file.keys():  # noqa: SIM118 (no mapping, though it looks like one)
                kind, _, rest = name.partition(".")
                if kind == "model":
                    model[rest] = file.get_tensor(name)
                else:
                    index, key = rest.split(".")
                    moments.setdefault(int(index), {})[key] = file.get_tensor(name)
        fresh.load({"model": model, "optimizer": {"state": moments, "param_groups": groups}})


class DcpSync(BlockingContender):
    reads_in_place = True

    def write(self, step: int) -> None:
        dcp.save(self.training.state(), checkpoint_id=self.place(step), no_dist=True)

    def restore(self, fresh: BenchmarkTraining) -> None:
        load_with_dcp(self, fresh)


def load_with_dcp(contender: Contender, fresh: BenchmarkTraining) -> None:
    """Read in place; `load` then sets the optimizer's scalars."""
    state = fresh.state()
    dcp.load(state, checkpoint_id=contender.newest, no_dist=True)
    fresh.load(state)
