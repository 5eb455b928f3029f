"""Asynchronous saves of torch.distributed.checkpoint: by a thread or a process, with each kind of staging."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.harness import meeting_place

from .contender import CompletionTime, Contender
from .in_loop import load_with_dcp
from .training import BenchmarkTraining


class DcpAsync(Contender):
    """The default: the loop makes a new copy each time.

    `kept` and `overlapped` keep the memory, cache plans and write two files at once. With `overlapped` a thread
    copies, and the next optimizer step waits for it.
    """

    reads_in_place = True

    def __init__(self, *arguments: Any, process: bool, staging: str = "fresh") -> None:
        super().__init__(*arguments)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._staged, self._stager = CompletionTime(), None
        if staging != "fresh":
            cuda = self.training.scale.device == "cuda"
            options = StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=process, use_async_staging=staging == "overlapped",
                use_non_blocking_copy=cuda,
            )  # fmt: skip
            self._stager = DefaultStager(options)
        if process:
            join_group_of_one()

    def prepare(self) -> None:
        self.save(0)  # starts the process and fills the stager's memory
        self.finish()

    def save(self, step: int) -> None:
        self.written.wait()
        saving = dcp.async_save(
            self.training.state(),
            async_checkpointer_type=self._kind,
            no_dist=self._kind is AsyncCheckpointerType.THREAD,
            **(self._tuned(step) if self._stager else {"checkpoint_id": self.place(step)}),
        )
        if isinstance(saving, AsyncSaveResponse):
            self._staged.of(saving.staging_completion)
            saving = saving.upload_completion
        assert isinstance(saving, Future)
        self.written.of(saving)

    def _tuned(self, step: int) -> dict[str, Any]:
        return {
            "storage_writer": FileSystemWriter(self.place(step), thread_count=2),
            "planner": DefaultSavePlanner(enable_plan_caching=True),
            "async_stager": self._stager,
        }

    def before_step(self) -> None:
        self._staged.wait()

    def restore(self, fresh: BenchmarkTraining) -> None:
        load_with_dcp(self, fresh)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def join_group_of_one() -> None:
    os.environ |= meeting_place(0)
    dist.init_process_group("gloo")
