"""SIGTERM in a training process: train to the next boundary, save if there is time, and exit.

A scheduler that preempts a job sends SIGTERM and kills the job some time later: Kubernetes and Slurm after 30 s by
default. Many send it to each process of the job: GNU `timeout` and `kill -- -PGID` to the process group, systemd
to the control group, Slurm to the job step. So the workers of a data loader receive it as well, and must outlast
the trainer's last iteration: torch raises RuntimeError in the training loop as soon as a worker is killed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

logger = logging.getLogger("holdfast")

T = TypeVar("T")
WorkerInit = Callable[[int], None] | None
"""The `worker_init_fn` of a torch DataLoader."""

EXIT_ASKED = 128 + signal.SIGTERM
"""The exit status with which a shell reports a process that SIGTERM ended."""
SPARE_SECONDS = 1.0
"""The part of the grace period that the exit itself takes."""
REPEAT_SECONDS = 2.0
"""A SIGTERM that follows another one sooner is the same request on a second way: from the kernel to the whole
group, and passed on by a supervisor, by torchrun or by GNU `timeout`."""


class PreemptionHandler:
    """Handles SIGTERM for a session, unless the script handles it itself.

    A second SIGTERM, at least two seconds later, ends the process at once, as does the end of the grace period.

    Args:
        grace_seconds: from the signal to the kill; 0: SIGTERM is left as it is.
    """

    def __init__(self, grace_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_seconds, self._clock = grace_seconds, clock
        self._asked_at: float | None = None
        self._timer: threading.Timer | None = None
        self._pid = os.getpid()
        main = threading.current_thread() is threading.main_thread()
        self._takes = grace_seconds > 0 and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._takes:
            signal.signal(signal.SIGTERM, self._handle)
            multiprocessing.util.register_after_fork(self, _after_fork)

    @property
    def asked(self) -> bool:
        """This process has been told to end."""
        return self._asked_at is not None

    @property
    def left_seconds(self) -> float:
        """Of the grace; all of it where another rank was told, and not this one."""
        waited = 0.0 if self._asked_at is None else self._clock() - self._asked_at
        return max(0.0, self._grace_seconds - waited - SPARE_SECONDS)

    def close(self) -> None:
        """Leave the signal as it was found; the grace still ends."""
        if self._takes and os.getpid() == self._pid and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._takes = False

    def cancel(self) -> None:
        """Whoever told this process to end takes it back: its time is not over then."""
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _end()  # a child process of the script, which has nothing to save
        if self._asked_at is not None:
            if self._clock() - self._asked_at >= REPEAT_SECONDS:
                _end()
            return
        self._asked_at = self._clock()
        # where no boundary comes in time, no later than a scheduler would
        self._timer = threading.Timer(max(0.0, self._grace_seconds - SPARE_SECONDS / 2), _end)
        self._timer.name, self._timer.daemon = "holdfast-grace", True
        self._timer.start()


def begun(loader: Iterable[T]) -> Iterator[T]:
    """Return `iter(loader)`, with loader workers that leave SIGTERM to the trainer.

    They ignore the signal as long as the trainer handles it. The signal is blocked while they start, so that it
    cannot kill one before it has its handler. A fork server is not protected, and its workers end with it.
    """
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn") or not _is_handled_here():
        return iter(loader)
    own: WorkerInit = loader.worker_init_fn
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    if context.get_start_method() == "forkserver":
        # started before the signal is blocked, or it would block the signal in all that the script starts later
        forkserver.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    loader.worker_init_fn = functools.partial(_begin_worker, own)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = own
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _is_handled_here() -> bool:
    """Whether a session of this process, or of the one that it was forked from, handles SIGTERM."""
    return isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), PreemptionHandler)


def _after_fork(leaving: PreemptionHandler) -> None:
    """In a child process of multiprocessing: do the same for a torch DataLoader that the script iterates itself.

    torch replaces the handler that a worker inherits by one in C that ends it; `worker_init_fn` runs later.
    """
    process: Any = multiprocessing.current_process()
    target: Any = getattr(process, "_target", None)
    if getattr(target, "__name__", None) != "_worker_loop" or not _is_handled_here():
        return  # not a worker of torch's DataLoader or of torchdata's
    names, arguments = list(inspect.signature(target).parameters), list(process._args)
    if "init_fn" in names and (place := names.index("init_fn")) < len(arguments):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        arguments[place] = functools.partial(_begin_worker, arguments[place])
        process._args = tuple(arguments)


def _begin_worker(own: WorkerInit, worker: int) -> None:
    """Replace torch's handler of SIGTERM in a loader worker, then call the `worker_init_fn` of the script."""
    signal.signal(signal.SIGTERM, _leave_to_trainer)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    trainer = multiprocessing.parent_process()
    if trainer is not None and trainer.pid != os.getppid():
        # a fork server is between them: a worker would wait for its end, and it waits for that of its workers
        threading.Thread(target=_end_with, args=(trainer,), name="holdfast-parent", daemon=True).start()
    if own is not None:
        own(worker)


def _end_with(trainer: Any) -> None:
    trainer.join()
    os._exit(0)


def _leave_to_trainer(signum: int, frame: FrameType | None) -> None:
    """Ignore the signal while the trainer handles it. Afterwards it is exiting: end, as torch's workers do."""
    trainer = multiprocessing.parent_process()
    if trainer is None or trainer.pid is None or not _catches_sigterm(trainer.pid):
        os._exit(0)


def _catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM; False where there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _end() -> None:
    """End as if the signal had its default action."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    logger.error("SIGTERM grace period expired; exiting without a final checkpoint")
    os._exit(EXIT_ASKED)
