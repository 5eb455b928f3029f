"""Third-party libraries, each configured for speed as its documentation says."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .contender import Contender, fsync_tree
from .dcp_async import join_group_of_one
from .training import BenchmarkTraining


def sync_written(args: Any) -> None:
    """Hook of torch_checkpointing's writer between its last write and its rename."""
    fsync_tree(Path(args.path))


class TorchCheckpointing(Contender):
    """torch_checkpointing: a thread stages in shared memory, a process writes, a lock guards updates."""

    reads_in_place = True
    note = "fsynced by a callback of ours in its writer"

    def __init__(self, *arguments: Any, direct: bool) -> None:
        super().__init__(*arguments)
        from torch_checkpointing import CheckpointManager, CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        cuda = self.training.scale.device == "cuda"
        staging = CheckpointStagerConfig(use_pinned_memory=cuda, use_non_blocking_copy=cuda)
        writing = CheckpointWriterConfig(file_write_max_threads=2)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging, writer_config=writing),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=direct),
                pre_finalize_callback=sync_written,
            )
        )
        self._lock: Any = None

    def prepare(self) -> None:
        self._manager.prewarm_staging(self.training.state())
        self.save(0)
        self.finish()

    def save(self, step: int) -> None:
        self.written.of(self._manager.save(str(self.place(step)), self.training.state()))

    def before_step(self) -> None:
        self._lock = self._manager.lock()
        self._lock.__enter__()

    def after_step(self) -> None:
        self._lock.__exit__(None, None, None)

    def restore(self, fresh: BenchmarkTraining) -> None:
        into = fresh.state()
        found = self._manager.load(str(self.newest), into=into, map_location=fresh.scale.device)
        fresh.optimizer.load_state_dict(found["optimizer"])

    def close(self) -> None:
        self._manager.close()


class TorchSnapshot(Contender):
    reads_in_place = True
    note = "does not sync: fsynced by us after its thread is done"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        from torchsnapshot import Snapshot

        self._snapshot, self._waiter = Snapshot, ThreadPoolExecutor(1)

    def save(self, step: int) -> None:
        self.finish()
        pending = self._snapshot.async_take(str(self.place(step)), self._objects(self.training))
        self.written.of(self._waiter.submit(self._wait, pending, self.newest))

    @staticmethod
    def _wait(pending: Any, path: Path) -> None:
        pending.wait()
        fsync_tree(path)

    def restore(self, fresh: BenchmarkTraining) -> None:
        self._snapshot(str(self.newest)).restore(self._objects(fresh))

    @staticmethod
    def _objects(training: BenchmarkTraining) -> dict[str, Any]:
        return {"model": training.model, "optimizer": training.optimizer}


def save_and_sync(state: dict[str, Any], path: Path, done: Path) -> None:
    """Runs in nvidia-resiliency-ext's process; writes the time of completion to `done`."""
    torch.save(state, path)
    fsync_tree(path)
    done.write_text(str(time.perf_counter()))


class NvidiaResiliency(Contender):
    """nvidia-resiliency-ext: its TorchAsyncCheckpoint needs CUDA, so its parts are combined in the same way."""

    note = "fsynced by us in its process"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
        from nvidia_resiliency_ext.checkpointing.utils import preload_tensors

        self._request, self._preload = AsyncRequest, preload_tensors
        self._calls = AsyncCallsQueue(persistent=True)
        self._told = self.folder.with_name(f"{self.folder.name}.durable")
        join_group_of_one()

    def prepare(self) -> None:
        self.save(0)
        self.finish()

    def save(self, step: int) -> None:
        self.finish()
        state = self.training.state()
        if self.training.scale.device == "cuda":
            state = self._preload(state)
            torch.cuda.synchronize()
        else:
            state = _copied(state)  # `preload_tensors` leaves tensors in host memory as they are, to be torn
        request = self._request(save_and_sync, (state, self.place(step), self._told), [], {})
        self._calls.schedule_async_request(request)

    def end_iteration(self) -> None:
        self._calls.maybe_finalize_async_calls(blocking=False, no_dist=True)

    def durable(self) -> bool:
        self._calls.maybe_finalize_async_calls(blocking=False, no_dist=True)
        return not self._calls.get_num_unfinalized_calls()

    def finish(self) -> float:
        while not self.durable():
            time.sleep(0.001)  # its own wait polls only ten times a second
        return float(self._told.read_text()) if self._told.exists() else time.perf_counter()

    def restore(self, fresh: BenchmarkTraining) -> None:
        fresh.load(torch.load(self.newest, weights_only=True, map_location=fresh.scale.device))

    def close(self) -> None:
        # `AsyncCallsQueue.close` asks a CUDA device what the other ranks did
        self.finish()
        if self._calls.persistent_caller is not None:
            self._calls.persistent_caller.close()


class Lightning(Contender):
    """Lightning: its asynchronous plugin around the standard one."""

    note = "fsynced by us in its thread"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        contender = self

        class SyncedCheckpointIO(TorchCheckpointIO):
            def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
                try:
                    super().save_checkpoint(checkpoint, path, storage_options)
                    fsync_tree(Path(path))
                except BaseException as error:  # `finish` raises it in the training thread
                    contender._saved.set_exception(error)
                else:
                    contender._saved.set_result(None)

        self._plugin = AsyncCheckpointIO(SyncedCheckpointIO())

    def save(self, step: int) -> None:
        self.finish()
        self._saved = Future[None]()
        self.written.of(self._saved)
        self._plugin.save_checkpoint(self.training.state(), self.place(step))

    def restore(self, fresh: BenchmarkTraining) -> None:
        load = self._plugin.load_checkpoint
        fresh.load(load(self.newest, map_location=fresh.scale.device, weights_only=True))

    def close(self) -> None:
        self._plugin.teardown()


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree
