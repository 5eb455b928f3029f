"""A run of two workers, by Ray Train or by torchrun. Arguments: folder, update at which a worker is killed, or 0.

By Ray, it prints what was reported as one line of JSON.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from benchmarks.integrations import job

RANKS = 2


def train(config):
    folder, rank = Path(config["folder"]), dist.get_rank()
    torch.manual_seed(job.SEED)
    model = DistributedDataParallel(job.classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = holdfast.DataLoader(job.AugmentedSamples(), batch_size=job.BATCH_SIZE, shuffle=True, seed=job.SEED)
    session = holdfast.Session("ray", store=folder / "store", every=3, model=model, optimizer=optimizer)
    if config["by_ray"]:
        from holdfast.integrations.ray import report

        report(session)
    died = folder / "died"
    with (folder / f"log.{rank}").open("a", buffering=1) as log, session:
        for features, classes, samples in session.batches(loader, epochs=job.EPOCHS):
            loss = nn.functional.cross_entropy(model(features), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            number = session.iteration + 1
            log.write(json.dumps([number, loss.item().hex(), samples.tolist()]) + "\n")
            if rank == 1 and number == config["kill"] and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            session.step(loss=loss)
            session.wait(300)  # as where iterations take longer than a checkpoint


def run_by_ray(folder, kill):
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    own = tempfile.mkdtemp(prefix="ray-")  # a short path: Ray's sockets are in it
    options = {"num_cpus": RANKS, "object_store_memory": 80 << 20, "_temp_dir": own}
    try:
        ray.init(**options, include_dashboard=False, log_to_driver=False)
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": folder, "kill": kill, "by_ray": True},
            scaling_config=ray.train.ScalingConfig(num_workers=RANKS),
            run_config=ray.train.RunConfig(
                name="run",
                storage_path=f"{folder}/ray",
                failure_config=ray.train.FailureConfig(max_failures=1),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            ),
        )
        result = trainer.fit()
        found = {
            "metrics": result.metrics,
            "newest": result.checkpoint.get_metadata()["holdfast"],
            "best": result.get_best_checkpoint("loss", "min").get_metadata()["holdfast"],
        }
        print(json.dumps(found))
    finally:
        ray.shutdown()
        shutil.rmtree(own, ignore_errors=True)


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        train({"folder": sys.argv[1], "kill": 0, "by_ray": False})
        dist.destroy_process_group()
    else:
        run_by_ray(sys.argv[1], int(sys.argv[2]))
