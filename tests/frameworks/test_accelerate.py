"""Accelerate: a killed job continues exactly, in the middle of an epoch and of an accumulation of gradients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn

import holdfast.integrations.accelerate
from benchmarks.integrations import job
from benchmarks.integrations.kills import compare, run
from holdfast.checkpoint import restore
from holdfast.store.local import LocalStore


@pytest.mark.parametrize(("ranks", "kills"), [(1, 2), (2, 1)])
def test_a_job_of_accelerate_resumes_exactly_in_mid_epoch(tmp_path, ranks, kills):
    uninterrupted = run("accelerate", "holdfast", tmp_path / "uninterrupted", ranks=ranks)
    killed = run("accelerate", "holdfast", tmp_path / "killed", kills=kills, seed=2, ranks=ranks)
    result = compare(uninterrupted, killed, updates=36 // ranks, epoch=12 // ranks)
    assert len(result.kills) == kills
    assert result.exact, result


class Loop:
    """Trains in this process; each start is a new one of the same job."""

    def __init__(self, store, accumulate=2, samples=22, scaler=None, settings=None, **options):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
        self.accelerator.free_memory()
        self.accelerator.scaler, self.weight = scaler, 1.0 if scaler is None else 16.0
        torch.manual_seed(1)
        model = nn.Linear(job.FEATURES, job.CLASSES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        data = torch.utils.data.Subset(job.AugmentedSamples(), range(samples))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.counted = Counted()
        self.accelerator.register_for_checkpointing(self.counted)
        self.session = holdfast.integrations.accelerate.session(
            self.accelerator, "loop", store=store, every=1, **(settings or {})
        )
        self.seen = {}

    def train_by_hand(self, accumulate):
        """Accumulate without `accelerator.accumulate`; update in every `accumulate`-th batch only."""
        for number, (features, classes, _) in enumerate(self.loader, 1):
            self.accelerator.backward(nn.functional.cross_entropy(self.model(features), classes))
            if number % accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.session.step()

    def train(self, epochs=3, until=None):
        for _ in range(self.session.epoch, epochs):
            for features, classes, samples in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.weight * nn.functional.cross_entropy(self.model(features), classes)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.counted.batches += 1
                here = self.seen.setdefault(self.session.iteration + 1, [])
                here.append((loss.item(), samples.tolist(), self.counted.batches))
                if self.session.iteration + 1 == until:
                    self.session.wait(300)  # for the checkpoint before, so that this iteration has one
                self.session.step(loss=loss)
                if self.session.iteration == until:
                    return self
        return self


class Counted:
    batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


@pytest.mark.parametrize("until", range(1, 10))
def test_an_epoch_that_accumulation_does_not_divide_continues_exactly(tmp_path, until):
    """Six batches of 22 samples an epoch, each update from two or from the last one."""
    whole = Loop(tmp_path / "whole").train()
    whole.session.close()
    broken = Loop(tmp_path / "broken").train(until=until)
    broken.session.close()
    resumed = Loop(tmp_path / "broken")
    assert resumed.session.iteration == until
    resumed.train()
    resumed.session.close()
    assert broken.seen | resumed.seen == whole.seen
    assert sorted(resumed.seen) == list(range(until + 1, 10))
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


@pytest.mark.parametrize(("accumulate", "samples", "updates"), [(1, 18, 5), (2, 18, 3)])
def test_a_start_after_any_update_of_an_epoch_continues_exactly(tmp_path, accumulate, samples, updates):
    """Five batches an epoch, the last of which is an update of its own where two are accumulated."""
    arguments = {"accumulate": accumulate, "samples": samples}
    whole = Loop(tmp_path / "whole", **arguments).train()
    whole.session.close()
    for until in range(1, 2 * updates + 1):
        killed = Loop(tmp_path / str(until), **arguments).train(until=until)
        killed.session.wait(300)
        killed.session._close("SIGKILL")
        resumed = Loop(tmp_path / str(until), **arguments).train()
        resumed.session.close()
        assert killed.seen | resumed.seen == whole.seen
        assert sorted(resumed.seen) == list(range(until + 1, 3 * updates + 1))
        assert torch.equal(resumed.model.weight, whole.model.weight)


def overflowing_scaler():
    """Its first steps overflow, and so does one more every few updates."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)


