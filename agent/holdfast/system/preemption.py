"""SIGTERM in a training process: train to the next boundary, save if there is time, and exit.

A scheduler that preempts a job sends SIGTERM and kills the job some time later: Kubernetes and Slurm after 30 s by
default. Many send it to each process of the job: GNU `timeout` and `kill -- -PGID` to the process group, systemd
to the control group, Slurm to the job step. So the workers of a data loader receive it as well, and must outlast
the trainer's last iteration: torch raises RuntimeError in the training loop as soon as a worker is killed.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from holdfast.system.process_facts import die_with_parent

logger = logging.getLogger("holdfast")

T = TypeVar("T")
WorkerInit = Callable[[int], None] | None
"""The `worker_init_fn` of a torch DataLoader."""

EXIT_SIGTERM = 128 + signal.SIGTERM
"""Exit status that a shell reports for a process killed by SIGTERM."""
SPARE_SECONDS = 1.0
"""Part of the grace period that is reserved for the exit itself."""
REPEAT_SECONDS = 2.0
"""A second SIGTERM within this time is the same request: it is sent to the process group, and also forwarded by a
supervisor, torchrun or GNU `timeout`."""


class PreemptionHandler:
    """Handles SIGTERM for a session, unless the script handles it itself.

    A second SIGTERM, at least REPEAT_SECONDS later, ends the process at once, as does the end of the grace period.

    Args:
        grace_seconds: time from the signal to the kill; 0 leaves SIGTERM unhandled.
    """

    def __init__(self, grace_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_seconds, self._clock = grace_seconds, clock
        self.is_requested = False
        """This process has received SIGTERM."""
        self._received_at: float | None = None
        self._timer: threading.Timer | None = None
        self._pid, self.main_thread = os.getpid(), threading.main_thread().ident
        main = threading.current_thread() is threading.main_thread()
        self._is_installed = grace_seconds > 0 and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._handle)
            multiprocessing.util.register_after_fork(self, _after_fork)

    @property
    def grace_left_seconds(self) -> float:
        """Rest of the grace period; all of it if only another rank has received SIGTERM."""
        waited = 0.0 if self._received_at is None else self._clock() - self._received_at
        return max(0.0, self._grace_seconds - waited - SPARE_SECONDS)

    def close(self) -> None:
        """Restore the signal handler; the timer of the grace period keeps running."""
        if self._is_installed and os.getpid() == self._pid and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_installed = False

    def cancel(self) -> None:
        """Cancel the timer of the grace period."""
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _end()  # a forked child has nothing to save
        if self._received_at is not None:
            if self._clock() - self._received_at >= REPEAT_SECONDS:
                _end()
            return
        self._received_at, self.is_requested = self._clock(), True
        # if no boundary comes in time, exit before a scheduler kills the process
        self._timer = threading.Timer(max(0.0, self._grace_seconds - SPARE_SECONDS / 2), _end)
        self._timer.name, self._timer.daemon = "holdfast-grace", True
        self._timer.start()


def iterate_loader(loader: Iterable[T]) -> Iterator[T]:
    """Return `iter(loader)`, with workers that ignore SIGTERM while the trainer handles it, and end when it dies.

    The signal is blocked while they start, so that it cannot kill a worker before its handler is installed. A fork
    server is not protected, and its workers end with it.
    """
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        return iter(loader)
    own: WorkerInit = loader.worker_init_fn
    is_handled = _is_handled_here()
    on_main_thread = threading.current_thread() is threading.main_thread()
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    method = context.get_start_method() if is_handled else None
    if method == "forkserver":
        # start it before the signal is blocked: later processes inherit its signal mask
        forkserver.ensure_running()
    if method == "spawn":
        # its start unblocks the signal, so that it must not come with that of the first worker
        resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if is_handled else ())
    loader.worker_init_fn = functools.partial(_begin_worker, own, is_handled, on_main_thread)
    try:
        return iter(loader)
    finally:
        loader.worker_init_fn = own
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _is_handled_here() -> bool:
    """Return whether a session of this process, or of the process that it was forked from, handles SIGTERM."""
    return isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), PreemptionHandler)


def _after_fork(handler: PreemptionHandler) -> None:
    """Prepare a forked worker of a torch DataLoader that the script iterates without `iterate_loader`.

    torch replaces the inherited handler by one in C that ends the worker; `worker_init_fn` runs after that.
    """
    process: Any = multiprocessing.current_process()
    target: Any = getattr(process, "_target", None)
    if getattr(target, "__name__", None) != "_worker_loop" or not _is_handled_here():
        return  # not a worker of torch or torchdata
    names, arguments = list(inspect.signature(target).parameters), list(process._args)
    if "init_fn" in names and (place := names.index("init_fn")) < len(arguments):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        # a thread keeps its ident in a forked process
        on_main_thread = threading.get_ident() == handler.main_thread
        arguments[place] = functools.partial(_begin_worker, arguments[place], True, on_main_thread)
        process._args = tuple(arguments)


def _begin_worker(own: WorkerInit, ignores_sigterm: bool, on_main_thread: bool, worker: int) -> None:
    """Begin a loader worker: tie its life to the trainer's, then call the `worker_init_fn` of the script.

    A worker that waits for a lock, such as that of torch's result queue, does not notice that its parent died.
    `on_main_thread`: the trainer's main thread started the worker; another thread may end before the trainer.
    """
    if ignores_sigterm:  # replaces torch's handler, which ends the worker
        signal.signal(signal.SIGTERM, _ignore_while_trainer_handles)
        # the end of an interpreter resets a handler to the default, but not an ignored signal
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if on_main_thread and sys.platform == "linux":
        die_with_parent(signal.SIGKILL)
    trainer = multiprocessing.parent_process()
    if trainer is not None and trainer.pid != os.getppid():
        # the parent is a fork server, which waits for its workers, or the trainer is dead
        threading.Thread(target=_end_with, args=(trainer,), name="holdfast-parent", daemon=True).start()
    if own is not None:
        own(worker)


def _end_with(trainer: Any) -> None:
    trainer.join()
    os._exit(0)


def _ignore_while_trainer_handles(signum: int, frame: FrameType | None) -> None:
    """Ignore the signal while the trainer handles it; otherwise end, because the trainer is exiting."""
    trainer = multiprocessing.parent_process()
    if trainer is None or trainer.pid is None or not _catches_sigterm(trainer.pid):
        os._exit(0)


def _catches_sigterm(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM; False without /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _end() -> None:
    """End the process as SIGTERM does by default."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    logger.error("SIGTERM grace period expired; exiting without a final checkpoint")
    os._exit(EXIT_SIGTERM)
