"""A tiny job that logs to one logger. Arguments: logger, folder, iterations; kill=N, restore=AT:TO, server=URL.

`kill` ends the process by SIGKILL after iteration N was logged and before its `session.step`; with W&B once the
iteration before is on disk. There is a checkpoint of every fourth iteration.
"""

import os
import pathlib
import signal
import sys
import time

import torch

import holdfast


def open_logger(name, session, folder):
    """(function that logs a value at the step of this iteration, object to describe at the end)"""
    if name == "wandb":
        import holdfast.integrations.wandb as bridge

        run = bridge.init(session, project="p", dir=str(folder))
        return lambda loss, step: run.log({"loss": loss}), run
    if name == "mlflow":
        import mlflow

        import holdfast.integrations.mlflow as bridge

        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        run = bridge.start_run(session)
        return lambda loss, step: run.log_metrics({"loss": loss}), run
    import holdfast.integrations.tensorboard as bridge

    writer = bridge.SummaryWriter(session, folder / "runs")
    return lambda loss, step: writer.add_scalar("loss", loss, step), writer


def bridge_steps(run):
    """The last step of an offline run on disk."""
    from holdfast.integrations.wandb import last_step

    return last_step(pathlib.Path(run.sync_dir) / f"run-{run.id}.wandb")


def main(name, folder, iterations, **options):
    folder = pathlib.Path(folder)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = holdfast.Session(
        "job", store=folder / "store", every=4, model=model, optimizer=optimizer, loop=holdfast.Variables(),
        server=options.get("server"),
    )  # fmt: skip
    log, run = open_logger(name, session, folder)
    at, to = (int(each) for each in options.get("restore", "0:0").split(":"))
    noise = 0.0
    while session.iteration < int(iterations):
        step = session.iteration + 1
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 4)) - 1 + noise).square().mean()
        loss.backward()
        optimizer.step()
        log(loss.item(), step)
        print(f"logged {step} {loss.item():.9g}", flush=True)
        if step == int(options.get("kill", 0)):
            while name == "wandb" and bridge_steps(run) < step - 1:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == at and not noise:
            noise = 1.0  # the branch after the restore has other values
            session.restore(to)
        session.step(loss=loss)
        session.wait(300)
        if session.lineage > 1:
            noise = 1.0
    print("runs", session.logger_runs, flush=True)
    if name == "tensorboard":
        run.close()
    session.close()


if __name__ == "__main__":
    main(*sys.argv[1:4], **dict(each.split("=", 1) for each in sys.argv[4:]))