@pytest.mark.parametrize("until", range(1, 4))
def test_steps_that_the_scaler_skips_are_no_updates(tmp_path, until):
    whole = Loop(tmp_path / "whole", scaler=overflowing_scaler()).train()
    updates = whole.session.iteration
    whole.session.close()
    assert 3 < updates < 9, "some of the nine steps are skipped"
    broken = Loop(tmp_path / "broken", scaler=overflowing_scaler()).train(until=until)
    broken.session.close()
    resumed = Loop(tmp_path / "broken", scaler=overflowing_scaler())
    assert resumed.session.iteration == until
    resumed.train()
    resumed.session.close()
    assert broken.seen | resumed.seen == whole.seen
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert resumed.accelerator.scaler.get_scale() == whole.accelerator.scaler.get_scale()


def test_gradients_that_accumulate_by_hand_are_no_updates(tmp_path):
    loop = Loop(tmp_path, accumulate=1)
    loop.train_by_hand(accumulate=3)
    loop.session.close()
    assert loop.session.iteration == 2


def test_a_closed_session_counts_on(tmp_path):
    loop = Loop(tmp_path, accumulate=1)
    loop.session.close()
    loop.train(epochs=1)
    assert loop.session.iteration == 6


def test_a_loop_over_prepared_loaders_is_not_restorable_in_place(tmp_path):
    with pytest.raises(ValueError, match="restorable_in_place=True: a loop over the loaders"):
        Loop(tmp_path, settings={"restorable_in_place": True})


def test_a_prepared_loader_is_still_a_loader_of_torch(tmp_path):
    loop = Loop(tmp_path)
    assert isinstance(loop.loader, torch.utils.data.DataLoader)
    assert (len(loop.loader), loop.loader.total_batch_size) == (6, 4)
    loop.session.close()


def test_save_state_works_beside_a_session(tmp_path):
    loop = Loop(tmp_path / "store").train(epochs=1)
    loop.accelerator.save_state(str(tmp_path / "state"))
    weight = loop.model.weight.detach().clone()
    with torch.no_grad():
        loop.model.weight.zero_()
    loop.accelerator.load_state(str(tmp_path / "state"))
    loop.session.close()
    assert torch.equal(loop.model.weight, weight)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_stateful_dataloader": True}, "use_stateful_dataloader"),
        ({"dispatch_batches": True}, "dispatch_batches=False"),
    ],
)
def test_loaders_without_a_position_are_refused_with_a_way_out(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Loop(tmp_path, dataloader_config=DataLoaderConfiguration(**options))


def test_a_session_before_prepare_is_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    with pytest.raises(ValueError, match="create the session after the call"):
        holdfast.integrations.accelerate.session(accelerator, "early", store=tmp_path)


@pytest.mark.parametrize("later", [True, False])
def test_what_is_prepared_after_the_session_is_reported(tmp_path, caplog, later):
    loop = Loop(tmp_path)
    if later:
        loop.accelerator.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.1))
    loop.train(epochs=1)
    loop.session.close()
    reported = [each.message for each in caplog.records if "accelerator.prepare was called after" in each.message]
    assert len(reported) == later
    assert all("AcceleratedOptimizer" in each for each in reported)


def test_a_model_that_was_wrapped_for_several_ranks_is_saved_once(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    model = nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        given = nn.parallel.DistributedDataParallel(model)
        session = holdfast.integrations.accelerate.session(accelerator, "wrapped", store=tmp_path, model=given)
        session.checkpoint()
        given(torch.ones(1, 2)).sum().backward()
        accelerator._optimizers[0].step()
        session.step()
        (made,) = session.wait(60)
        session.close()
    finally:
        torch.distributed.destroy_process_group()
    manifest = restore.verify(LocalStore(tmp_path), "wrapped", made.checkpoint)
    assert {key for key in manifest.state if key.startswith("model")} == {"model"}


@pytest.mark.parametrize("environment", [{}, {"ACCELERATE_USE_CPU": "1"}], ids=["unaware", "aware"])
def test_accelerate_that_does_not_know_of_the_ranks_is_named(tmp_path, environment):
    """Without the variable, it wraps no model on CPUs: each rank trains its own."""
    script = Path(__file__).with_name("unaware_script.py")
    done = subprocess.run(
        [sys.executable, *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"), script, tmp_path],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, timeout=400, check=True,
    )  # fmt: skip
    assert done.stderr.count("set ACCELERATE_USE_CPU=1") == (not environment)
    assert "a full copy, because" not in done.stderr
